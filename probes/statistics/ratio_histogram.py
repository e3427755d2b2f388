"""Medians of ratios in constant memory: a histogram of log2 ratios that remembers the ends of what fell in each bin.

Bins are 1/64 of an octave wide from 1/256 to 256; the first and last bin take everything beyond. The median is read at
half of the counts, between the smallest and the largest ratio that fell into its bin: exact where these are equal, and
within 1.1% of the true median otherwise (inside the range), far closer with many tokens.

Everything is float64, and one recording gives one answer however it is batched. A network that runs in float32 rounds
a little differently in each batch size; a ratio that this moves over the edge of a bin moves the median, or an end of
its interval, by a part of the bin: some 1e-6. J is the axis of bins.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS_PER_OCTAVE = 64
LOWEST, HIGHEST = -8, 8
NUM_BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE
_SMALLEST = 2.0**-1000
"""Stands for a ratio of 0, which has no logarithm."""


class Counted(NamedTuple):
    """Ratios of B samples by bin. Counts add up over samples, ends by their largest."""

    counts_BJ: NDArray[np.float32]
    ends_2J: NDArray[np.float64]
    """Of log2 of the ratios in each bin: minus the smallest, and the largest; -inf where there are none."""


def count(ratio_BT: NDArray[np.float64], counted_BT: NDArray[np.bool_]) -> Counted:
    """The finite ratios of the counted tokens by bin."""
    log_N = np.log2(np.maximum(ratio_BT[counted_BT], _SMALLEST))
    bin_N = np.clip(np.floor((log_N - LOWEST) * BINS_PER_OCTAVE), 0, NUM_BINS - 1).astype(np.intp)
    ends_2J = np.full((2, NUM_BINS), -np.inf)
    np.maximum.at(ends_2J[0], bin_N, -log_N)
    np.maximum.at(ends_2J[1], bin_N, log_N)
    flat = np.bincount(np.nonzero(counted_BT)[0] * NUM_BINS + bin_N, minlength=len(ratio_BT) * NUM_BINS)
    return Counted(flat.reshape(len(ratio_BT), NUM_BINS).astype(np.float32), ends_2J)


def median(counts: NDArray[np.floating], ends_2J: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median from sums of counts (..., J), such as those of each resample; NaN without a count. -> (...)"""
    running = np.cumsum(counts, -1, dtype=np.float64)
    half = running[..., -1] / 2
    bins = (running >= half[..., None]).argmax(-1)
    inside, until = (np.take_along_axis(x, bins[..., None], -1)[..., 0] for x in (counts, running))
    least, most = -ends_2J[0][bins], ends_2J[1][bins]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = (half - (until - inside)) / inside
        found = np.exp2(least + part * (most - least))
    return np.asarray(np.where(half > 0, found, np.nan))
