"""Fit the scaling law to the runs of one architecture, and again to bootstrap draws of its grid cells.

The six coefficients minimise the Huber loss (delta 1e-3) of the log loss, by damped steps from a grid of starts and
then by L-BFGS-B. A draw takes grid cells with replacement, a cell being all horizons of one (F, S), and is refitted
from the full fit's minima.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError
from smelt_interp.scaling.law import ScalingLaw
from smelt_interp.scaling.robust_fit import Curve, cell_weights, huber, minimise

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Of the log loss; the paper's."""

START_COMPUTE_EXPONENTS = (0.15, 0.3, 0.45, 0.6, 0.8)
START_SPARSITY_EXPONENTS = (0.1, 0.4)
START_TOKEN_EXPONENTS = (0.2, 0.4, 0.65, 0.9)
SMALLEST_START_TERM = 1e-3
"""Nats; a start whose linear fit makes a term negative begins from this."""

# log E, log A', log K' (the terms at the grid's geometric centre, nats), a, b, c
LOWER_BOUNDS = np.array([-10.0, -30.0, -30.0, 0.01, -2.0, 0.01])
UPPER_BOUNDS = np.array([10.0, 10.0, 10.0, 3.0, 3.0, 3.0])

WARM_STARTS = 3
"""Best minima of the full fit from which each bootstrap draw is refitted."""
SAME_MINIMUM = 1e-3
DRAWS_AT_ONCE = 250

MIN_POINTS = 7
MOST_POINTS = 10_000
MIN_SPARSITIES = 2
MIN_BUDGETS = 2
MIN_HORIZONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The runs of one architecture, one entry a point, each array of shape (N,)."""

    flops_per_token: Floats
    """Training FLOPs."""
    sparsity: Floats
    tokens: Floats
    loss: Floats
    """Nats a token."""

    @property
    def cell_N(self) -> NDArray[np.int64]:
        """The number of each point's cell: points of one (F, S) share it."""
        pairs = np.stack([self.flops_per_token, self.sparsity], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def check(self, name: str) -> None:
        """Raise `UserError` when the grid cannot tell six coefficients."""
        if len(self.loss) > MOST_POINTS:
            raise UserError(f"{name} must have at most {MOST_POINTS} points, one a run; got {len(self.loss)}")
        for what, values, least in (
            ("sparsity levels", self.sparsity, MIN_SPARSITIES),
            ("FLOPs a token", self.flops_per_token, MIN_BUDGETS),
            ("token horizons", self.tokens, MIN_HORIZONS),
        ):
            if (found := len(np.unique(values))) < least:
                raise UserError(f"{name} must have at least {least} different {what} to fit the law; got {found}")
        if len(self.loss) < MIN_POINTS:
            raise UserError(f"{name} must have at least {MIN_POINTS} points for six coefficients; got {len(self.loss)}")
        if np.ptp(self.loss) == 0:
            raise UserError(f"{name} must have losses that differ; got {self.loss[0]} in every run")


@dataclass(frozen=True, slots=True, kw_only=True)
class LawFit:
    """A law fitted to one grid."""

    law: ScalingLaw
    parameters_P: Floats
    """log E, log of the other two terms at the grid's centre, a, b, c."""
    other_minima_XP: Floats
    """The next best minima that the starts led to, best first."""
    rmse_nats: float
    """Root mean square of the loss residuals."""
    objective: float


class _CentredCurve:
    """The log of the law at a grid's points, in coordinates whose origin is the grid's geometric centre.

    Far from the data log A and a are all but collinear; at the centre they are not, which is what lets both
    optimisers converge in tens of steps.
    """

    def __init__(self, grid: Grid) -> None:
        logs = np.log(grid.flops_per_token), np.log1p(-grid.sparsity), np.log(grid.tokens)
        self.centre = tuple(float(values.mean()) for values in logs)
        self.compute_N, self.density_N, self.tokens_N = (
            values - centre for values, centre in zip(logs, self.centre, strict=True)
        )

    def __call__(self, parameters_XP: Floats) -> tuple[Floats, Floats]:
        floor, compute_scale, token_scale, a, b, c = parameters_XP.T[..., None]
        floor_XN = np.exp(floor) + np.zeros_like(self.compute_N)
        compute_XN = np.exp(compute_scale + b * self.density_N - a * self.compute_N)
        tokens_XN = np.exp(token_scale - c * self.tokens_N)
        loss_XN = floor_XN + compute_XN + tokens_XN
        slopes = [
            floor_XN,
            compute_XN,
            tokens_XN,
            -self.compute_N * compute_XN,
            self.density_N * compute_XN,
            -self.tokens_N * tokens_XN,
        ]
        return np.log(loss_XN), np.stack(slopes, axis=-1) / loss_XN[..., None]

    def law(self, parameters: Floats) -> ScalingLaw:
        """The law in the paper's coordinates; any leading axes become the shape of its coefficients."""
        floor, compute_scale, token_scale, a, b, c = np.moveaxis(parameters, -1, 0)
        compute_centre, density_centre, token_centre = self.centre
        compute_scale = compute_scale + a * compute_centre - b * density_centre
        token_scale = token_scale + c * token_centre
        values = (np.exp(floor), np.exp(compute_scale), np.exp(token_scale), a, b, c)
        return ScalingLaw(*values)


def starts(curve: _CentredCurve, loss_N: Floats) -> Floats:
    """A grid of exponents, each with the linear least-squares E, A and K (relative errors): shape (starts, 6)."""
    found = []
    for a, b, c in itertools.product(START_COMPUTE_EXPONENTS, START_SPARSITY_EXPONENTS, START_TOKEN_EXPONENTS):
        terms_NP = np.stack(
            [
                np.ones_like(loss_N),
                np.exp(b * curve.density_N - a * curve.compute_N),
                np.exp(-c * curve.tokens_N),
            ],
            axis=1,
        )
        linear = np.linalg.lstsq(terms_NP / loss_N[:, None], np.ones_like(loss_N), rcond=None)[0]
        found.append([*np.log(np.maximum(linear, SMALLEST_START_TERM)), a, b, c])
    return np.clip(np.array(found), LOWER_BOUNDS, UPPER_BOUNDS)


def fit(grid: Grid) -> LawFit:
    """The law of a grid, by L-BFGS-B from the best minima of all starts. Raises `UserError` when it is too small."""
    from scipy.optimize import minimize  # half a second to import, needed by fits only

    grid.check("a grid")
    curve = _CentredCurve(grid)
    target_N = np.log(grid.loss)

    def objective(parameters_P: Floats) -> tuple[float, Floats]:
        values_XN, slopes_XNP = curve(parameters_P[None])
        residual_N = values_XN[0] - target_N
        slope_P: Floats = np.clip(residual_N, -HUBER_DELTA, HUBER_DELTA) @ slopes_XNP[0]
        # In units of delta, so that the optimiser's absolute tolerances mean something.
        return float(huber(residual_N, HUBER_DELTA).sum()) / HUBER_DELTA, slope_P / HUBER_DELTA

    # All starts at once to their minima, then the optimiser from the best different ones.
    starts_XP = starts(curve, grid.loss)
    bounds = (LOWER_BOUNDS, UPPER_BOUNDS)
    reached = minimise(curve, target_N, np.ones((len(starts_XP), len(target_N))), starts_XP, bounds, HUBER_DELTA)
    minima: list[Floats] = []
    for parameters_P in reached.parameters_XP[reached.loss_X.argsort(kind="stable")]:
        if len(minima) < WARM_STARTS and all(np.abs(parameters_P - known).max() > SAME_MINIMUM for known in minima):
            minima.append(parameters_P)
    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    results = [
        minimize(objective, start, jac=True, method="L-BFGS-B", bounds=list(zip(*bounds, strict=True)), options=options)
        for start in minima
    ]
    results.sort(key=lambda result: float(result.fun))
    best, *others = results
    law = curve.law(best.x)
    predicted_N = np.asarray(law.loss(grid.flops_per_token, grid.sparsity, grid.tokens))
    return LawFit(
        law=law,
        parameters_P=best.x,
        other_minima_XP=np.array([other.x for other in others]).reshape(-1, len(best.x)),
        rmse_nats=float(np.sqrt(np.mean((predicted_N - grid.loss) ** 2))),
        objective=float(best.fun),
    )


def bootstrap(
    grid: Grid, fitted: LawFit, draws: int, generator: np.random.Generator, show: Callable[[int], None]
) -> ScalingLaw:
    """The laws of `draws` resamplings of the grid's cells, each refitted from the full fit's minima.

    `show` is called with the number of draws done.
    """
    curve = _CentredCurve(grid)
    origins_XP = np.concatenate([fitted.parameters_P[None], fitted.other_minima_XP])
    found = []
    for first in range(0, draws, DRAWS_AT_ONCE):
        weights_XN = cell_weights(grid.cell_N, min(DRAWS_AT_ONCE, draws - first), generator)
        found.append(_refit(curve, np.log(grid.loss), weights_XN, origins_XP))
        show(first + len(weights_XN))
    return curve.law(np.concatenate(found))


def _refit(curve: Curve, target_N: Floats, weights_XN: Floats, origins_XP: Floats) -> Floats:
    """For each set of weights the best of the minima that the origins lead to."""
    fits = [
        minimise(
            curve,
            target_N,
            weights_XN,
            np.repeat(origin[None], len(weights_XN), axis=0),
            (LOWER_BOUNDS, UPPER_BOUNDS),
            HUBER_DELTA,
        )
        for origin in origins_XP
    ]
    best_X = np.argmin([found.loss_X for found in fits], axis=0)
    chosen_XP: Floats = np.stack([found.parameters_XP for found in fits])[best_X, np.arange(len(weights_XN))]
    return chosen_XP
