"""Arrays that may be numpy's or torch's: arithmetic is written once and runs where they are.

Such a function takes its functions from `array_namespace(x)` (array-api-compat) and from einops, and its operators from
the arrays: numpy on a capture, where torch need not be installed, torch on the device where a network ran.
"""

from typing import cast

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

Array = NDArray[np.generic]
"""A numpy array or a torch tensor; static types know numpy's, and only what both have is used."""
Floats = NDArray[np.float64]
"""An `Array` of real numbers."""


def moved(x: Array, like: Array) -> Array:
    """A numpy array as one of the kind and on the device of `like`."""
    return cast("Array", array_namespace(like).asarray(x, device=device(like)))


def measured(x: Array, mask_NT: Array) -> Floats:
    """x (N, T, ...) in float64, with 0 at every token that is not measured, whatever stood there."""
    xp = array_namespace(x)
    mask = xp.reshape(moved(mask_NT, x), (*mask_NT.shape, *(1,) * (x.ndim - 2)))
    return cast("Floats", xp.where(mask, xp.astype(x, xp.float64), 0.0))
