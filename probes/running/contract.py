"""What a probe is, and what every probe shares: rows, streamed sums by sample, intervals, groups of steps.

A probe is a module `probes/NAME.py` with

    docstring            its question, and the definition it answers with
    TITLE                a few words
    Options              frozen dataclass; the docstring under each field is the help text of the command
    needs(config)        the hook suffixes that it reads, e.g. ("attn.hook_pattern",)
    measure(batches, options) -> a frozen result with `rows()`
    figure(result)       a plotly figure; plotly is imported inside
    main()               `command.main("NAME")`

`measure` reads each batch once and keeps only sums: one small array a sample (`SampleSums`), or sums over everything.
Its answer does not depend on how samples are batched: a shuffle draws from `sample_generator(seed, sample_id)`, a
bootstrap resamples the samples in the order of their ids. It uses numpy alone, so a probe on a capture needs no torch.

A result's rows are plain dictionaries. `row()` writes one: what is measured (`quantity`) where (`layers`, `visit`,
`head`, or other columns), its `value` with `low` and `high` (95% bootstrap interval over samples) and `n` (samples),
its nulls (`null_uniform`, `null_shuffled`, ...), and a `note`. Layers, visits and heads count from 1 in rows and in
options, as in every label that a person reads; arrays count from 0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Cell = str | int | float | None
Row = dict[str, Cell]
Level = Literal["headline", "layer", "split", "head"]
"""headline: one row a quantity and visit, means over the looped layers. layer: one a step. split: a part of the
samples. head: one a step and head (or another unit of a step)."""
RANK: dict[Level, int] = {"headline": 0, "layer": 1, "split": 1, "head": 2}
"""A table of one level shows the rows of every level up to its rank."""
NULL_PREFIX = "null_"
NEEDS_TWO_VISITS = "needs two visits: this network visits each layer once"
"""The note of a row that compares visits, on a Baseline; its value is None."""


class Result(Protocol):
    """What `measure` gives: numbers that tables, files and figures are made of."""

    def rows(self) -> list[Row]:
        """Every number, headline rows first, each made by `row()`."""
        ...


class Probe(Protocol):
    """The module of a probe, as `catalog.load` gives it. Each has its own types of options and result."""

    TITLE: str
    Options: type
    __doc__: str
    needs: Callable[[ModelConfig], tuple[str, ...]]
    measure: Callable[[Iterable[Batch], object], Result]
    figure: "Callable[[Result], Figure]"
    main: Callable[[], None]


class Estimate(NamedTuple):
    """A number with its 95% bootstrap interval over `n` samples."""

    value: float
    low: float
    high: float
    n: int


def row(
    level: Level,
    quantity: str,
    estimate: Estimate | float | str | None,
    *,
    where: Mapping[str, Cell],
    nulls: Mapping[str, float | None] | None = None,
    note: str = "",
) -> Row:
    """One row of a result.

    `where` says which steps or samples: columns such as `layers` ("looped 3-6", "5"), `visit` (1, or "2 - 1" for a
    difference), `head`, `shots`. Rows of two networks are set side by side where `quantity` and `where` agree, at the
    headline level whatever the layers. An estimate that is None is a quantity that this network or these samples do
    not define, and `note` says why. `nulls` maps a null's name to what the quantity would be under it.
    """
    low: float | None = None
    high: float | None = None
    n: int | None = None
    value: Cell
    if isinstance(estimate, Estimate):
        value, low, high, n = finite(estimate.value), finite(estimate.low), finite(estimate.high), estimate.n
    else:
        value = finite(estimate) if isinstance(estimate, float) else estimate
    named = {NULL_PREFIX + name: None if null is None else finite(null) for name, null in (nulls or {}).items()}
    return {
        "level": level,
        "quantity": quantity,
        **where,
        "value": value,
        "low": low,
        "high": high,
        "n": n,
        **named,
        "note": note,
    }


def by_level(table: Iterable[Row]) -> list[Row]:
    """The rows with the headline first, heads last, otherwise in their order."""
    return sorted(table, key=rank)


def rank(entry: Row) -> int:
    """The rank of a row's level."""
    return next(number for level, number in RANK.items() if level == entry["level"])


def finite(number: float) -> float | None:
    """The number, or None where there is none (0/0): JSON has no NaN."""
    return float(number) if np.isfinite(number) else None


# Options

MOST = 10**9
"""The largest number that an option may be, unless a lower one is said."""
MOST_SHUFFLES = 1000
MOST_SAMPLES = 10**6
"""Samples are drawn into memory."""


def check_number(name: str, number: float, least: float, most: float = MOST) -> None:
    """Raises `UserError` unless the option of that name is a number from `least` to `most`; NaN is none."""
    if not number >= least:
        raise UserError(f"{name} must be at least {least}; got {number}")
    if number > most:
        raise UserError(f"{name} must be at most {most}; got {number}")


# Streaming


class SampleSums:
    """Named sums for each sample, added batch by batch and read in the order of the sample ids."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int64]] = []
        self._sums: list[Mapping[str, NDArray[np.generic]]] = []

    def add(self, sample_ids: NDArray[np.int64], sums: Mapping[str, NDArray[np.generic]]) -> None:
        """Sums of B samples, each array (B, ...) with the same names in every batch."""
        self._ids.append(np.asarray(sample_ids))
        self._sums.append(sums)

    @property
    def empty(self) -> bool:
        """Whether no sample was added."""
        return not sum(len(ids) for ids in self._ids)

    def finish(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.generic]]]:
        """Sample ids (N,), ascending, and each sum (N, ...). Raises UserError without samples or with one twice."""
        if self.empty:
            raise UserError("samples to measure must be at least one; got 0")
        ids_N = np.concatenate(self._ids)
        order_N = np.argsort(ids_N)
        ids_N = ids_N[order_N]
        if (ids_N[1:] == ids_N[:-1]).any():
            raise UserError(f"sample ids must be distinct; got {ids_N[1:][ids_N[1:] == ids_N[:-1]][0]} twice")
        return ids_N, {name: np.concatenate([sums[name] for sums in self._sums])[order_N] for name in self._sums[0]}


def sample_generator(seed: int, sample_id: int) -> np.random.Generator:
    """Random numbers that belong to one sample, whatever batch it comes in."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, sample_id])))


RESAMPLES = 1000


def estimates(
    numerator: NDArray[np.floating], denominator: NDArray[np.floating], seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Ratios of sums over samples, with 95% bootstrap intervals over the samples.

    numerator (N, ...) and denominator (N, ...) or (N,) are sums by sample, in the order of the sample ids: the value is
    sum over N of one by the other, NaN where the denominator sums to 0. Every column is resampled with the same draws,
    so a difference of two columns may be formed first and its interval is paired. -> value, low, high, each (...).

    For sums that are small enough to keep for every sample: they can be split and subtracted afterwards (queries that
    show a pair, visit 2 minus visit 1), and N is fixed in every resample. Sums that are not (means of vectors, loads of
    experts, histograms) are resampled while they stream in, by `probes.statistics.resampling`.
    """
    num_samples, shape = len(numerator), numerator.shape[1:]
    top_NK = np.asarray(numerator, np.float64).reshape(num_samples, -1)
    bottom = np.asarray(denominator, np.float64)
    bottom_NK = np.broadcast_to(bottom.reshape(num_samples, *bottom.shape[1:], *(1,) * (numerator.ndim - bottom.ndim)),
                                numerator.shape).reshape(num_samples, -1)  # fmt: skip
    with np.errstate(invalid="ignore", divide="ignore"):
        value_K = top_NK.sum(0) / bottom_NK.sum(0)
        draws_RK = np.concatenate([(w_RN @ top_NK) / (w_RN @ bottom_NK) for w_RN in _resamples(num_samples, seed)])
    low_K, high_K = _quantiles(draws_RK)
    return value_K.reshape(shape), low_K.reshape(shape), high_K.reshape(shape)


_CACHED_ENTRIES = 2**22


def _resamples(num_samples: int, seed: int) -> Iterable[NDArray[np.float64]]:
    """How often each sample is drawn in each resample, in blocks (R, N) of bounded size."""
    if num_samples * RESAMPLES <= _CACHED_ENTRIES:
        return (_counts(num_samples, seed, 0, RESAMPLES),)
    size = max(1, _CACHED_ENTRIES // num_samples)
    blocks = range(0, RESAMPLES, size)
    return (_counts.__wrapped__(num_samples, seed, first, min(size, RESAMPLES - first)) for first in blocks)


@lru_cache(maxsize=4)
def _counts(num_samples: int, seed: int, first: int, num: int) -> NDArray[np.float64]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, first])))
    counts_RN = generator.multinomial(num_samples, np.full(num_samples, 1 / num_samples), num).astype(np.float64)
    counts_RN.flags.writeable = False
    return counts_RN


def _quantiles(draws_RK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """2.5% and 97.5% over the resamples that define the ratio; NaN where none does."""
    low_K, high_K = np.full((2, draws_RK.shape[1]), np.nan)
    defined_RK = np.isfinite(draws_RK)
    for column in np.flatnonzero(defined_RK.any(0)):
        low_K[column], high_K[column] = np.quantile(draws_RK[defined_RK[:, column], column], (0.025, 0.975))
    return low_K, high_K


def estimate(numerator_N: NDArray[np.floating], denominator_N: NDArray[np.floating], seed: int = 0) -> Estimate:
    """One ratio of sums with its interval; `n` counts the samples whose denominator is not 0."""
    value, low, high = estimates(np.asarray(numerator_N), np.asarray(denominator_N), seed)
    return Estimate(float(value), float(low), float(high), int(np.count_nonzero(denominator_N)))


# Tokens and steps


def is_token(samples: Samples) -> NDArray[np.bool_]:
    """Which positions hold a token and not padding. -> (B, T)"""
    real_BT: NDArray[np.bool_] = np.arange(samples.ids_NT.shape[1]) < samples.length_N[:, None]
    return np.asarray(real_BT & (samples.role_NT != Role.PAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Steps that a headline row averages over: the looped layers on one visit."""

    layers: str
    """As a row names those that are averaged: `looped 3-6`, or `looped 3, 5`; `middle 3-6` on a Baseline, `all 1-8`
    without a span."""
    visit: int
    """From 0."""
    steps: tuple[int, ...]
    """Step indices of the plan."""


def looped_spans(config: ModelConfig, steps: Plan, recorded: Sequence[int]) -> tuple[Span, ...]:
    """The looped layers, one span a visit, as far as their steps are among `recorded`.

    A network without a looped span gives all its layers as one span of visit 0, so that a Baseline has a headline.
    """
    first, last = config.loop_start, config.loop_stop
    looped = first < last
    if not looped:
        first, last = 0, config.num_layers
    spans = []
    for visit in range(config.num_visits):
        members = tuple(s for s in recorded if first <= steps[s].layer < last and steps[s].visit == visit)
        if members:
            kind = "all" if not looped else "looped" if config.num_visits > 1 else "middle"
            name = f"{kind} {layer_range([steps[s].layer for s in members])}"
            spans.append(Span(layers=name, visit=visit, steps=members))
    return tuple(spans)


def measured_layers(config: ModelConfig, steps: Plan, recorded: Sequence[int]) -> str:
    """The looped layers among the recorded steps as a row names them; those recorded when none is looped."""
    spans = looped_spans(config, steps, recorded)
    return spans[0].layers if spans else layer_range(sorted({steps[s].layer for s in recorded}))


def layer_range(layers: Sequence[int]) -> str:
    """Ascending layers, from 0, as a row names them, from 1: `3-6`, `3`, or `3, 5, 6` with a gap."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0] + 1}-{layers[-1] + 1}"
    return ", ".join(str(layer + 1) for layer in layers)


def recorded_steps(batch: Batch, suffixes: Sequence[str]) -> tuple[int, ...]:
    """The steps on which every one of these suffixes was recorded. Raises UserError when there is none."""
    steps = tuple(s for s in range(len(batch.plan)) if all((s, suffix) in batch.sites for suffix in suffixes))
    if not steps:
        have = ", ".join(sorted({suffix for _, suffix in batch.sites})) or "no site"
        raise UserError(
            f"a capture must hold {', '.join(suffixes)} on the same steps; got {have}: record it again with those sites"
        )
    return steps
