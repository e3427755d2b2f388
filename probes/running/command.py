"""The command that every probe has: read arguments, open networks, measure, write, print.

Options come from the dataclasses themselves: where the batches come from (`source.Source`), which samples
(`DataOptions`), what is measured (the probe's `Options`), and what is done with the result (`Output`).
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np

import smelt_interp
from cache.batch import Batch
from probes.running import exports, ranks, report
from probes.running.depth import at_depth
from probes.running.probe import (
    NEEDS_A_NETWORK,
    Probe,
    Result,
    accumulate,
    answers,
    is_checking,
    is_choosing,
    is_choosy,
    is_paired,
    is_reading,
    is_scoring,
    needed_sites,
    read_sites,
    refusal,
)
from probes.running.source import FIRST_TOKEN, START, UNTRAINED, SampleSet, Source, Subject, open_subjects, sample_sets
from probes.running.stored import keep_result
from probes.statistics.grid import Cell, Level, headline_loops
from probes.statistics.quantities import Record, as_table
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.from_one import as_typed
from smelt_interp.terminal.output_files import make_folder
from smelt_interp.terminal.progress import Progress
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

Measure = TypeVar("Measure")
SCHEMA = "smelt.result"
COUNTING = "layers, visits, heads and keys count from 1"
INTERVAL = "[..] is a 95% interval over documents"


@validated
class Output:
    """What is done with the result."""

    json: bool = False
    """Print the result as JSON instead of a table."""
    out: Path | None = None
    """Folder to write the figures (HTML), the rows (CSV) and the result (JSON) to."""
    level: Level = "headline"
    """Rows of the table: headline; layer adds one a step, split parts of the samples; head adds one a step and head.
    CSV and JSON have all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[Measure]):
    """The parsed command line."""

    source: Source
    data: DataOptions
    measure: Measure
    output: Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One probe on one set of samples, by every network that it can measure."""

    name: str
    probe: Probe
    options: object
    data: SampleSet
    subjects: tuple[Subject, ...]
    results: tuple[Result, ...]
    """One a network, in the same order."""
    left_out: tuple[str, ...] = ()
    """Networks beside it that it cannot measure, and why."""

    def joined(self) -> tuple[list[Record], list[str]]:
        """The first network's rows with the other networks' numbers beside them, then what it has over each other one
        that was trained, and what is to be said about them."""
        rows, notes = self.results[0].rows(), list(self.left_out)
        more: list[Record] = []
        for subject, result in zip(self.subjects[1:], self.results[1:], strict=True):
            once = not subject.architecture.loops
            rows, said = report.join_networks(rows, result.rows(), subject.name, once=once)
            notes += said
            if once and not subject.untrained and self.subjects[0].architecture.loops:
                rows, said = at_depth(rows, self.subjects[0].architecture, result.rows(), subject.name)
                notes += said
            more += [] if subject.untrained else [{**row, "against": subject.name} for row in self.over(result)]
        return rows + more, notes

    def over(self, other: Result) -> list[Record]:
        """What the first network has over another, where the probe says so."""
        own = self.results[0]
        if not is_paired(self.probe) or own.totals is None or other.totals is None:
            return []
        return [row for quantity in self.probe.against(own.totals, other.totals) for row in quantity.rows()]

    def table(self) -> "DataFrame":
        """The same as a pandas table."""
        return as_table(self.joined()[0])

    def tables(self, level: Level) -> list[Table]:
        """The rows up to a level as a person reads them: a table, or one a quantity where the probe says so."""
        rows, notes = self.joined()
        kinds = dict.fromkeys(row["quantity"] for row in report.up_to(rows, level))
        if len(kinds) < 2 or not getattr(self.probe, "TABLE_A_QUANTITY", False):
            return [self._readable(rows, notes, level)]
        found = [self._readable([row for row in rows if row["quantity"] == kind], [], level) for kind in kinds]
        return [*found[:-1], found[-1]._replace(notes=[*found[-1].notes, *notes])]

    def readable(self, level: Level = "headline") -> Table:
        """The rows up to a level as a person reads them."""
        return self._readable(*self.joined(), level)

    def _readable(self, rows: list[Record], notes: list[str], level: Level) -> Table:
        first, result = self.subjects[0], self.results[0]
        counted = f"{result.documents} documents, {result.tokens} tokens"
        title = f"{self.probe.TITLE}: {first.name} on {self.data.name} ({counted})"
        others = report.short_names(first.name, [subject.name for subject in self.subjects[1:]])
        return report.readable(rows, title, others, level, notes)


Measuring = Callable[[str, Probe, Run[object]], tuple[Measured, ...]]
"""How a command answers: `measure_all` of one probe."""


def main(module: ModuleType, measure: Measuring | None = None) -> None:
    """Run a probe's command on `sys.argv`; a user's mistake ends with one line and exit code 2.

    measure: what answers, for a command that is made of several probes, in place of `measure_all`.
    """
    probe = cast("Probe", module)
    name = str(module.__spec__.name if module.__spec__ else module.__name__).rpartition(".")[2]
    run_command(lambda: _command(name, probe, sys.argv[1:], measure or measure_all))


def parse(name: str, probe: Probe, argv: Sequence[str]) -> Run[object]:
    """The command line as dataclasses; help is their docstrings."""
    import tyro

    from smelt_interp.terminal import (
        command_line,  # tyro and what it brings are slow to import, and the dashboard parses nothing
    )

    return command_line.parse(
        Run[probe.Options],  # type: ignore[name-defined]  # the class of this probe
        args=argv,
        prog=f"python -m probes.{name}",
        description=probe.__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
        default=Run(source=Source(), data=probe.DATA, measure=probe.Options(), output=Output()),
    )


def _command(name: str, probe: Probe, argv: Sequence[str], measure: Measuring) -> None:
    asked = parse(name, probe, argv)
    if asked.output.out is not None:
        make_folder(asked.output.out)  # before minutes are spent
    with ranks.joined():
        measured = measure(name, probe, asked)
        if not ranks.is_first_rank():
            return
    document = describe(asked, measured, shlex.join(["python", "-m", f"probes.{name}", *argv]))
    text = report.json_text(document)
    # Files first: whoever reads what is printed may close the pipe.
    said = remarks(document)
    if asked.output.out is not None:
        write_folder(asked.output.out, measured, document, text)
    if asked.source.capture is not None:
        said.append(keep_result(asked.source.capture, document, text))
    if asked.output.json:
        sys.stdout.write(text)
        return
    for each in measured:
        for table in each.tables(asked.output.level):
            print_table(table)
    for line in said:
        print(line)


def measure_all(name: str, probe: Probe, asked: Run[object]) -> tuple[Measured, ...]:
    """A probe on every set of samples, one a name of the data options or a domain of the capture.

    Raises UserError for what cannot be opened, read or measured, and for data options beside a capture.
    """
    return measure_subjects(name, probe, asked.data, asked.measure, open_asked(probe, asked))


def measure_subjects(
    name: str, probe: Probe, data: DataOptions, options: object, subjects: tuple[Subject, ...]
) -> tuple[Measured, ...]:
    """A probe on every set of samples, by networks that are open. Raises UserError as `measure_all` does."""
    probes = {name: (probe, options)}
    if is_choosing(probe):
        sets = probe.choose_samples(subjects[0], data, options)
    else:
        sets = sample_sets(subjects[0], data)
    return tuple(measure_set(probes, each, subjects)[name] for each in sets)


def open_asked(probe: Probe, asked: Run[object]) -> tuple[Subject, ...]:
    """The networks that a command names. Raises UserError as `measure_all` does."""
    if asked.source.capture is not None and asked.data != probe.DATA:
        raise UserError("data options must be left out with --capture, whose samples are fixed; got other values")
    if is_checking(probe):
        probe.check_data(asked.data)
    if is_choosy(probe):
        return open_subjects(asked.source, asked.data.seed, partial(probe.check_network, options=asked.measure))
    return open_subjects(asked.source, asked.data.seed)


def measure_set(
    probes: Mapping[str, tuple[Probe, object]],
    data: SampleSet,
    subjects: Sequence[Subject],
    *,
    by_sample: bool = False,
) -> dict[str, Measured]:
    """Every probe on one set of samples, one pass a network; of several ranks, the first has the results.

    Raises UserError when the first network cannot be measured.
    """
    results: dict[str, list[tuple[Subject, Result]]] = {name: [] for name in probes}
    left_out: dict[str, list[str]] = {name: [] for name in probes}
    for subject in subjects:
        # Which probes this network can answer; the first must answer all.
        able = {}
        for name, (probe, options) in probes.items():
            recorded = not is_reading(probe) and subject.network is None
            needed = needed_sites(probe, subject.architecture, options)
            reason = NEEDS_A_NETWORK if recorded else refusal(needed, subject.architecture)
            if reason and subject is subjects[0]:
                instead = f"; {probe.INSTEAD}" if hasattr(probe, "INSTEAD") and not recorded else ""
                raise UserError(f"{probe.TITLE} cannot be measured; {subject.name}: {reason}{instead}")
            if reason:
                left_out[name].append(f"{subject.name}: {reason}")
            else:
                able[name] = (probe, options)
        # One pass for all of them.
        read = [read_sites(probe, subject.architecture, options) for probe, options in able.values()]
        suffixes = tuple(dict.fromkeys(suffix for each in read for suffix in each))
        loops = headline_loops(subject.architecture, subjects[0].architecture)
        found = {}
        if able:
            batches = _watched(subject.batches(data, suffixes), f"{subject.name} on {data.name}", len(data.samples))
            sums = ranks.merged(
                accumulate(batches, able, network=subject.network, data=data, loops=loops, by_sample=by_sample)
            )
            found = answers(sums, able) if ranks.is_first_rank() else {}
        for name, result in found.items():
            results[name].append((subject, result))
    return {
        name: Measured(
            name=name,
            probe=probe,
            options=options,
            data=data,
            subjects=tuple(subject for subject, _ in results[name]),
            results=tuple(result for _, result in results[name]),
            left_out=tuple(left_out[name]),
        )
        for name, (probe, options) in probes.items()
    }


def _watched(batches: Iterable[Batch], what: str, total: int) -> Iterator[Batch]:
    """The batches, saying how many samples have been measured."""
    total = len(ranks.own_rows(total))
    progress, done = Progress(what, total, "sample"), 0
    for batch in batches:
        yield batch
        done += len(batch.samples)
        if ranks.is_first_rank():
            progress.show(done)


def remarks(document: Mapping[str, object]) -> list[str]:
    """What stands below the tables of a result: the nulls that were not measured, and how to get them."""
    networks = cast("list[dict[str, Cell]]", document["networks"])
    lines = [f"{COUNTING}; {INTERVAL}"]
    if not any(network.get(UNTRAINED) for network in networks):
        if "capture" not in networks[0]:
            lines.append("untrained network: left out by --no-untrained")
        else:
            way_out = "add --against a capture recorded with `python -m cache.record --untrained ...`"
            lines.append(f"untrained network: not measured; {way_out}")
    lines += [f"{network['name']}: its tokenizer has no BOS; {network[START]} is the start" for network in networks
              if network.get(START) == FIRST_TOKEN]  # fmt: skip
    if all(network["num_visits"] != 1 for network in networks):
        lines.append("Baseline: not measured; add --against CHECKPOINT_OR_CAPTURE")
    return lines


# JSON and files


def describe(asked: Run[object], measured: Sequence[Measured], command: str) -> dict[str, object]:
    """The whole result with all that made it: options, sources with digests, versions, command."""
    return {
        "schema": SCHEMA,
        "probe": measured[0].name,
        "title": measured[0].probe.TITLE,
        "counting": COUNTING,
        "options": plain_options(asked.measure),
        "data_options": None if asked.source.capture is not None else plain_options(asked.data),
        "networks": [
            {
                "name": subject.name,
                "family": subject.architecture.family,
                "num_visits": max(step.visit for step in subject.architecture.steps) + 1,
                **subject.described,
            }
            for subject in measured[0].subjects
        ],
        "results": [as_json(each) for each in measured],
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            "smelt-interp": smelt_interp.__version__,
            "numpy": np.__version__,
        },
        "command": command,
    }


def as_json(measured: Measured) -> dict[str, object]:
    """One set of samples: what was counted, the joined rows, and those of each other network."""
    rows, notes = measured.joined()
    others = zip(measured.subjects[1:], measured.results[1:], strict=True)
    return {
        "data": measured.data.name,
        "data_digest": measured.data.samples.digest(),
        **measured.results[0].to_json(),
        "rows": rows,
        "notes": notes,
        "others": {subject.name: result.rows() for subject, result in others},
    }


def plain_options(options: object) -> dict[str, object]:
    """Options as the command takes them."""
    values = json.loads(json.dumps(as_typed(options), default=str))
    return cast("dict[str, object]", values)


def write_folder(folder: Path, measured: Sequence[Measured], document: Mapping[str, object], text: str) -> None:
    """PROBE.json, PROBE-DATA.csv for each set of samples, PROBE.html with the figures of each set and network; of a
    probe that gives them, scores.csv."""
    name, title = measured[0].name, measured[0].probe.TITLE
    report.write_text(folder / f"{name}.json", text)
    if is_scoring(measured[0].probe) and (scores := measured[0].probe.scores(measured)):
        report.write_text(folder / "scores.csv", as_table(scores).to_csv(index=False))
    figures: list[Figure] = []
    stems: list[str] = []
    for each in measured:
        stem = Path(each.data.name).stem
        stems.append(stem)
        stem = stem if stems.count(stem) == 1 else f"{stem}-{stems.count(stem)}"  # two files of one name
        report.write_text(folder / f"{name}-{stem}.csv", each.table().to_csv(index=False))
        for subject, result in zip(each.subjects, each.results, strict=True):
            for words, drawn in result.figures.items():
                drawn.update_layout(title=f"{title}, {words}: {subject.name} on {each.data.name}")
                figures.append(drawn)
    page = exports.html_text(figures, title, exports.result_facts(document))
    report.write_text(folder / f"{name}.html", page)
