"""Rank correlation of two numbers over documents, with resamples, and how large shuffles of the documents make it."""

import numpy as np
from numpy.typing import NDArray

from probes.statistics.arrays import ratio

Numbers = NDArray[np.float64]


def ranks(x_D: Numbers, weight_RD: Numbers) -> Numbers:
    """Ranks from 0 to each resample's number of documents, equal values in the middle of theirs. -> (R, D)"""
    order_D = np.argsort(x_D, kind="stable")
    first_U = np.flatnonzero(np.diff(x_D[order_D], prepend=-np.inf))
    weight_RU = np.add.reduceat(weight_RD[:, order_D], first_U, axis=1)
    rank_RU = np.cumsum(weight_RU, 1) - weight_RU / 2
    rank_RD = np.empty_like(weight_RD)
    rank_RD[:, order_D] = np.repeat(rank_RU, np.diff(first_U, append=len(x_D)), axis=1)
    return rank_RD


def rank_correlation(x_D: Numbers, y_D: Numbers, weight_RD: Numbers) -> Numbers:
    """Spearman's, in each resample; NaN where one of the two is the same in all its documents. -> (R,)"""
    total_R1 = weight_RD.sum(1, keepdims=True)
    centred_x, centred_y = (
        rank_RD - ratio((weight_RD * rank_RD).sum(1, keepdims=True), total_R1)
        for rank_RD in (ranks(x_D, weight_RD), ranks(y_D, weight_RD))
    )
    cross, square_x, square_y = (
        (weight_RD * a * b).sum(1) for a, b in ((centred_x, centred_y), (centred_x, centred_x), (centred_y, centred_y))
    )
    return ratio(cross, np.sqrt(square_x * square_y))


def difference_of_means(x_D: Numbers, y_D: Numbers, weight_RD: Numbers) -> Numbers:
    """Mean of x where y is 1 less the mean where it is 0, in each resample. -> (R,)"""
    yes, no = ((weight_RD * (y_D == value) * x_D).sum(1) for value in (1, 0))
    return ratio(yes, (weight_RD * (y_D == 1)).sum(1)) - ratio(no, (weight_RD * (y_D == 0)).sum(1))
