"""How does what a probe measures change while a network trains, and how much of it hangs on the seed?

    python -m probes.over_training RUN [RUN ...] --probe NAME

Each RUN is a folder of `model.training.train`, whose kept states (--keep-every) are measured, or a checkpoint. Several
are seeds of one network: every number is their mean after the same step, and its interval is over seeds (Student's law
over runs), not over documents; of one run it is the probe's own, over documents. With --against, as many runs stand
beside them, seed by seed, and what the runs have over those is paired by seed and document. Every run sees the same
samples. The options of the probe follow its name.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import tyro
from pydantic import Field

from probes.running import catalog, exports, report
from probes.running.command import COUNTING, Measured, Output, measure_subjects, plain_options
from probes.running.probe import Probe, is_scoring
from probes.running.seeds import over_seeds
from probes.running.source import Source, Subject, running_subject
from probes.statistics.quantities import Record, as_table, error_bars, rows_of
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError, run_command
from smelt_interp.input_files import read_input
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.output_files import make_folder
from smelt_interp.terminal.tables import print_table
from smelt_interp.validation import different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from model.training.kept import KeptNetworks

Measure = TypeVar("Measure")
SCHEMA = "smelt.over_training"
FILE = "over-training-{probe}.json"
"""In the folder of --out."""
MOST_BYTES = 256 * 2**20
OTHER = "the other"
"""What the network of --against is called, of every seed."""
PROBE = "--probe"


@validated
class Runs:
    """Which networks."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of runs, one a seed."""
    probe: str = "domain_loss"
    """Name of a probe."""
    against: tuple[Path, ...] = ()
    """As many runs of another network, seed by seed."""
    at: tuple[Annotated[int, Field(ge=1, le=10**9)], ...] = ()
    """Steps to measure; none means all that every run has kept."""

    def __post_init__(self) -> None:
        if self.at:
            different("--at", self.at)
        if self.against and len(self.against) != len(self.runs):
            got = f"{len(self.against)} and {len(self.runs)}"
            raise UserError(f"--against must name as many runs as are measured; got {got}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Generic[Measure]):
    """The parsed command line."""

    which: Runs
    data: DataOptions
    measure: Measure
    output: Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run after one step."""

    step: int
    run: Path
    measured: tuple[Measured, ...]


def parsed(argv: Sequence[str]) -> Asked[object]:
    """The command line; which options there are depends on the probe that it names."""
    named = [value for flag, value in pairwise(argv) if flag == PROBE]
    named += [word.removeprefix(f"{PROBE}=") for word in argv if word.startswith(f"{PROBE}=")]
    probe = catalog.load(named[-1] if named else Runs().probe)
    return parse(
        Asked[probe.Options],  # type: ignore[name-defined]  # the class of this probe
        args=argv,
        prog="python -m probes.over_training",
        description=__doc__ or "",
        config=(tyro.conf.OmitArgPrefixes,),
        default=Asked(which=Runs(), data=probe.DATA, measure=probe.Options(), output=Output()),
    )


def shared_steps(runs: Sequence["KeptNetworks"], at: Sequence[int]) -> tuple[int, ...]:
    """The steps that every run has kept, or those of them that are asked for. Raises UserError where there are none."""
    shared = [step for step in runs[0].networks if all(step in run.networks for run in runs)]
    if missing := [step for step in at if step not in shared]:
        have = ", ".join(map(str, shared[:8])) or "none"
        raise UserError(f"every run must have kept step {missing[0]}; all have {have}: train with --keep-every")
    if not shared:
        kept = "; ".join(f"{run.folder.name} {' '.join(map(str, [*run.networks][:4]))}" for run in runs[:4])
        raise UserError(f"runs must have kept a step that all have; got {kept:.120}: train with the same --keep-every")
    return tuple(at) or tuple(shared)


def points(asked: Asked[object], probe: Probe) -> Iterator[Point]:
    """Every run after every step, measured on the same samples."""
    from model.training.kept import END, config_of, kept, network_at, training_of

    which = asked.which
    for name, folders in (("runs", which.runs), ("--against", which.against)):
        if folders:
            different(name, tuple(map(training_of, folders)))
    runs, others = ([kept(folder) for folder in folders] for folders in (which.runs, which.against))
    for first, *more in (each for each in (runs, others) if each):
        for run in more:
            if config_of(run) != config_of(first):
                raise UserError(f"runs must be seeds of one network; got {first.folder} and {run.folder}, which differ:"
                                " another network's runs follow --against")  # fmt: skip

    def subject(run: "KeptNetworks", step: int, name: str, seen: dict[str, Path]) -> Subject:
        found = running_subject(name, network_at(run, step), {"run": str(run.folder), "step": step}, Source())
        # One training under two names would pass for two seeds.
        if (twin := seen.setdefault(str(found.described["weights"]), run.folder)) != run.folder:
            raise UserError(f"runs must have weights of their own; got {twin} and {run.folder} with the same")
        return found

    for step in shared_steps([*runs, *others], which.at):
        seen: dict[str, Path] = {}
        for at, run in enumerate(runs):
            when = "" if step == END else f", step {step}"
            subjects = [subject(run, step, f"{run.folder.resolve().name}{when}", seen)]
            subjects += [subject(others[at], step, OTHER, seen)] if others else []
            measured = measure_subjects(which.probe, probe, asked.data, asked.measure, tuple(subjects))
            yield Point(step=step, run=run.folder, measured=measured)


def rows(found: Sequence[Point]) -> dict[str, list[Record]]:
    """By name of the samples, the rows of all runs together after each step, with the step as a column."""
    together: dict[str, list[Record]] = {}
    for step in dict.fromkeys(point.step for point in found):
        of_step = [point for point in found if point.step == step]
        for index, of_set in enumerate(of_step[0].measured):
            joined = over_seeds([point.measured[index].joined()[0] for point in of_step])
            together.setdefault(of_set.data.name, []).extend({**row, "step": step or "end"} for row in joined)
    # A quantity's steps stand together, as they come in training.
    return {name: _by_quantity(of_set) for name, of_set in together.items()}


def _by_quantity(of_set: Sequence[Record]) -> list[Record]:
    names = [name for name in report.keys_of(of_set) if name != "step"]
    order: dict[tuple[object, ...], list[Record]] = {}
    for row in of_set:
        order.setdefault((row["level"], *(row.get(name) for name in names)), []).append(row)
    return [row for same in order.values() for row in same]


def scores(found: Sequence[Point], probe: Probe) -> list[Record]:
    """The rows of scores.csv of every run and step: pairs are named by seed and step, residuals averaged by step."""
    if not is_scoring(probe):
        return []
    seeds = list(dict.fromkeys(point.run for point in found))
    return [
        {**row, "group": f"step {point.step}", "pair": f"seed {seeds.index(point.run) + 1}, step {point.step}"}
        for point in found
        for row in probe.scores(point.measured)
    ]


def figures(of_sets: dict[str, list[Record]], title: str) -> "list[Figure]":
    """A figure a headline quantity of each set: a line for each place, over the steps."""
    from plotly.graph_objects import Figure, Scatter

    drawn: list[Figure] = []
    for name, of_set in of_sets.items():
        shown = [row for row in of_set if row["level"] == "headline" and row["value"] is not None]
        for quantity in dict.fromkeys(row["quantity"] for row in shown):
            of = [row for row in shown if row["quantity"] == quantity]
            keys = [key for key in report.keys_of(of) if key not in ("quantity", "step")]
            figure: Figure = Figure()
            lines: dict[str, list[Record]] = {}
            for row in of:
                lines.setdefault(", ".join(f"{key} {row[key]}" for key in keys if row.get(key) is not None), []).append(
                    row
                )
            for line, at in lines.items():
                steps, values = ([row[name] for row in at] for name in ("step", "value"))
                figure.add_trace(Scatter(x=steps, y=values, error_y=error_bars(at), name=line))
            figure.update_layout(title=f"{title}: {quantity} on {name}", xaxis_title="step", yaxis_title=str(quantity))
            drawn.append(figure)
    return drawn


def describe(
    asked: Asked[object], found: Sequence[Point], of_sets: dict[str, list[Record]], line: str
) -> dict[str, object]:
    """The whole result: what was asked, the rows of all runs together, and those of each."""
    by_run = [
        {"run": str(point.run), "step": point.step, "data": each.data.name, "rows": each.joined()[0]}
        for point in found
        for each in point.measured
    ]
    return {"schema": SCHEMA, "probe": asked.which.probe, "counting": COUNTING, "options": plain_options(asked.measure),
            "data_options": plain_options(asked.data), "runs": [str(run) for run in asked.which.runs],
            "against": [str(run) for run in asked.which.against], "results": of_sets, "by_run": by_run,
            "command": line}  # fmt: skip


class Written(NamedTuple):
    """What --out wrote."""

    title: str
    results: dict[str, list[Record]]
    """Rows by name of the samples."""
    command: str


def read_result(path: Path) -> Written:
    """A result in a folder of --out. Raises UserError for what is none."""
    try:
        said = json.loads(read_input(path, "a result over training", MOST_BYTES))
        results = {name: rows_of(rows, "step", "value", "low", "high") for name, rows in said["results"].items()}
        if said["schema"] != SCHEMA:
            raise ValueError(f"it is no {SCHEMA}")
        return Written(f"{catalog.load(str(said['probe'])).TITLE} over training", results, str(said["command"]))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise UserError(
            f"{path} must be what probes.over_training --out wrote; {error!s:.80}: write it again"
        ) from None


def main() -> None:
    """Measure every kept step of every run, print the rows over steps, and write what --out asks for."""
    asked = parsed(sys.argv[1:])
    if not asked.which.runs:
        raise UserError("runs must be one or more folders; got none")
    probe, out = catalog.load(asked.which.probe), asked.output.out
    if out is not None:
        make_folder(out)  # before minutes are spent
    found = list(points(asked, probe))
    of_sets = rows(found)
    document = describe(asked, found, of_sets, shlex.join(["python", "-m", "probes.over_training", *sys.argv[1:]]))
    title = f"{probe.TITLE} over training"
    if out is not None:
        path = out / FILE.format(probe=asked.which.probe)
        name = path.stem
        report.write_text(path, report.json_text(document))
        facts = {key: document[key] for key in ("probe", "runs", "against", "command")}
        report.write_text(out / f"{name}.html", exports.html_text(figures(of_sets, title), title, facts))
        for data, of_set in of_sets.items():
            report.write_text(out / f"{name}-{Path(data).stem}.csv", as_table(of_set).to_csv(index=False))
        if scored := scores(found, probe):
            report.write_text(out / "scores.csv", as_table(scored).to_csv(index=False))
    if asked.output.json:
        sys.stdout.write(report.json_text(document))
        return
    seeds = len(asked.which.runs)
    kind = f"seeds, n {seeds} runs" if seeds > 1 else "documents"
    others = {OTHER: OTHER} if asked.which.against else {}
    for data, of_set in of_sets.items():
        print_table(report.readable(of_set, f"{title}: {data}", others, asked.output.level))
    print(f"{COUNTING}; [..] is a 95% interval over {kind}")


if __name__ == "__main__":
    run_command(main)
