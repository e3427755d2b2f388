"""Every probe on a checkpoint, the networks beside it, and itself untrained, from captures that stay for the dashboard.

    python -m probes --ckpt checkpoints/demo-smelt --against checkpoints/demo-baseline

Each network runs once on each set of samples; a capture that is there already is used as it is, and an interrupted one
goes on. One pass over a capture feeds every probe. One screen shows what stands for each of them, and whether the
figures that the paper reports are found here.
"""

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from probes import reproduction
from probes.running import catalog, ranks, report
from probes.running.claims import DOMAINS, LENGTH
from probes.running.command import (
    COUNTING,
    INTERVAL,
    Measured,
    Output,
    Run,
    as_json,
    describe,
    measure_set,
)
from probes.running.depth import AT_DEPTH
from probes.running.probe import Probe, refusal
from probes.running.source import Source, Subject, open_subjects, sample_sets
from probes.running.stored import keep_result
from probes.statistics.grid import Cell
from probes.statistics.quantities import NULL_PREFIX, OTHER_PREFIX, Record
from smelt_interp.architecture import Architecture
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import run_command
from smelt_interp.looped_span import OpeningOptions, unlooped
from smelt_interp.sites import SITES
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from cache.record import RecordOptions

SCHEMA = "smelt.results"


@validated
class EveryProbe(OpeningOptions):
    """What is recorded and measured."""

    ckpt: Path
    """Folder of the checkpoint, ours or one of another family that transformers loads."""
    against: tuple[Path, ...] = ()
    """Folders of checkpoints to measure beside it as they are, such as its Baseline."""
    captures: Path = Path("captures")
    """Folder of the captures."""
    samples: Annotated[int, Field(ge=1, le=10**6)] = 64
    """Rows of each set of samples."""
    episodes: Annotated[int, Field(ge=1, le=10**6)] = 256
    """Dyck episodes at each number of shots, for the in-context curve."""
    json: bool = False
    """Print every result as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """One set of samples, and the probes that read it."""

    name: str
    data: DataOptions
    probes: Mapping[str, tuple[Probe, object]]

    def sites(self, architecture: Architecture) -> tuple[str, ...]:
        """What these probes read of a network, as far as it computes it."""
        read = {suffix for probe, _ in self.probes.values() for suffix in probe.needs(architecture)}
        return tuple(suffix for suffix in SITES if suffix in read and suffix in architecture.sites)


def groups(options: EveryProbe) -> tuple[SampleGroup, ...]:
    """The sets of samples that the probes of the catalog are measured on by default, each once."""
    found: dict[DataOptions, dict[str, tuple[Probe, object]]] = {}
    for name in catalog.NAMES:
        probe = catalog.load(name)
        several = len(probe.DATA.shots) > 1
        rows = options.episodes if several else options.samples
        for data in probe.DATA.data:
            asked = replace(probe.DATA, data=(data,), samples=rows)
            found.setdefault(asked, {})[name] = (probe, probe.Options())
    return tuple(
        SampleGroup(name=f"{data.data[0]}-shots" if len(data.shots) > 1 else data.data[0], data=data, probes=probes)
        for data, probes in found.items()
    )


def record_all(options: EveryProbe, group: SampleGroup, command: str) -> list[Path]:
    """The captures of one set of samples: the checkpoint's, those beside it, the untrained network's."""
    from cache.record import RecordOptions, record_checkpoint
    from model.families.opening import open_network

    captures = []
    asked = RecordOptions(
        ckpt=options.ckpt, out=options.captures, data=group.data, loop=options.loop, visits=options.visits,
        loop_scale=options.loop_scale, trust_remote_code=options.trust_remote_code,
        allow_download=options.allow_download,
    )  # fmt: skip
    others = [replace(unlooped(asked), ckpt=ckpt) for ckpt in options.against]
    for each in (asked, *others, replace(asked, untrained=True)):
        sites = group.sites(open_network(each.ckpt, each.opening()).architecture)
        out = options.captures / f"{_capture_name(each)}-{group.name}"
        with contextlib.redirect_stdout(sys.stderr):
            record_checkpoint(replace(each, out=out, sites=sites), command)
        captures.append(out)
    return captures


def _capture_name(asked: "RecordOptions") -> str:
    """The network's name: its folder's, the span that is looped, and that it is untrained."""
    words = [asked.ckpt.resolve().name]
    if asked.loop:
        words += ["layers", f"{asked.loop}x{asked.visits}"]
        words += [] if asked.loop_scale == "1/r" else ["scale", str(asked.loop_scale)]
    return "-".join([*words, "untrained"] if asked.untrained else words)


def measure_group(group: SampleGroup, captures: Sequence[Path]) -> tuple[dict[str, Measured], list[str]]:
    """Each of the group's probes on its captures, kept beside the first; the second part says which cannot be."""
    source = Source(capture=captures[0], against=tuple(captures[1:]))
    subjects = open_subjects(source, group.data.seed)
    refused = {name: refusal(probe.needs(subjects[0].architecture), subjects[0].architecture)
               for name, (probe, _) in group.probes.items()}  # fmt: skip
    able = {name: asked for name, asked in group.probes.items() if not refused[name]}
    (data,) = sample_sets(subjects[0], group.data)
    measured = measure_set(able, data, subjects)
    for name, (probe, options) in able.items() if ranks.is_first_rank() else ():
        words = ["--capture", captures[0], "--against", *captures[1:]]
        asked = Run(source=source, data=probe.DATA, measure=options, output=Output())
        line = shlex.join(["python", "-m", f"probes.{name}", *map(str, words)])
        document = describe(asked, [measured[name]], line)
        keep_result(captures[0], document, report.json_text(document))
    return measured, [f"{name}: {reason}" for name, reason in refused.items() if reason]


# One screen


def overview(measured: Mapping[tuple[str, str], Measured], title: str) -> Table:
    """A row for each headline that stands for a probe, with a column a network for each set of samples."""
    columns: list[str] = []
    body: dict[str, dict[str, Cell]] = {}
    for (group, _), each in measured.items():
        of_set = group.removesuffix("-shots")
        cells = ["value", *(OTHER_PREFIX + subject.name for subject in each.subjects[1:])]
        headers = {cell: f"{of_set} {name}" for cell, name in zip(cells, _names(each.subjects, group), strict=True)}
        columns += [header for header in (*headers.values(), f"{of_set} null") if header not in columns]
        for row in _standing_for(each):
            line = body.setdefault(_about(row), {})
            line.update({header: row.get(cell) for cell, header in headers.items()})
            line[f"{of_set} null"] = next(
                (
                    row[name]
                    for name in row
                    if name.startswith(NULL_PREFIX) and not name.endswith(AT_DEPTH) and row[name] is not None
                ),
                None,
            )
    rows = [[about, *(report.cell_text(line.get(column)) for column in columns)] for about, line in body.items()]
    return Table(title, ["", *columns], rows)


def _names(subjects: Sequence[Subject], group: str) -> list[str]:
    """What sets the networks apart: their names without the set's, and without the words that all begin with."""
    names = ["untrained" if each.untrained else each.name.removesuffix(f"-{group}") for each in subjects]
    trained = [name.split("-") for name, each in zip(names, subjects, strict=True) if not each.untrained]
    shared = 0
    while len(trained) > 1 and all(
        len(words) > shared + 1 and words[shared] == trained[0][shared] for words in trained
    ):
        shared += 1
    return [name if each.untrained else "-".join(name.split("-")[shared:])
            for name, each in zip(names, subjects, strict=True)]  # fmt: skip


def _standing_for(measured: Measured) -> list[Record]:
    return [
        row
        for where in measured.probe.OVERVIEW
        for row in measured.joined()[0]
        if row["level"] == "headline" and row["value"] is not None and where.items() <= row.items()
        and " - " not in str(row.get("visit"))
    ]  # fmt: skip


def _about(row: Record) -> str:
    words = [f"{name} {row[name]}" for name in ("visit", "shots") if row.get(name) is not None]
    return ", ".join([str(row["quantity"]), *words])


def main() -> None:
    """Record, measure, keep, and show one screen."""
    options = parse(EveryProbe, prog="python -m probes", description=__doc__ or "")
    command = shlex.join(["python", "-m", "probes", *sys.argv[1:]])
    found: dict[tuple[str, str], Measured] = {}
    refused: dict[str, None] = {}
    captures: dict[str, list[Path]] = {}
    with ranks.joined():
        for group in groups(options):
            captures[group.name] = record_all(options, group, command)
            measured, reasons = measure_group(group, captures[group.name])
            found |= {(group.name, name): each for name, each in measured.items()}
            refused |= dict.fromkeys(reasons)
        if not ranks.is_first_rank():
            return
    # One screen holds the mechanism; what a pair gains is the whole card's: `probes.reproduction`.
    card = reproduction.rows({key: (each,) for key, each in found.items() if key[1] not in (DOMAINS, LENGTH)})
    if options.json:
        results = [{"group": group, "probe": name, **as_json(each)} for (group, name), each in found.items()]
        document = {"schema": SCHEMA, "command": command, "results": results, "paper": card, "refused": list(refused)}
        sys.stdout.write(report.json_text(document))
        return
    name = options.ckpt.resolve().name
    name += f", layers {options.loop} run {options.visits} times" if options.loop else ""
    print_table(overview(found, f"{name}: what stands for each probe, mean over the looped layers"))
    print_table(reproduction.table(card, name))
    for line in (*refused, f"{COUNTING}; {INTERVAL}"):
        print(line)
    first, *others = map(str, next(iter(captures.values())))
    print(f"all rows of a probe: python -m probes.NAME --capture {first} --against {' '.join(others)} --level head")
    print(f"NAME: {', '.join(catalog.NAMES)}; everything as JSON: {command} --json")


if __name__ == "__main__":
    run_command(main)
