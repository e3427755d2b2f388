"""What a probe is, and how one pass over the batches feeds many of them.

A probe is a module `probes/NAME.py` with

    docstring                its question, and the definition it answers with
    TITLE                    a few words
    Options                  validated dataclass; the docstring under each field is the help text of the command
    DATA                     the samples that its command measures by default
    OVERVIEW                 the headline rows that stand for it where all probes are shown at once, by their columns
    needs(architecture)      the hook suffixes that it reads, e.g. ("attn.hook_pattern",)
    start(architecture, options) -> Sums      `sums.add(batch)`, `sums.merge(other)`
    result(sums) -> Result
    main()                   `command.main(sys.modules[__name__])`

A probe of weights or of edits has, in place of `start`,

    start_on(network, options) -> Sums        the same sums; their `reduce` runs the network, or reads its weights

It gets the batches of that network, with the sites that it needs (maybe none), and runs each again by
`probes.running.passes`. Its command says that a capture will not do; everything else is the same. Its name stands in
`catalog.RUNNING`. One whose edits read other samples, or means over them, has

    start_with(network, data, options) -> Sums        `data` is the whole set that will come in batches

and one that measures samples of its own making, such as pairs, also has `choose_samples(subject, data, options)`, which
gives those sets for the data options; `check_data(data)` refuses data options before a network is opened,
and any may have `check_network(architecture, options)`, which refuses the first before others are opened.

Options may have `reads`, the hook suffixes that they ask for in place of `needs`. A probe of many kinds of rows may say
`TABLE_A_QUANTITY = True`: its command prints a table of each. `INSTEAD` says what to ask of a network that it refuses.

Any probe may have `against(totals, others)`: the quantities in which this network exceeds another on the same samples.
Both share their resamples of documents, so that a difference of their sums is paired by document. One with
`scores(measured)` gives the rows of scores.csv, which `python -m smelt_interp.scaling.calibration fit` reads.

Its mathematics are three functions that it gives to `Sums`: `lay_out` says which steps and heads are measured, `reduce`
turns a batch into small sums by sample, `quantities` turns sums into numbers on a grid of steps and heads. Rows,
intervals, nulls and differences of visits are made of those in `probes.statistics`.

Layers, visits and heads count from 0 in options and arrays, from 1 in commands, tables and pages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeGuard, cast, runtime_checkable

from cache.batch import Batch
from probes.statistics.grid import Where
from probes.statistics.quantities import Quantity, Record, records, table
from probes.statistics.sums import Layout, Options, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from model.hooks.looped_model import LoopedModel
    from probes.running.command import Measured
    from probes.running.source import SampleSet, Subject

NEEDS_A_NETWORK = "a capture holds no weights to run, open the checkpoint with --ckpt"
"""Why a probe that runs a network refuses a capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer of one probe about one network on one data set."""

    table: "DataFrame"
    """Every number, headline rows first: what it is about, value, 95% interval, documents, nulls, note."""
    samples: int
    documents: int
    tokens: int
    by_sample: "DataFrame | None"
    """The headline's numbers for every sample; None unless they were asked for."""
    draw: "Callable[[], dict[str, Figure]]" = field(repr=False)
    totals: Totals[object, object] | None = field(default=None, repr=False)
    """The sums that the table was made of, for differences from another network; None where a table was read."""

    @property
    def figures(self) -> "dict[str, Figure]":
        """Plotly figures by name."""
        return self.draw()

    def rows(self) -> list[Record]:
        """The table as plain dictionaries."""
        return records(self.table)

    def to_json(self) -> dict[str, object]:
        """Plain values: what was counted, and the rows."""
        counted = {"samples": self.samples, "documents": self.documents, "tokens": self.tokens}
        return {**counted, "rows": self.rows()}


class Probe(Protocol):
    """The module of a probe, as `catalog.load` gives it. Each has its own types of options and layout."""

    TITLE: str
    Options: type
    DATA: DataOptions
    OVERVIEW: tuple[Where, ...]
    __doc__: str
    needs: Callable[[Architecture], tuple[str, ...]]
    result: Callable[[Sums[object, object]], Result]


class ReadingProbe(Probe, Protocol):
    """A probe that answers from batches alone, recorded or running."""

    start: Callable[[Architecture, object], Sums[object, object]]


class RunningProbe(Probe, Protocol):
    """A probe that asks for the network itself."""

    start_on: "Callable[[LoopedModel, object], Sums[object, object]]"


class EditingProbe(Probe, Protocol):
    """A probe that asks for the network and all samples."""

    start_with: "Callable[[LoopedModel, SampleSet, object], Sums[object, object]]"


class ChoosingProbe(Probe, Protocol):
    """A probe that makes its samples."""

    choose_samples: "Callable[[Subject, DataOptions, object], tuple[SampleSet, ...]]"


class CheckingProbe(Probe, Protocol):
    """A probe that knows from the data options alone that it cannot measure them."""

    check_data: "Callable[[DataOptions], None]"


class ChoosyProbe(Probe, Protocol):
    """A probe that knows from the first network's architecture that its options cannot be measured there."""

    def check_network(self, architecture: Architecture, options: object) -> None: ...


class PairedProbe(Probe, Protocol):
    """A probe that says what a network has over another."""

    against: Callable[[Totals[object, object], Totals[object, object]], list[Quantity]]


class ScoringProbe(Probe, Protocol):
    """A probe that says what `smelt_interp.scaling.calibration` reads."""

    scores: "Callable[[Sequence[Measured]], list[Record]]"


def is_running(probe: Probe) -> TypeGuard[RunningProbe]:
    """Whether a probe asks for the network itself."""
    return hasattr(probe, "start_on")


def is_editing(probe: Probe) -> TypeGuard[EditingProbe]:
    """Whether a probe asks for the network and all samples."""
    return hasattr(probe, "start_with")


def is_choosing(probe: Probe) -> TypeGuard[ChoosingProbe]:
    """Whether a probe makes its samples."""
    return hasattr(probe, "choose_samples")


def is_checking(probe: Probe) -> TypeGuard[CheckingProbe]:
    """Whether a probe refuses data options before a network is opened."""
    return hasattr(probe, "check_data")


def is_choosy(probe: Probe) -> TypeGuard[ChoosyProbe]:
    """Whether a probe's options suit some networks alone."""
    return hasattr(probe, "check_network")


def is_paired(probe: Probe) -> TypeGuard[PairedProbe]:
    """Whether a probe says what a network has over another."""
    return hasattr(probe, "against")


def is_scoring(probe: Probe) -> TypeGuard[ScoringProbe]:
    """Whether a probe says what a calibration reads."""
    return hasattr(probe, "scores")


def is_reading(probe: Probe) -> TypeGuard[ReadingProbe]:
    """Whether a probe answers from batches alone."""
    return hasattr(probe, "start")


Asked = Mapping[str, tuple[Probe, object]]
"""Probes by name, each with its options."""


def answer(sums: Sums[Layout, Options], draw: "Callable[[Totals[Layout, Options]], dict[str, Figure]]") -> Result:
    """The result of sums, as a probe's `result` gives it. Raises UserError without samples and for one added twice."""
    totals = sums.totals()
    return Result(
        table=table(sums.quantities()),
        samples=sums.samples,
        documents=sums.documents,
        tokens=sums.tokens,
        by_sample=sums.by_sample(),
        draw=lambda: draw(totals),
        totals=cast("Totals[object, object]", totals),
    )


def accumulate(
    batches: Iterable[Batch],
    probes: Asked,
    *,
    network: "LoopedModel | None" = None,
    data: "SampleSet | None" = None,
    loops: Sequence[Loop] = (),
    by_sample: bool = False,
) -> dict[str, Sums[object, object]]:
    """Feed every batch to every probe; sums of parts of the samples may be merged.

    `network`: what the batches come from, for the probes that run it; `data`: all that will come, for those that read
    other samples too.
    `loops`: what the headline averages over, in place of `probes.statistics.grid.headline_loops`.
    Raises UserError for a probe that runs a network where there is none.
    """
    opened: dict[str, Sums[object, object]] = {}
    for batch in batches:
        for name, (probe, options) in probes.items():
            if name not in opened:
                opened[name] = _open(probe, batch, options, network, data)
                opened[name].loops = tuple(loops) or opened[name].loops
                opened[name].keep_samples = by_sample
            opened[name].add(batch)
    return opened


def _open(
    probe: Probe, batch: Batch, options: object, network: "LoopedModel | None", data: "SampleSet | None"
) -> Sums[object, object]:
    if is_reading(probe):
        return probe.start(batch.architecture, options)
    if network is None:
        raise UserError(f"{probe.TITLE} must be given the network that it runs; got batches alone: pass network=")
    if is_running(probe):
        return probe.start_on(network, options)
    assert is_editing(probe)  # a probe has one of the three
    if data is None:
        raise UserError(f"{probe.TITLE} must be given all samples; got batches alone: pass data=")
    return probe.start_with(network, data, options)


def run(
    batches: Iterable[Batch],
    probes: Asked,
    *,
    network: "LoopedModel | None" = None,
    data: "SampleSet | None" = None,
    loops: Sequence[Loop] = (),
    by_sample: bool = False,
) -> dict[str, Result]:
    """The results of several probes from one pass over the batches; see `accumulate`.

    Raises UserError without samples, and for layers, heads or sites that were not recorded.
    """
    sums = accumulate(batches, probes, network=network, data=data, loops=loops, by_sample=by_sample)
    return answers(sums, probes)


def answers(sums: Mapping[str, Sums[object, object]], probes: Asked) -> dict[str, Result]:
    """What the sums of several probes say. Raises UserError without samples."""
    if not sums and probes:
        raise UserError("samples to measure must be at least one; got 0")
    return {name: probe.result(sums[name]) for name, (probe, _) in probes.items()}


@runtime_checkable
class NamesSites(Protocol):
    """Options that say which sites are edited."""

    sites: tuple[str, ...]


@runtime_checkable
class NamesReads(Protocol):
    """Options that say which sites are read."""

    @property
    def reads(self) -> tuple[str, ...]: ...


def read_sites(probe: Probe, architecture: Architecture, options: object) -> tuple[str, ...]:
    """The sites that a probe's batches must hold."""
    return options.reads if isinstance(options, NamesReads) else probe.needs(architecture)


def needed_sites(probe: Probe, architecture: Architecture, options: object) -> tuple[str, ...]:
    """What a network must compute to be measured: the sites that are read, and those that the options name."""
    named = options.sites if isinstance(options, NamesSites) else ()
    return tuple(dict.fromkeys((*read_sites(probe, architecture, options), *named)))


def no_sites(architecture: Architecture) -> tuple[str, ...]:
    """The `needs` of a probe that reads no recorded site: predictions are enough, or it runs the network again."""
    return ()


def refusal(needed: Sequence[str], architecture: Architecture) -> str:
    """Why a network cannot be measured: the sites that it lacks, or the router; empty when it has them all."""
    missing = [suffix for suffix in needed if suffix not in architecture.sites]
    if not missing:
        return ""
    if architecture.num_experts == 0 and all(suffix.startswith("mlp.") for suffix in missing):
        return f"{architecture.family} has no router: its layers are dense"
    return f"{architecture.family} does not compute {', '.join(missing)}"
