"""The one bootstrap: Poisson, over documents, keyed by document and seed, so that it streams, merges and pairs.

In resample r every sample of document d counts Poisson(1) times, the same number wherever d is met (Chamandy,
Muralidharan, Najmi and Naidu, "Estimating uncertainty for massive data streams", 2012). A sum over samples is kept once
as it is and once for each resample; any function of sums then has an interval without a second pass, sums of two halves
add up, and a difference of two visits or two networks on the same documents is paired by itself.

The interval is the expanded percentile interval of Hesterberg ("What teachers should know about the bootstrap", 2015):
the quantiles at Phi(-+ sqrt(n / (n - 1)) t) of the resamples, t the 97.5% point of Student's law with n - 1 degrees of
freedom, n the documents. Plain percentiles are too narrow for small n. Below FEWEST documents the resamples of n values
cannot reach that far, and the interval is value -+ t times the standard deviation of the resamples; one document has
none. Axis R is the value and its resamples.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 400
FEWEST = 5
"""Documents from which quantiles of the resamples cover; measured in the tests."""
LEVEL = 0.95
MOST_GROUPS, FEWEST_GROUPS, GROUP_ENTRIES = 64, 8, 2**22
"""Numbers of which a resample each would not fit into memory are counted by group of documents, whose number then
stands for a document's: as many groups as keep the counts below so many."""


class Estimate(NamedTuple):
    """A number with its 95% interval over `n` documents; the ends are NaN where there is none."""

    value: float
    low: float
    high: float
    n: int


def sample_generator(seed: int, sample_id: int) -> np.random.Generator:
    """Random numbers that belong to one sample, for shuffles of its tokens, whatever batch it comes in."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, sample_id])))


def weights(seed: int, document_B: NDArray[np.integer]) -> NDArray[np.float64]:
    """How often each sample counts: once in row 0, Poisson(1) times in every resample. -> (1 + NUM_RESAMPLES, B)"""
    documents, of_sample_B = np.unique(document_B, return_inverse=True)
    draws_DR = np.empty((len(documents), NUM_RESAMPLES))
    for index, document in enumerate(documents.tolist()):
        # The last word keeps these numbers apart from those that shuffle a sample of the same number.
        key = np.random.SeedSequence([seed, document % 2**64, 1])
        draws_DR[index] = np.random.Generator(np.random.PCG64(key)).poisson(1.0, NUM_RESAMPLES)
    return np.concatenate([np.ones((1, len(document_B))), draws_DR[of_sample_B].T])


def num_groups(entries: int) -> int:
    """Groups of documents by which that many numbers are counted."""
    return min(MOST_GROUPS, max(FEWEST_GROUPS, GROUP_ENTRIES // entries))


def binomial_interval(value: float, n: int) -> Estimate:
    """A share of `n` independent yes-or-no documents with its exact 95% interval (Clopper and Pearson, 1934), which is
    not a point where all or none say yes."""
    if n < 1 or not np.isfinite(value):
        return Estimate(value, np.nan, np.nan, n)
    from scipy.special import betaincinv

    yes, outside = value * n, (1 - LEVEL) / 2
    low = float(betaincinv(yes, n - yes + 1, outside)) if yes > 0 else 0.0
    high = float(betaincinv(yes + 1, n - yes, 1 - outside)) if yes < n else 1.0
    return Estimate(value, low, high, n)


def interval(value_R: NDArray[np.floating], n: int, *, recentred: bool = False) -> Estimate:
    """A statistic's value (entry 0) with its 95% interval from the resamples that define it, over n documents.

    `recentred` is for statistics that resampling biases, such as a maximum, an entropy or a distance of loads, none of
    which is below 0: a resample is noisier than the samples it is drawn from, and a maximum picks the noise up. The
    ends are shifted by that bias, the mean of the resamples minus the value, and not below 0.
    """
    value = float(value_R[0])
    draws_R = value_R[1:][np.isfinite(value_R[1:])]
    if n < 2 or not len(draws_R) or not np.isfinite(value):
        return Estimate(value, np.nan, np.nan, n)
    from scipy.special import ndtr, stdtrit  # scipy is slow to import, and `--help` needs none

    t = float(stdtrit(n - 1, (1 + LEVEL) / 2))
    if n < FEWEST:
        spread = t * float(draws_R.std())
        return Estimate(value, value - spread, value + spread, n)
    outside = float(ndtr(-np.sqrt(n / (n - 1)) * t))
    low, high = (float(end) for end in np.quantile(draws_R, (outside, 1 - outside)))
    if recentred:
        bias = float(draws_R.mean()) - value
        low, high = max(low - bias, 0.0), max(high - bias, 0.0)
    return Estimate(value, low, high, n)
