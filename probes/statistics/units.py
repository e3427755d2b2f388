"""Tokens of the units of a step, its experts or its attention heads: how often each has each token, and rows of it.

An expert has a token once, or not at all; a head has of a key the attention that it pays it. U units, V token ids; the
letters of statistics are those of `probes.statistics.grid`.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from probes.statistics.bootstrap import weights
from probes.statistics.grid import Grid, Place, Where
from probes.statistics.quantities import Quantity
from smelt_interp.data.samples import Samples

Numbers = NDArray[np.float64]


def histogram(samples: Samples, amount_BT: Numbers, vocab_size: int) -> Numbers:
    """The amounts of each id in each sample. -> (B, V)"""
    row, position = np.nonzero(amount_BT)
    index = row * vocab_size + samples.ids_NT[row, position]
    flat = np.bincount(index, amount_BT[row, position], minlength=len(samples) * vocab_size)
    return flat.reshape(len(samples), vocab_size).astype(np.float64)


def by_token(
    held_BTU: Numbers, ids_BT: NDArray[np.int32], group_B: NDArray[np.int64], groups: int, vocab_size: int
) -> Numbers:
    """How much of each id each unit has, by group of documents. -> (G, U, V)"""
    row, position, unit = np.nonzero(held_BTU)
    num_units = held_BTU.shape[-1]
    index = (group_B[row] * num_units + unit) * vocab_size + ids_BT[row, position]
    flat = np.bincount(index, held_BTU[row, position, unit], minlength=groups * num_units * vocab_size)
    return flat.reshape(groups, num_units, vocab_size).astype(np.float64)


def each_unit(
    name: str,
    grid: Grid,
    n: int,
    value_RLUX: Numbers,
    nulls: Mapping[str, Numbers | float],
    column: Callable[[int, int, int], Where],
    groups: int | None = None,
) -> Quantity:
    """X rows of each unit at each position, those of a value above 0; `column(position, unit, x)` says of what.
    Units are the grid's heads, experts where it has none. Nulls are (L, U, X)."""
    shape = value_RLUX.shape[1:]
    kind, numbers = ("head", grid.heads) if grid.heads else ("expert", range(shape[1]))
    places = [
        Place("head", {**place.where, kind: numbers[unit] + 1, **column(at, unit, x)}, [at], [unit * shape[-1] + x])
        for at, place in enumerate(grid.places(("layer",)))
        for unit, x in np.ndindex(shape[1:])
        if value_RLUX[0, at, unit, x] > 0
    ]
    return Quantity(
        name=name,
        value_RLH=value_RLUX.reshape(len(value_RLUX), shape[0], -1),
        places=places,
        n=n,
        groups=groups,
        nulls={name: np.broadcast_to(null, shape).reshape(shape[0], -1) for name, null in nulls.items()},
        picked=True,
    )


def largest(x: Numbers, most: int) -> NDArray[np.intp]:
    """Where the last axis is largest, largest first."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :most]


def group_weights(counted_G: Numbers, seed: int) -> tuple[Numbers, int]:
    """The resamples of groups of documents (R, G), the value alone where there is one group; and how many hold any."""
    groups = len(counted_G)
    weight_RG = weights(seed, np.arange(groups)) if groups > 1 else np.ones((1, 1))
    return weight_RG, int((counted_G > 0).sum())
