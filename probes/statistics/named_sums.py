"""Sums by name: those of several positions along the plan as one array each, and the names under a common word."""

from collections.abc import Mapping, Sequence

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from smelt_interp.arrays import Array


def stacked(word: str, found: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Sums (B, ...) of each position by name, stacked on a new axis 1: `word.name` (B, L, ...)."""
    return {
        f"{word}.{name}": array_namespace(found[0][name]).stack([each[name] for each in found], axis=1)
        for name in (found[0] if found else ())
    }


def under(sums: Mapping[str, NDArray[np.float64]], word: str) -> dict[str, NDArray[np.float64]]:
    """The sums that are named `word.name`, by name."""
    return {name.removeprefix(f"{word}."): x for name, x in sums.items() if name.startswith(f"{word}.")}
