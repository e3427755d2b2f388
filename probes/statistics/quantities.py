"""The table of any probe: named quantities become rows with intervals, nulls, differences of visits and notes.

A probe says what its quantity is at every position and head, once and for each resample. Where the rows stand, their
means, intervals, nulls and paired changes are the same for every probe and are made here alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from probes.statistics.bootstrap import Estimate, binomial_interval, interval
from probes.statistics.grid import RANK, Cell, Grid, Place, Where

if TYPE_CHECKING:
    from pandas import DataFrame

NULL_PREFIX = "null_"
OTHER_PREFIX = "in_"
"""Before the name of another network, in the columns that hold what that network has for the same row."""
LARGEST = 2**53
"""Of whole numbers in a file."""
NEEDS_TWO_VISITS = "needs two visits: this network visits each layer once"
"""The note of a row that compares visits, on a Baseline; it has no value."""
Record = dict[str, Cell]
"""One row of a table."""


def no_note(place: Place) -> str:
    """For a quantity whose rows say nothing more."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One measure, wherever it has a row."""

    name: str
    value_RLH: NDArray[np.float64]
    """Its value, then its resamples, at every position and head; one head where there are none. Without resamples a
    row has no interval."""
    places: Sequence[Place]
    n: int
    """Documents that define it."""
    groups: int | None = None
    """Groups of those by which it was counted, where its interval is over them."""
    nulls: Mapping[str, NDArray[np.float64] | float | None] = field(default_factory=dict)
    """What it would be under each null: one number, or (L, H); None where that null says nothing."""
    change: bool = False
    """Also later visits minus the first, paired by document."""
    note: Callable[[Place], str] = no_note
    undefined: str = ""
    """Why this network or these samples do not define it: rows have this note and no value."""
    over: Callable[[list[int]], NDArray[np.float64]] | None = None
    """How several positions make one number (R,), where it is not their mean."""
    recentred: bool = False
    """Resampling biases it: `bootstrap.interval`."""
    share: bool = False
    """The share of its `n` documents that says yes, each document once: its interval is the exact binomial one."""
    picked: bool = False
    """What it is about was picked by its value over all samples, so that no number by sample belongs to it."""
    where: Where = field(default_factory=dict)
    """More columns, such as the kind of update."""

    def at(self, place: Place) -> NDArray[np.float64]:
        """The value and its resamples at a place. -> (R,)"""
        if self.over is not None:
            return self.over(place.positions)
        return _mean(self.value_RLH, place)

    def null_at(self, place: Place) -> dict[str, float | None]:
        """Each null at a place."""
        shape = self.value_RLH.shape[1:]
        return {
            name: None if null is None else float(_mean(np.broadcast_to(null, shape), place))
            for name, null in self.nulls.items()
        }

    def rows(self) -> list[Record]:
        """A row a place; at the headline also one a later visit, minus the first."""
        found = [self._row(place, self.at(place), self.null_at(place), place.where) for place in self.places]
        return found + self._changes()

    def _row(
        self, place: Place, value_R: NDArray[np.float64], nulls: Mapping[str, float | None], where: Where
    ) -> Record:
        estimate = None
        if not self.undefined:
            exact = binomial_interval(float(value_R[0]), self.n) if self.share else None
            estimate = exact or interval(value_R, self.groups or self.n, recentred=self.recentred)._replace(n=self.n)
        nulls = dict.fromkeys(nulls) if self.undefined else nulls
        return record(place.level, self.name, estimate, where={**where, **self.where}, nulls=nulls,
                      note=self.undefined or self.note(place))  # fmt: skip

    def changes(self) -> Iterator[tuple[Place, Place, Place]]:
        """At the headline: the row of a later visit less the first, then the rows of both."""
        for first, *later in self._visits():
            for place in later:
                where = {**place.where, "visit": f"{place.where['visit']} - {first.where['visit']}"}
                yield place._replace(where=where), first, place

    def _visits(self) -> list[list[Place]]:
        """The headline places of each group of layers."""
        by_layers: dict[Cell, list[Place]] = {}
        for place in self.places if self.change else ():
            if place.level == "headline":
                by_layers.setdefault(place.where["layers"], []).append(place)
        return list(by_layers.values())

    def _changes(self) -> list[Record]:
        found = []
        for less, first, place in self.changes():
            before, after = self.null_at(first), self.null_at(place)
            nulls = {name: _less(after[name], before[name]) for name in after}
            found.append(self._row(place, self.at(place) - self.at(first), nulls, less.where))
        for first in (places[0] for places in self._visits() if len(places) == 1):
            where = {**first.where, "visit": "2 - 1"}
            found.append(record("headline", self.name, None, where={**where, **self.where}, note=NEEDS_TWO_VISITS))
        return found


def largest_heads(quantity: Quantity, grid: Grid) -> Quantity:
    """The head with the largest value on each visit. The largest of many is above their mean by choice alone."""
    places = []
    for place in grid.places(("headline",)):
        at_LH = np.nan_to_num(quantity.value_RLH[0, place.positions])
        position, head = divmod(int(at_LH.argmax()), at_LH.shape[1])
        places.append(Place("headline", {**place.where, "head": "largest"}, [place.positions[position]], [head]))

    def name(place: Place) -> str:
        return f"layer {grid.layer(place.positions[0]) + 1}, head {grid.heads[place.heads[0]] + 1}"

    return replace(quantity, places=places, change=False, picked=True, note=name)


def _mean(x: NDArray[np.float64], place: Place) -> NDArray[np.float64]:
    """Mean of (..., L, H) over the positions and heads of a place."""
    at = x[..., place.positions, :]
    heads = place.heads if x.shape[-1] > 1 and place.heads else slice(None)
    mean: NDArray[np.float64] = at[..., heads].mean((-2, -1))
    return mean


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def record(
    level: str,
    quantity: str,
    estimate: Estimate | float | str | None,
    *,
    where: Mapping[str, Cell],
    nulls: Mapping[str, float | None] | None = None,
    note: str = "",
) -> Record:
    """One row. An estimate that is None is a quantity that is not defined here; `note` says why."""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    value: Cell
    if isinstance(estimate, Estimate):
        value, low, high, n = _finite(estimate.value), _finite(estimate.low), _finite(estimate.high), estimate.n
    else:
        value = _finite(estimate) if isinstance(estimate, float) else estimate
    named = {NULL_PREFIX + name: None if null is None else _finite(null) for name, null in (nulls or {}).items()}
    return {"level": level, "quantity": quantity, **where, "value": value, "low": low, "high": high, "n": n,
            **named, "note": note}  # fmt: skip


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def error_bars(rows: Sequence[Record], names: Sequence[str] = ("value", "low", "high")) -> dict[str, list[float]]:
    """How far the interval of each row reaches above and below its value, as plotly takes it; 0 where it has none."""
    ends = [[cell for name in names if isinstance(cell := row.get(name), int | float)] for row in rows]
    known = [each if len(each) == len(names) else [0.0, 0.0, 0.0] for each in ends]
    return {"array": [high - value for value, _, high in known], "arrayminus": [value - low for value, low, _ in known]}


def table(quantities: Iterable[Quantity]) -> "DataFrame":
    """Every row of the quantities, headline first; `records` reads it back."""
    rows = [row for quantity in quantities for row in quantity.rows()]
    return as_table(sorted(rows, key=lambda row: RANK[row["level"]]))  # type: ignore[index]  # a Level


def as_table(rows: Sequence[Record]) -> "DataFrame":
    """Rows as a pandas table, a column for every name that occurs: what they are about, numbers, nulls, note."""
    from pandas import DataFrame

    names = list(dict.fromkeys(name for row in rows for name in row))
    last = [name for name in ("value", "low", "high", "n") if name in names]
    nulls, others = ([name for name in names if name.startswith(prefix)] for prefix in (NULL_PREFIX, OTHER_PREFIX))
    about = [name for name in names if name not in (*last, *nulls, *others, "note")]
    frame = DataFrame(list(rows), columns=[*about, *last, *nulls, *others, "note"], dtype=object)
    for name in (*last, *nulls, *others):
        frame[name] = frame[name].astype("Int64" if name == "n" else float)
    return frame


def records(frame: "DataFrame") -> list[Record]:
    """The rows of a table as plain dictionaries, None where there is nothing."""
    columns = {}
    for name in frame.columns:
        column = frame[name]
        missing = column.isna().to_numpy()
        columns[str(name)] = [None if gone else cell for cell, gone in zip(column.tolist(), missing, strict=True)]
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def rows_of(found: object, *needed: str) -> list[Record]:
    """The rows that a file holds. Raises `ValueError` unless each is one, with these columns, and where numbers stand
    a number or nothing."""
    if not isinstance(found, list):
        raise ValueError(f"rows must be a list; got {type(found).__name__}")
    for at, row in enumerate(found, start=1):
        if not isinstance(row, dict) or row.get("level") not in [*RANK] or not isinstance(row.get("quantity"), str):
            raise ValueError(f"row {at} has no level or quantity")
        columns = (*needed, "layers") if row["level"] == "layer" else needed
        if missing := [name for name in columns if name not in row]:
            raise ValueError(f"row {at} has no {missing[0]}")
        for name, cell in row.items():
            numbers = name in ("value", "low", "high") or name.startswith((NULL_PREFIX, OTHER_PREFIX))
            kind = int if name == "n" else int | float if numbers else str if name == "note" else str | int | float
            if not (cell is None or isinstance(cell, kind)) or (isinstance(cell, int) and abs(cell) > LARGEST):
                raise ValueError(f"{name} of row {at} is {cell!r:.20}")
    return found


def headline_columns(quantities: Iterable[Quantity], num_samples: int) -> dict[str, NDArray[np.float64]]:
    """The headline values of quantities whose first axis is samples, one column a row: `start mass, looped 3-6,
    visit 1`. What is not known by sample is left out."""
    found = {}
    for quantity in quantities:
        if quantity.undefined or quantity.picked or len(quantity.value_RLH) != num_samples:
            continue
        numbers = [(place, quantity.at(place)) for place in quantity.places if place.level == "headline"]
        numbers += [(less, quantity.at(place) - quantity.at(first)) for less, first, place in quantity.changes()]
        for place, value_N in numbers:
            words = [f"{name} {cell}" if name in ("visit", "head", "shots") else str(cell)
                     for name, cell in {**place.where, **quantity.where}.items() if cell != "mean"]  # fmt: skip
            found[", ".join([quantity.name, *words])] = value_N
    return found
