"""The vectorised fits end where scipy's optimiser ends, and bootstrap weights are what they say."""

import numpy as np
import pytest
from scipy.optimize import minimize

from smelt_interp.scaling.robust_fit import Floats, cell_weights, huber, interval, minimise

POINTS = np.linspace(-1.0, 2.0, 25)
BOUNDS = np.array([-10.0, -10.0]), np.array([10.0, 10.0])


def exponential(parameters_XP: Floats) -> tuple[Floats, Floats]:
    """exp(p + q x)."""
    values_XN = np.exp(parameters_XP[:, :1] + parameters_XP[:, 1:] * POINTS)
    return values_XN, np.stack([values_XN, values_XN * POINTS], axis=-1)


def data(seed: int) -> Floats:
    noise = np.random.default_rng(seed).standard_t(2, len(POINTS))
    return np.exp(0.5 - 0.8 * POINTS) + 0.05 * noise


def test_huber_is_a_square_inside_and_a_line_outside() -> None:
    assert huber(np.array([-0.5, 0.5, 3.0]), 1.0).tolist() == [0.125, 0.125, 2.5]
    assert huber(np.array([-0.5, 3.0]), np.inf).tolist() == [0.125, 4.5]
    step = 1e-6
    assert huber(np.array([1 + step]), 1.0)[0] - huber(np.array([1 - step]), 1.0)[0] == pytest.approx(
        2 * step, rel=1e-4
    )


@pytest.mark.parametrize("delta", [0.02, np.inf])
def test_each_weighted_fit_is_at_scipys_minimum(delta: float) -> None:
    target_N = data(3)
    weights_XN = np.random.default_rng(0).integers(0, 3, (20, len(POINTS))).astype(float)
    fits = minimise(exponential, target_N, weights_XN, np.zeros((20, 2)), BOUNDS, delta)
    for weights_N, found, loss in zip(weights_XN, fits.parameters_XP, fits.loss_X, strict=True):

        def objective(parameters_P: Floats, weights_N: Floats = weights_N) -> float:
            residual_N = exponential(parameters_P[None])[0][0] - target_N
            return float((weights_N * huber(residual_N, delta)).sum())

        reference = minimize(objective, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14})
        assert loss == pytest.approx(objective(found))
        assert loss <= reference.fun * (1 + 1e-6)


def test_exact_data_give_the_planted_parameters_from_any_start() -> None:
    starts_XP = np.array([[0.0, 0.0], [2.0, 1.0], [-2.0, -2.0]])
    target_N = np.exp(0.5 - 0.8 * POINTS)
    fits = minimise(exponential, target_N, np.ones((3, len(POINTS))), starts_XP, BOUNDS, 1e-3)
    np.testing.assert_allclose(fits.parameters_XP, np.tile([0.5, -0.8], (3, 1)), atol=1e-6)


def test_parameters_stay_within_their_bounds() -> None:
    bounds = np.array([-10.0, -0.3]), np.array([10.0, 10.0])
    fits = minimise(exponential, data(1), np.ones((1, len(POINTS))), np.array([[0.0, -5.0]]), bounds, np.inf)
    assert fits.parameters_XP[0, 1] == -0.3


def test_a_parameter_that_no_weighted_point_sees_does_not_break_the_solve() -> None:
    weights_XN = np.zeros((1, len(POINTS)))
    fits = minimise(exponential, data(1), weights_XN, np.array([[0.1, 0.2]]), BOUNDS, 0.1)
    assert fits.loss_X[0] == 0
    assert np.isfinite(fits.parameters_XP).all()


def test_a_draw_weighs_all_points_of_a_cell_alike_and_draws_as_many_cells_as_there_are() -> None:
    cell_N = np.array([0, 0, 1, 1, 1, 2])
    weights_XN = cell_weights(cell_N, 500, np.random.default_rng(0))
    assert (weights_XN[:, 0] == weights_XN[:, 1]).all()
    assert (weights_XN[:, 2:5] == weights_XN[:, 2:3]).all()
    assert (weights_XN[:, [0, 2, 5]].sum(axis=1) == 3).all()
    np.testing.assert_allclose(weights_XN.mean(axis=0), 1, atol=0.15)


def test_an_interval_leaves_a_fortieth_on_either_side_and_allows_infinity() -> None:
    low, high = interval(np.arange(1, 1001).astype(float))
    assert (low, high) == (25, 975)
    draws = np.concatenate([np.full(100, -np.inf), np.arange(900.0)])
    assert interval(draws)[0] == -np.inf
