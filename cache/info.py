"""Says what a capture holds: network, data, sites with their steps and heads, and what they take on the disk."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cache.store import Capture
from smelt_interp.errors import run_command
from smelt_interp.plan import label
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, compact, print_table


def site_rows(capture: Capture) -> list[list[Cell]]:
    """One row a site: suffix, axes lengths by sample, storage type, steps, heads, bytes on the disk."""
    rows: list[list[Cell]] = []
    with capture.file("read") as file:
        for suffix, (steps, heads) in capture.kept.items():
            dataset = file[suffix]
            rows.append(
                [
                    suffix,
                    " x ".join(map(str, dataset.shape[2:])),
                    str(dataset.dtype),
                    f"{len(steps)} of {len(capture.architecture.steps)}",
                    ", ".join(str(head + 1) for head in heads) or "-",
                    compact(dataset.id.get_storage_size()) + "B",
                ]
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is looked at."""

    file: Annotated[Path, tyro.conf.Positional]
    """Capture file."""


def command(file: Path) -> None:
    """Print what a capture holds."""
    capture = Capture(file)
    num_samples, num_tokens = capture.samples.ids_NT.shape
    domains = Counter(name.decode() for name in capture.samples.domain_N)
    recorded = sorted({step for steps, _ in capture.kept.values() for step in steps})
    named = ", ".join(f"{count} {name}" for name, count in domains.items())
    print(f"{file}: {num_samples} samples of {num_tokens} tokens ({named}), {compact(file.stat().st_size)}B")
    print_table(
        Table(
            "Sites",
            ["site", "one sample", "stored as", "steps", "heads", "on disk"],
            site_rows(capture),
            [
                "steps: " + "; ".join(f"{step} {label(capture.architecture.steps[step])}" for step in recorded),
                *(f"{name}: {value}" for name, value in capture.request.items() if name not in ("sites", "samples")),
                "architecture: "
                + ", ".join(f"{name} {value}" for name, value in capture.architecture.to_json().items()),
                f"digest: {capture.digest}",
                f"recorded by: {capture.command or '-'}",
            ],
        )
    )


def main() -> None:
    """The command line."""
    command(parse(Options, prog="python -m cache.info", description=__doc__ or "").file)


if __name__ == "__main__":
    run_command(main)
