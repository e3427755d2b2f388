"""Many small robust curve fits at once: Huber loss by damped reweighted Gauss-Newton steps, vectorised over fits.

A bootstrap is thousands of fits of one curve to one set of points under other weights. One step of all of them is one
batched linear solve, so 2000 draws take less than a second. Each step solves (Levenberg 1944, Marquardt 1963; Huber's
psi as weights, Holland and Welsch 1977)

    (J' W J + damping * diag(J' W J)) step = -J' W r        W = weight * min(1, delta / |r|)

and is kept only when it lowers the fit's own Huber loss. Shape suffixes: X fits, N points, P parameters.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Floats = NDArray[np.float64]

FIRST_DAMPING = 1e-2
DAMPING_STEP = 4.0
LARGEST_DAMPING = 1e8
SMALLEST_DIAGONAL = 1e-14
"""Keeps the system solvable where a parameter has no effect on any weighted point."""
CONVERGED = 1e-9
"""A relative fall of the loss below this, three steps in a row, ends a fit."""
STEPS_WITHOUT_GAIN = 3
MOST_STEPS = 300

Draws = Annotated[int, Field(ge=1, le=100_000)]
"""How many times a bootstrap draws."""


class Curve(Protocol):
    """A curve at fixed points."""

    def __call__(self, parameters_XP: Floats) -> tuple[Floats, Floats]:
        """Values (X, N) and their derivatives by the parameters (X, N, P)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Where each fit ended."""

    parameters_XP: Floats
    loss_X: Floats
    """Weighted sum of the Huber losses of the residuals."""


def huber(residual: Floats, delta: float) -> Floats:
    """Huber loss of each residual: r^2 / 2 up to delta, then delta (|r| - delta / 2). Infinite delta is squares."""
    if math.isinf(delta):
        return 0.5 * residual**2
    size = np.abs(residual)
    return np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta))


def minimise(
    curve: Curve,
    target_N: Floats,
    weights_XN: Floats,
    starts_XP: Floats,
    bounds: tuple[Floats, Floats],
    delta: float,
) -> Fits:
    """Fit every start under its own weights, each parameter within (lower, upper) bounds of shape (P,)."""
    lower_P, upper_P = bounds
    parameters_XP = np.clip(starts_XP, lower_P, upper_P)
    values_XN, slopes_XNP = curve(parameters_XP)
    residual_XN = values_XN - target_N
    loss_X = (weights_XN * huber(residual_XN, delta)).sum(axis=-1)
    damping_X = np.full(len(loss_X), FIRST_DAMPING)
    idle_X = np.zeros(len(loss_X), dtype=np.int64)
    open_fits = np.arange(len(loss_X))
    for _ in range(MOST_STEPS):
        if len(open_fits) == 0:
            break
        step = _step(residual_XN[open_fits], slopes_XNP[open_fits], weights_XN[open_fits], damping_X[open_fits], delta)
        moved = np.clip(parameters_XP[open_fits] + step, lower_P, upper_P)
        values, slopes = curve(moved)
        residual = values - target_N
        loss = (weights_XN[open_fits] * huber(residual, delta)).sum(axis=-1)
        before = loss_X[open_fits]
        lower = loss < before
        fell = np.where(lower, before - loss, 0.0) / np.maximum(before, np.finfo(float).tiny)
        kept = open_fits[lower]
        parameters_XP[kept], residual_XN[kept], slopes_XNP[kept] = moved[lower], residual[lower], slopes[lower]
        loss_X[kept] = loss[lower]
        damping = damping_X[open_fits] * np.where(lower, 1 / DAMPING_STEP, DAMPING_STEP)
        damping_X[open_fits] = damping
        # A refused step says nothing while the damping can still grow; then the fit is at its minimum or a bound.
        idle = np.where(lower, fell < CONVERGED, damping > LARGEST_DAMPING)
        idle_X[open_fits] = np.where(idle, idle_X[open_fits] + 1, np.where(lower, 0, idle_X[open_fits]))
        open_fits = open_fits[idle_X[open_fits] < STEPS_WITHOUT_GAIN]
    return Fits(parameters_XP=parameters_XP, loss_X=loss_X)


def _step(residual_XN: Floats, slopes_XNP: Floats, weights_XN: Floats, damping_X: Floats, delta: float) -> Floats:
    size_XN = np.maximum(np.abs(residual_XN), np.finfo(float).tiny)
    weighted_XNP = slopes_XNP * (weights_XN * np.minimum(1.0, delta / size_XN))[..., None]
    curvature_XPP = weighted_XNP.transpose(0, 2, 1) @ slopes_XNP
    slope_XP = (weighted_XNP.transpose(0, 2, 1) @ residual_XN[..., None])[..., 0]
    diagonal_XP = np.einsum("xpp->xp", curvature_XPP)
    damped_XPP = (
        curvature_XPP + np.eye(slope_XP.shape[-1]) * (damping_X[:, None] * diagonal_XP + SMALLEST_DIAGONAL)[:, None, :]
    )
    step_XP: Floats = np.linalg.solve(damped_XPP, -slope_XP[..., None])[..., 0]
    return step_XP


def cell_weights(cell_N: NDArray[np.int64], draws: int, generator: np.random.Generator) -> Floats:
    """Bootstrap weights (draws, N): cells drawn with replacement, as many as there are; a point weighs its cell."""
    num_cells = int(cell_N.max()) + 1
    counts = generator.multinomial(num_cells, np.full(num_cells, 1 / num_cells), size=draws)
    weights_XN: Floats = counts[:, cell_N].astype(np.float64)
    return weights_XN


def interval(draws: Floats, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Percentile interval along the first axis, of drawn values themselves, so that infinities are allowed."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0, method="closest_observation")
    return low, high
