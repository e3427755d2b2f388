"""Sums over samples that stream, merge and carry their resamples; what every probe keeps while it reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch, take
from probes.statistics.arrays import Floats, Mask, is_token, to_numpy
from probes.statistics.bootstrap import weights
from probes.statistics.examples import Examples
from probes.statistics.grid import headline_loops
from probes.statistics.neighbours import Neighbours
from probes.statistics.quantities import Quantity, headline_columns
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.arrays import Array
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

Options = TypeVar("Options")
Layout = TypeVar("Layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What one batch comes to. Arrays are numpy or torch; B is the batch's samples."""

    by_sample: Mapping[str, Array] = field(default_factory=dict)
    """(B, ...): added up over samples, once as they are and once for each resample of documents."""
    counts: Mapping[str, Array] = field(default_factory=dict)
    """(B, ...): the same for whole numbers, in float32, which is exact up to 2^24: half of the memory."""
    whole: Mapping[str, Array] = field(default_factory=dict)
    """(...): added up over batches, without resamples."""
    largest: Mapping[str, Array] = field(default_factory=dict)
    """(...): the largest over batches."""
    defined: Mapping[str, Mask] = field(default_factory=dict)
    """(B,): which samples define a quantity; an interval's n counts their documents."""
    examples: Mapping[str, Examples] = field(default_factory=dict)
    """Tokens worth showing: the best of all batches are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(Generic[Layout, Options]):
    """Everything that was added, as a probe's quantities read it.

    The first axis of `sums` is the value and its resamples, or samples where numbers by sample are asked for: functions
    of sums do not care.
    """

    architecture: Architecture
    options: Options
    layout: Layout
    sums: Mapping[str, NDArray[np.float64]]
    whole: Mapping[str, NDArray[np.float64]]
    largest: Mapping[str, NDArray[np.float64]]
    n: Mapping[str, int]
    """Documents that define each of `Reduced.defined`."""
    examples: Mapping[str, Examples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Between(Generic[Layout, Options]):
    """What samples and the ones after them come to together."""

    suffixes: tuple[str, ...]
    """The sites that are compared."""
    compare: Callable[[Batch, Batch, Layout, Options], Mapping[str, Array]]
    """compare(before, after, layout, options): sums (...) over pairs of samples, added to `Totals.whole`."""


FUNCTIONS = frozenset({"_lay_out", "_reduce", "_quantities", "_between"})
"""Of a probe, by the names under which its sums hold them."""


class Distinct:
    """How many different numbers were added, in memory that grows with the different ones alone."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.int64)
        self._new: list[NDArray[np.int64]] = []
        self._waiting = 0
        self.added = 0
        """Numbers in all, repeated ones too."""

    def add(self, numbers: NDArray[np.int64]) -> None:
        """Note these numbers."""
        self._new.append(numbers)
        self._waiting += len(numbers)
        self.added += len(numbers)
        if self._waiting > 4096 + len(self._sorted):
            self._settle()

    def _settle(self) -> NDArray[np.int64]:
        self._sorted = np.unique(np.concatenate([self._sorted, *self._new]))
        self._new, self._waiting = [], 0
        return self._sorted

    def merge(self, other: "Distinct") -> None:
        """Note all of another's."""
        added = self.added + other.added
        self.add(other._settle())
        self.added = added

    def __len__(self) -> int:
        return len(self._settle())


class Sums(Generic[Layout, Options]):
    """Named sums of one network on one data set.

    lay_out(batch, options, loops): what of the network is measured, seen on the first batch; equal for every batch.
    reduce(batch, layout, options): what a batch comes to.
    quantities(totals): what the sums say.
    between: for nulls that compare a sample with the one before it.
    """

    def __init__(
        self,
        architecture: Architecture,
        options: Options,
        lay_out: Callable[[Batch, Options, tuple[Loop, ...]], Layout],
        reduce: Callable[[Batch, Layout, Options], Reduced],
        quantities: Callable[["Totals[Layout, Options]"], list[Quantity]],
        *,
        seed: int = 0,
        between: Between[Layout, Options] | None = None,
    ) -> None:
        self.architecture, self.options, self.seed = architecture, options, seed
        self.loops = headline_loops(architecture)
        """Layers that the headline averages over; a runner may name others before the first batch, for a network that
        has no loop, so that networks are compared on the same layers."""
        self.keep_samples = False
        """Keep the headline's numbers for every sample; a runner may say so before the first batch."""
        self._lay_out, self._reduce, self._quantities, self._between = lay_out, reduce, quantities, between
        self._neighbours = Neighbours(between.suffixes if between else ())
        self._layout: Layout | None = None
        self._sums: dict[str, Floats] = {}
        self._whole: dict[str, Floats] = {}
        self._largest: dict[str, Floats] = {}
        self._defined: dict[str, Distinct] = {}
        self._examples: dict[str, Examples] = {}
        self._by_sample: list[dict[str, NDArray[np.generic]]] = []
        self._samples, self._documents = Distinct(), Distinct()
        self.tokens = 0

    def __getstate__(self) -> dict[str, object]:
        """What was added, without the functions that add: enough to be merged into others' sums."""
        return {name: value for name, value in vars(self).items() if name not in FUNCTIONS}

    def add(self, batch: Batch) -> None:
        """Reduce a batch and add it."""
        if self.keep_samples and len(batch.samples) > 1:
            # One after the other: what a batch has in common, such as its largest, is no sample's own.
            for row in range(len(batch.samples)):
                self.add(take(batch, np.array([row])))
            return
        if self._layout is None:
            self._layout = self._lay_out(batch, self.options, self.loops)
        reduced = self._reduce(batch, self._layout, self.options)
        # Which samples and documents were seen.
        samples = batch.samples
        document_B = np.asarray(samples.document_N, np.int64)
        self._samples.add(np.asarray(batch.sample_ids, np.int64))
        self._documents.add(document_B)
        self.tokens += int(is_token(samples).sum())
        # Sums, as they are and once a resample of the documents.
        by_sample: dict[str, Floats] = {name: to_numpy(x) for name, x in reduced.by_sample.items()}
        counts: dict[str, Floats] = {name: to_numpy(x).astype(np.float32) for name, x in reduced.counts.items()}
        weight_RB = weights(self.seed, document_B)
        everything: dict[str, Floats] = {**by_sample, **counts}
        for name, x in everything.items():
            total = weight_RB.astype(x.dtype) @ x.reshape(len(x), -1)
            _combine(self._sums, name, total.reshape(len(weight_RB), *x.shape[1:]), np.add)
        for name, added in reduced.whole.items():
            _combine(self._whole, name, to_numpy(added), np.add)
        for name, most in reduced.largest.items():
            _combine(self._largest, name, to_numpy(most), np.maximum)
        for name, defined_B in reduced.defined.items():
            self._defined.setdefault(name, Distinct()).add(document_B[defined_B])
        self._keep(reduced.examples)
        if self._between is not None:
            self._compare(self._neighbours.add(batch))
        # The headline of each sample alone.
        if self.keep_samples:
            whole, largest = ({k: to_numpy(x) for k, x in d.items()} for d in (reduced.whole, reduced.largest))
            n = {name: int(defined_B.sum()) for name, defined_B in reduced.defined.items()}
            with np.errstate(invalid="ignore", divide="ignore"):
                totals = self._as_totals({**by_sample, **counts}, whole, largest, n, reduced.examples)
                columns = headline_columns(self._quantities(totals), len(samples))
            about = {"sample": batch.sample_ids, "document": document_B, "domain": samples.domain_N.astype(str)}
            self._by_sample.append({**about, **columns})

    def merge(self, other: Self) -> None:
        """Add another's sums over other samples of the same data set, by the same network and options."""
        mine, theirs = ((each.architecture, each.options, each.seed, each.loops) for each in (self, other))
        if mine != theirs or (None not in (self._layout, other._layout) and self._layout != other._layout):
            raise UserError("sums to merge must be of one network, one choice of options and one layout; got others")
        self._layout = self._layout or other._layout
        for name, x in other._sums.items():
            _combine(self._sums, name, x, np.add)
        for name, x in other._whole.items():
            _combine(self._whole, name, x, np.add)
        for name, x in other._largest.items():
            _combine(self._largest, name, x, np.maximum)
        for name, documents in other._defined.items():
            self._defined.setdefault(name, Distinct()).merge(documents)
        self._keep(other._examples)
        self._compare(self._neighbours.merge(other._neighbours))
        self._samples.merge(other._samples)
        self._documents.merge(other._documents)
        self._by_sample += other._by_sample
        self.tokens += other.tokens

    def _keep(self, found: Mapping[str, Examples]) -> None:
        """Keep the best of these examples and those that are kept."""
        for name, each in found.items():
            self._examples[name] = self._examples[name].merged(each) if name in self._examples else each

    def _compare(self, met: Sequence[tuple[Batch, Batch]]) -> None:
        """Add what neighbours come to together."""
        for before, after in met:
            assert self._between is not None  # only then neighbours are kept,
            assert self._layout is not None  # and the batch they came in was laid out
            for name, x in self._between.compare(before, after, self._layout, self.options).items():
                _combine(self._whole, name, to_numpy(x), np.add)

    @property
    def documents(self) -> int:
        """Independent documents."""
        return len(self._documents)

    @property
    def samples(self) -> int:
        """Samples; each may be there once. Raises UserError when one was added twice."""
        if len(self._samples) < self._samples.added:
            raise UserError(
                f"sample ids must be distinct; got {self._samples.added - len(self._samples)} of them twice"
            )
        return len(self._samples)

    def totals(self) -> Totals[Layout, Options]:
        """What was added. Raises UserError without samples and for a sample that was added twice."""
        if not self.samples:
            raise UserError("samples to measure must be at least one; got 0")
        n = {name: len(documents) for name, documents in self._defined.items()}
        return self._as_totals(self._sums, self._whole, self._largest, n, self._examples)

    def quantities(self) -> list[Quantity]:
        """What the sums say."""
        return self._quantities(self.totals())

    def by_sample(self) -> "DataFrame | None":
        """The headline's numbers for every sample, in the order of their ids; None unless they were to be kept."""
        if not self.keep_samples:
            return None
        from pandas import DataFrame, concat

        frames = [DataFrame(columns) for columns in self._by_sample]
        return concat(frames, ignore_index=True).sort_values("sample", ignore_index=True)

    def _as_totals(
        self,
        sums: Mapping[str, Floats],
        whole: Mapping[str, Floats],
        largest: Mapping[str, Floats],
        n: dict[str, int],
        examples: Mapping[str, Examples],
    ) -> Totals[Layout, Options]:
        assert self._layout is not None  # laid out with the first batch
        return Totals(
            architecture=self.architecture,
            options=self.options,
            layout=self._layout,
            sums={name: np.asarray(x, np.float64) for name, x in sums.items()},
            whole={name: np.asarray(x, np.float64) for name, x in whole.items()},
            largest={name: np.asarray(x, np.float64) for name, x in largest.items()},
            n=n,
            examples=examples,
        )


def _combine(sums: dict[str, Floats], name: str, x: Floats, both: "np.ufunc") -> None:
    """Add to a named array, or take the larger; an axis that is longer in one (positions) is filled up with 0."""
    if name not in sums:
        sums[name] = np.array(x)
        return
    have = sums[name]
    if have.shape == x.shape:
        both(have, x, out=have)
        return
    shape = np.maximum(have.shape, x.shape)
    filled = [np.pad(each, [(0, int(most) - size) for most, size in zip(shape, each.shape, strict=True)])
              for each in (have, x)]  # fmt: skip
    sums[name] = both(*filled)
