"""Says what a capture holds: network, data, sites with their steps and heads, and what they take on the disk."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cache.keeping import described_sites
from cache.shard import open_shard
from cache.store import Capture
from smelt_interp.errors import run_command
from smelt_interp.plan import label
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, compact, print_table


def site_rows(capture: Capture) -> list[list[Cell]]:
    """The same with what each takes on the disk."""
    manifest = capture.manifest
    sizes: Counter[str] = Counter()
    for shard in manifest.shards:
        with open_shard(capture.path, shard, manifest) as file:
            sizes.update({suffix: file[suffix].id.get_storage_size() for suffix in manifest.sites})
    return [[*row, compact(sizes[str(row[0])]) + "B"] for row in described_sites(manifest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoOptions:
    """What is looked at."""

    capture: Annotated[Path, tyro.conf.Positional]
    """Folder of the capture."""


def command(folder: Path) -> None:
    """Print what a capture holds."""
    capture = Capture(folder)
    manifest, architecture = capture.manifest, capture.architecture
    domains = Counter(name.decode() for name in capture.samples.domain_N)
    recorded = sorted({step for steps, _ in capture.kept.values() for step in steps})
    named = ", ".join(f"{count} {name}" for name, count in domains.items())
    num_bytes = compact(sum(shard.num_bytes for shard in manifest.shards))
    print(
        f"{folder}: {len(capture)} samples of {manifest.num_tokens} tokens ({named}), {num_bytes}B in "
        f"{len(manifest.shards)} {'shard' if len(manifest.shards) == 1 else 'shards'}"
    )
    shape = {name: value for name, value in architecture.to_json().items() if name not in ("steps", "sites")}
    print_table(
        Table(
            "Sites",
            ["site", "one sample", "stored as", "steps", "heads", "on disk"],
            site_rows(capture),
            [
                "steps: " + "; ".join(f"{step} {label(architecture.steps[step])}" for step in recorded),
                *(f"{name}: {value}" for name, value in manifest.request.items() if name not in ("sites", "samples")),
                "architecture: " + ", ".join(f"{name} {value}" for name, value in shape.items()),
                f"digest: {capture.digest}",
                f"recorded by: {manifest.command or '-'}",
            ],
        )
    )


def main() -> None:
    """The command line."""
    command(parse(InfoOptions, prog="python -m cache.info", description=__doc__ or "").capture)


if __name__ == "__main__":
    run_command(main)
