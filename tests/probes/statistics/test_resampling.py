"""Resampled sums: the bootstrap's law, independence of batches, shuffles that stay inside their sample."""

import numpy as np
import pytest

from probes.statistics.resampling import (
    NUM_RESAMPLES,
    Resampled,
    bootstrap_weights,
    interval,
    ratio,
    recentred_interval,
    shuffled_positions,
)
from smelt_interp.errors import UserError


def test_weights_belong_to_the_sample_and_are_poisson() -> None:
    ids = np.arange(300)
    weight_RB = bootstrap_weights(0, ids)
    np.testing.assert_array_equal(weight_RB[:, 17:19], bootstrap_weights(0, np.array([17, 18])))
    assert not np.array_equal(weight_RB, bootstrap_weights(1, ids))
    assert (weight_RB[0] == 1).all()
    draws = weight_RB[1:]
    assert draws.mean() == pytest.approx(1, abs=0.02)
    assert draws.var() == pytest.approx(1, abs=0.03)
    # Neither one sample's resamples nor one resample's samples move together.
    assert draws.mean(0).var() == pytest.approx(1 / NUM_RESAMPLES, rel=0.3)
    assert draws.mean(1).var() == pytest.approx(1 / 300, rel=0.3)


def test_sums_do_not_depend_on_batches_or_their_order() -> None:
    x_N3 = np.random.default_rng(0).standard_normal((10, 3))
    ids = np.arange(10)
    one, many = Resampled(0), Resampled(0)
    one.add(ids, {"x": x_N3})
    for chunk in ([7, 8, 9], [0], [3, 1, 2], [4, 5, 6]):
        many.add(ids[chunk], {"x": x_N3[chunk]})
    np.testing.assert_allclose(one["x"], many["x"], atol=1e-12)
    np.testing.assert_allclose(one["x"][0], x_N3.sum(0))


def test_the_interval_of_a_ratio_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        sums = Resampled(trial)
        length_N = generator.integers(5, 15, 40)
        mean_N = 0.5 + generator.standard_normal(40)
        sums.add(np.arange(40), {"top": mean_N * length_N, "bottom": length_N})
        found = interval(ratio(sums["top"], sums["bottom"]), 40)
        covered += found.low <= 0.5 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_recentred_interval_surrounds_a_maximum() -> None:
    generator = np.random.default_rng(2)
    load_N8 = generator.multinomial(20, np.full(8, 1 / 8), 30)
    sums = Resampled(0)
    sums.add(np.arange(30), {"load": load_N8})
    largest_R = sums["load"].max(-1) / sums["load"].sum(-1)
    plain, shifted = interval(largest_R, 30), recentred_interval(largest_R, 30)
    assert shifted.low < shifted.value < shifted.high
    bias = largest_R[1:].mean() - largest_R[0]
    assert bias > 0
    assert plain.low - shifted.low == pytest.approx(bias)
    assert plain.high - shifted.high == pytest.approx(bias)


def test_resamples_that_define_nothing_are_left_out() -> None:
    sums = Resampled(0)
    sums.add(np.array([0]), {"top": np.array([3.0]), "bottom": np.array([2.0])})
    assert interval(ratio(sums["top"], sums["bottom"]), 1)[:3] == (1.5, 1.5, 1.5)
    assert np.isnan(interval(np.full(5, np.nan), 0).low)


def test_shuffles_move_every_token_of_a_sample_and_no_padding() -> None:
    real_BT = np.array([[True] * 6 + [False] * 2, [True] * 8])
    order_XBT = shuffled_positions(real_BT, np.array([4, 9]), 0, 500)
    assert (order_XBT[:, 0, 6:] == [6, 7]).all()
    np.testing.assert_array_equal(np.sort(order_XBT, -1), np.broadcast_to(np.arange(8), order_XBT.shape))
    np.testing.assert_array_equal(order_XBT[:, 1:], shuffled_positions(real_BT[1:], np.array([9]), 0, 500))
    # Uniform: every place receives every token equally often.
    counts = np.array([np.bincount(order_XBT[:, 0, t], minlength=6) for t in range(6)])
    assert (np.abs(counts - 500 / 6) < 5 * np.sqrt(500 / 6)).all()


def test_samples_must_be_there_and_be_there_once() -> None:
    sums = Resampled(0)
    with pytest.raises(UserError, match="samples to measure must be at least one; got 0"):
        sums.require_samples()
    sums.add(np.array([1, 2]), {"x": np.ones(2)})
    with pytest.raises(UserError, match=r"sample ids must be distinct; got \[2\] twice"):
        sums.add(np.array([2]), {"x": np.ones(1)})
