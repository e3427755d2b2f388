"""Medians of ratios in constant memory: a histogram of log2 ratios that remembers the ends of what fell in each bin.

Bins are 1/64 of an octave wide from 1/256 to 256; the first and last bin take everything beyond. The median is read at
half of the counts, between the smallest and the largest ratio that fell into its bin: exact where these are equal, and
within 1.1% of the true median otherwise (inside the range), far closer with many tokens.

Everything is float64, and one recording gives one answer however it is batched. A network that runs in float32 rounds
a little differently in each batch size; a ratio that this moves over the edge of a bin moves the median, or an end of
its interval, by a part of the bin: some 1e-6.
"""

import numpy as np
from numpy.typing import NDArray

BINS_PER_OCTAVE = 64
LOWEST, HIGHEST = -8, 8
NUM_BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE
_SMALLEST = 2.0**-1000
"""Stands for a ratio of 0, which has no logarithm."""


class RatioHistogram:
    """Histograms of several columns (axis P) of ratios; J is the axis of bins."""

    def __init__(self, num_columns: int) -> None:
        self._least_PJ = np.full((num_columns, NUM_BINS), np.inf)
        self._most_PJ = np.full((num_columns, NUM_BINS), -np.inf)

    def count(self, column: int, ratio_BT: NDArray[np.float64], counted_BT: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Counts of each sample's ratios by bin, (B, J); their ends are remembered."""
        log_N = np.log2(np.maximum(ratio_BT[counted_BT], _SMALLEST))
        bin_N = np.clip(np.floor((log_N - LOWEST) * BINS_PER_OCTAVE), 0, NUM_BINS - 1).astype(np.intp)
        np.minimum.at(self._least_PJ[column], bin_N, log_N)
        np.maximum.at(self._most_PJ[column], bin_N, log_N)
        sample_N = np.nonzero(counted_BT)[0]
        flat = np.bincount(sample_N * NUM_BINS + bin_N, minlength=len(ratio_BT) * NUM_BINS)
        return flat.reshape(len(ratio_BT), NUM_BINS).astype(np.float32)

    def median(self, count_RPJ: NDArray[np.floating]) -> NDArray[np.float64]:
        """The median of every column from sums of counts, such as those of each resample; NaN without a count."""
        running_RPJ = np.cumsum(count_RPJ, -1, dtype=np.float64)
        half_RP = running_RPJ[..., -1] / 2
        bin_RP = (running_RPJ >= half_RP[..., None]).argmax(-1)
        inside_RP, until_RP = (
            np.take_along_axis(x_RPJ, bin_RP[..., None], -1)[..., 0] for x_RPJ in (count_RPJ, running_RPJ)
        )
        column_P = np.arange(len(self._least_PJ))
        least_RP, most_RP = self._least_PJ[column_P, bin_RP], self._most_PJ[column_P, bin_RP]
        counted_RP = half_RP > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            part_RP = (half_RP - (until_RP - inside_RP)) / inside_RP
            median_RP = np.exp2(least_RP + part_RP * (most_RP - least_RP))
        return np.asarray(np.where(counted_RP, median_RP, np.nan))
