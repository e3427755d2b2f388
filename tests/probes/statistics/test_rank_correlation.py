"""Rank correlation is scipy's, whole-number weights are repeated documents, and shuffles have their law."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from probes.statistics.rank_correlation import difference_of_means, rank_correlation

X_D = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
Y_D = np.array([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
WEIGHT_RD = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [2, 0, 1, 3, 0, 1, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]], np.float64)


def test_weights_are_repeated_documents() -> None:
    whole, repeated, one = rank_correlation(X_D, Y_D, WEIGHT_RD)
    assert whole == pytest.approx(spearmanr(X_D, Y_D).statistic)
    times = WEIGHT_RD[1].astype(int)
    assert repeated == pytest.approx(spearmanr(X_D.repeat(times), Y_D.repeat(times)).statistic)
    assert np.isnan(one)


def test_a_difference_of_means_is_between_the_classes_of_the_other() -> None:
    whole, repeated, one = difference_of_means(X_D, Y_D, WEIGHT_RD)
    assert whole == pytest.approx(X_D[Y_D == 1].mean() - X_D[Y_D == 0].mean())
    x_D, y_D = (values_D.repeat(WEIGHT_RD[1].astype(int)) for values_D in (X_D, Y_D))
    assert repeated == pytest.approx(x_D[y_D == 1].mean() - x_D[y_D == 0].mean())
    assert np.isnan(one)
