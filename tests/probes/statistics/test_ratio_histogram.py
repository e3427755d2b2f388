"""Medians from histograms: exact where they can be, within the stated resolution elsewhere."""

import numpy as np
import pytest

from probes.statistics.ratio_histogram import BINS_PER_OCTAVE, NUM_BINS, count, median


def median_of(ratio_BT: np.ndarray, counted_BT: np.ndarray) -> float:
    counts_BJ, ends_2J = count(ratio_BT, counted_BT)
    return float(median(counts_BJ.sum(0), ends_2J))


@pytest.mark.parametrize("ratio", [1 / 3, 1.0, 2.0, 1000.0, 0.0])
def test_equal_ratios_have_their_value_as_median(ratio: float) -> None:
    assert median_of(np.full((2, 5), ratio), np.ones((2, 5), bool)) == pytest.approx(ratio, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("num", [1, 2, 3, 10, 1000])
def test_the_median_is_within_one_bin(num: int) -> None:
    generator = np.random.default_rng(num)
    for _ in range(20):
        ratio_BT = np.exp(generator.standard_normal((1, num)))
        low, high = np.sort(ratio_BT[0])[[(num - 1) // 2, num // 2]]
        found = median_of(ratio_BT, np.ones_like(ratio_BT, bool))
        step = 2 ** (1 / BINS_PER_OCTAVE)
        assert low / step <= found <= high * step


def test_many_tokens_fix_the_median_far_within_a_bin() -> None:
    ratio_BT = np.exp(np.random.default_rng(0).standard_normal((4, 1000)))
    assert median_of(ratio_BT, np.ones_like(ratio_BT, bool)) == pytest.approx(np.median(ratio_BT), rel=2e-3)


def test_only_counted_tokens_count_and_no_token_has_no_median() -> None:
    ratio_BT, counted_BT = np.array([[1.0, 4.0, 4.0, np.nan]]), np.array([[True, False, False, False]])
    assert median_of(ratio_BT, counted_BT) == 1.0
    assert np.isnan(median_of(ratio_BT, np.zeros_like(counted_BT)))


def test_counts_are_by_sample_and_add_up() -> None:
    ratio_BT = np.exp(np.random.default_rng(0).standard_normal((3, 7)))
    counts_BJ, _ = count(ratio_BT, np.ones((3, 7), bool))
    assert counts_BJ.shape == (3, NUM_BINS)
    np.testing.assert_array_equal(counts_BJ.sum(-1), 7)
