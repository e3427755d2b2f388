"""Arrays that may be numpy's or torch's: arithmetic is written once and runs where they are.

Such a function takes its functions from `array_namespace(x)` (array-api-compat) and from einops: numpy on a capture,
where torch need not be installed, torch on the device where a network ran.
"""

from typing import Protocol, cast

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray


class Array(Protocol):
    """A numpy array or a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        ...


Floats = NDArray[np.float64]
"""An `Array` in float64; static types know numpy's, and only what torch's has as well is used."""


def moved(x: Array, like: Array) -> Array:
    """A numpy array as one of the kind and on the device of `like`."""
    return cast("Array", array_namespace(like).asarray(x, device=device(like)))


def floats(x: Array) -> Floats:
    """The same numbers in float64."""
    xp = array_namespace(x)
    return cast("Floats", xp.astype(x, xp.float64))


def measured(x: Array, mask_NT: Array) -> Floats:
    """x (N, T, ...) in float64, with 0 at every token that is not measured, whatever stood there."""
    xp = array_namespace(x)
    mask = xp.reshape(moved(mask_NT, x), (*mask_NT.shape, *(1,) * (len(x.shape) - 2)))
    return cast("Floats", xp.where(mask, floats(x), 0.0))
