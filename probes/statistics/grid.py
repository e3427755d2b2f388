"""Where the rows of a table stand: looped layers on each visit, single steps, single heads.

Second legend, for statistics: R the value and its resamples, L measured positions along the plan (steps, or pairs of
visits of one layer), H heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt_interp.architecture import Architecture, Loop

Cell = str | int | float | None
Where = dict[str, Cell]
"""Columns that say what a row is about. Layers, visits and heads count from 1 there, as wherever a person reads."""
Level = Literal["headline", "layer", "split", "head"]
"""headline: one row a quantity and visit, means over the looped layers. layer: one a step. split: a part of the
samples. head: one a step and head (or another unit of a step)."""
RANK: dict[Level, int] = {"headline": 0, "layer": 1, "split": 1, "head": 2}
"""A table of one level shows the rows of every level up to its rank."""
STEPS: tuple[Level, ...] = ("headline", "layer")
HEADS: tuple[Level, ...] = ("headline", "layer", "head")
At = int | tuple[int, int]
"""A step index, or those of two visits of one layer, the earlier first."""


class Place(NamedTuple):
    """What one row is about."""

    level: Level
    where: Where
    positions: list[int]
    """Along L."""
    heads: list[int]
    """Along H; empty means all."""


def headline_loops(architecture: Architecture, like: Architecture | None = None) -> tuple[Loop, ...]:
    """The layers that a headline averages over: the network's loops.

    A network without a loop takes the layers that `like` loops, if it has them, so that both are compared on the same
    layers; otherwise its middle half, as the paper loops it; all of them when there are fewer than four.
    """
    if architecture.loops:
        return architecture.loops
    layers = range(architecture.num_layers)
    if like is not None and like.loops and all(set(loop.layers) <= set(layers) for loop in like.loops):
        return tuple(Loop(loop.layers, 1) for loop in like.loops)
    quarter = len(layers) // 4
    return (Loop(tuple(layers[quarter : len(layers) - quarter]), 1),)


def loop_name(loop: Loop, architecture: Architecture, layers: Sequence[int] | None = None) -> str:
    """`looped 3-6`, or `looped 3, 5` for those of its layers that were measured; `middle 3-6`, `all 1-8` when they
    run once."""
    kind = "looped" if loop.num_visits > 1 else "all" if len(loop.layers) == architecture.num_layers else "middle"
    return f"{kind} {layer_range(loop.layers if layers is None else layers)}"


def layer_range(layers: Sequence[int]) -> str:
    """Ascending layers, from 0, as a row names them, from 1: `3-6`, `3`, or `3, 5, 6` with a gap."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0] + 1}-{layers[-1] + 1}"
    return ", ".join(str(layer + 1) for layer in layers)


def pair_label(visits: Sequence[int]) -> str:
    """`1 vs 2`: two visits, from 0, as a row names them."""
    return f"{visits[0] + 1} vs {visits[1] + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The steps, or pairs of visits, and the heads that were measured."""

    architecture: Architecture
    loops: tuple[Loop, ...]
    """What the headline averages over."""
    steps: tuple[At, ...]
    """Positions, in order."""
    heads: tuple[int, ...] = ()
    """From 0; none where a quantity has no heads."""

    def layer(self, position: int) -> int:
        """The layer at a position."""
        at = self.steps[position]
        return self.architecture.steps[at if isinstance(at, int) else at[0]].layer

    def visits(self, position: int) -> tuple[int, ...]:
        """The visit at a position, or both of a pair."""
        at = self.steps[position]
        return tuple(self.architecture.steps[s].visit for s in ((at,) if isinstance(at, int) else at))

    def groups(self) -> Iterator[tuple[str, Cell, list[int]]]:
        """Layers as a row names them, visit, and positions: each loop on each visit or pair of visits."""
        for loop in self.loops:
            visits: list[tuple[int, ...]] = [(visit,) for visit in range(loop.num_visits)]
            visits += combinations(range(loop.num_visits), 2)
            for each in visits:
                inside = [p for p in range(len(self.steps)) if self.visits(p) == each and self.layer(p) in loop.layers]
                if inside:
                    layers = sorted(self.layer(p) for p in inside)
                    yield loop_name(loop, self.architecture, layers), _visit(each), inside

    def places(self, levels: Sequence[Level] = HEADS) -> tuple[Place, ...]:
        """Each loop on each visit, then each position, then each head of each position."""
        mean: Where = {"head": "mean"} if self.heads else {}
        found = []
        if "headline" in levels:
            for layers, visit, inside in self.groups():
                found.append(Place("headline", {"layers": layers, "visit": visit, **mean}, inside, []))
        for level in ("layer", "head"):
            for position in range(len(self.steps)) if level in levels else ():
                where: Where = {"layers": str(self.layer(position) + 1), "visit": _visit(self.visits(position))}
                if level == "layer":
                    found.append(Place("layer", {**where, **mean}, [position], []))
                else:
                    found += [Place("head", {**where, "head": head + 1}, [position], [index])
                              for index, head in enumerate(self.heads)]  # fmt: skip
        return tuple(found)

    def parts(self) -> list[tuple[str, Place]]:
        """Prelude, each visit of each loop, and coda, in order of execution; between two loops there is a part of its
        own. A Baseline's loop is the layers that a headline averages over.
        """
        looped = [p for p in range(len(self.steps)) if any(self.layer(p) in loop.layers for loop in self.loops)]
        found = [("loop", Place("headline", {"layers": layers, "visit": visit}, inside, []))
                 for layers, visit, inside in self.groups()]  # fmt: skip
        names: dict[str, list[int]] = {}
        for p in range(len(self.steps)) if looped else ():
            if p not in looped:
                name = "prelude" if p < looped[0] else "coda" if p > looped[-1] else "between loops"
                names.setdefault(name, []).append(p)
        for name, inside in names.items():
            layers = f"{name} {layer_range(sorted({self.layer(p) for p in inside}))}"
            found.append((name, Place("headline", {"layers": layers, "visit": 1}, inside, [])))
        return sorted(found, key=lambda part: part[1].positions[0])

    def elsewhere(self, value_LH: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each position the mean over positions of other layers, for a looped layer of those that are not; NaN
        where there are none. -> (L, H)"""
        looped = {layer for loop in self.loops for layer in loop.layers}
        layers = [self.layer(position) for position in range(len(self.steps))]
        mean_LH = np.full(value_LH.shape, np.nan)
        for position, layer in enumerate(layers):
            other = [p for p, each in enumerate(layers) if each != layer and not (layer in looped and each in looped)]
            if other:
                mean_LH[position] = value_LH[other].mean(0)
        return mean_LH

    def labels(self) -> list[str]:
        """Each position as a person reads it: `layer 5, visit 2`."""
        return [f"layer {self.layer(p) + 1}, visit {_visit(self.visits(p))}" for p in range(len(self.steps))]


def _visit(visits: tuple[int, ...]) -> Cell:
    return visits[0] + 1 if len(visits) == 1 else pair_label(visits)
