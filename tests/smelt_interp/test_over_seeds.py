"""The interval over runs is that of scipy's t-test."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from smelt_interp.over_seeds import half_interval


def test_the_interval_over_seeds_is_students():
    values = np.random.default_rng(0).normal(size=7)
    low, high = ttest_1samp(values, 0).confidence_interval()
    assert half_interval(values) == pytest.approx((high - low) / 2)
    assert half_interval(values[:1]) is None
