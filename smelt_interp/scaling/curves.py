"""The scaling laws as arrays to draw: loss over F and D, loss on the frontier, compute saved with its band.

Shape suffixes: C compute budgets, F training FLOPs a token, D tokens, X draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError
from smelt_interp.scaling.law import Numbers, ScalingLaw, compute_gain, printed_law, rounding_interval
from smelt_interp.scaling.robust_fit import interval

Floats = NDArray[np.float64]
Laws = tuple[ScalingLaw, ScalingLaw]
"""A law, and the laws of its bootstrap draws."""

BUDGETS = 41
SIDE = 61
MOST_LEVELS = 15
BUDGET_MARGIN = 3.0
"""Curves go from the lowest budget over this to the highest times this."""
FRONTIER_MARGIN = 3.0
"""A surface goes this far beyond the frontier's ends."""


def budgets(asked: Sequence[float]) -> Floats:
    """Compute budgets that hold the asked ones amid them, evenly spaced in the logarithm: shape (C,)."""
    return np.geomspace(min(asked) / BUDGET_MARGIN, max(asked) * BUDGET_MARGIN, BUDGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Loss over F and D at one sparsity, and where the frontier runs on it."""

    flops_per_token_F: Floats
    tokens_D: Floats
    loss_DF: Floats
    """Nats a token."""
    best_flops_per_token_C: Floats
    best_tokens_C: Floats
    lowest_level: float
    """Nats; contour lines are drawn from here, the same on every surface of one region."""
    highest_level: float
    level_step: float


def surfaces(laws: Sequence[ScalingLaw], sparsity: float, compute_C: Floats) -> list[Surface]:
    """The surface of each law, all over one region: what their frontiers pass at these budgets, and around it."""
    paths = [
        (np.asarray(law.best_flops_per_token(compute_C, sparsity)), np.asarray(law.best_tokens(compute_C, sparsity)))
        for law in laws
    ]
    if not all(np.isfinite(ends).all() for path in paths for ends in path):
        raise UserError("the frontier must be finite to be drawn; got one that is not: are the CSV's units right?")
    flops_per_token_F = _region([flops_C for flops_C, _ in paths])
    tokens_D = _region([tokens_C for _, tokens_C in paths])
    losses = [np.asarray(law.loss(flops_per_token_F, sparsity, tokens_D[:, None])) for law in laws]
    lowest, highest, step = _levels(np.stack(losses))
    return [
        Surface(
            flops_per_token_F=flops_per_token_F,
            tokens_D=tokens_D,
            loss_DF=loss_DF,
            best_flops_per_token_C=flops_C,
            best_tokens_C=tokens_C,
            lowest_level=lowest,
            highest_level=highest,
            level_step=step,
        )
        for loss_DF, (flops_C, tokens_C) in zip(losses, paths, strict=True)
    ]


def _levels(losses: Floats) -> tuple[float, float, float]:
    """Lowest and highest level inside the losses, and a round step between levels."""
    lowest, highest = float(losses.min()), float(losses.max())
    least = (highest - lowest) / MOST_LEVELS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    return step * math.ceil(lowest / step), step * math.floor(highest / step), step


def _region(paths: Sequence[Floats]) -> Floats:
    ends = np.concatenate(paths)
    return np.geomspace(ends.min() / FRONTIER_MARGIN, ends.max() * FRONTIER_MARGIN, SIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A quantity at each compute budget with its interval; not a number where it is not finite."""

    compute_C: Floats
    value_C: Floats
    low_C: Floats
    high_C: Floats


def printed_frontier(law: ScalingLaw, sparsity: float, compute_C: Floats) -> Band:
    """Least loss at each budget, without an interval."""
    loss_C = np.asarray(law.best_loss(compute_C, sparsity))
    return _band(compute_C, loss_C, loss_C, loss_C)


def fitted_frontier(laws: Laws, sparsity: float, compute_C: Floats) -> Band:
    """Least loss at each budget with its 95% interval over draws."""
    law, drawn = laws
    loss_XC = np.stack([np.asarray(drawn.best_loss(compute, sparsity)) for compute in compute_C.tolist()], axis=-1)
    return _band(compute_C, law.best_loss(compute_C, sparsity), *interval(loss_XC))


def printed_gain(sparsity: float, compute_C: Floats) -> Band:
    """Compute that the printed SMELT law saves, with what the rounding of the printed coefficients allows."""
    baseline, looped = printed_law("baseline"), printed_law("smelt")
    budgets_C = compute_C.tolist()
    values = [float(compute_gain(baseline, looped, compute, sparsity)) for compute in budgets_C]
    bounds_C2 = np.array([rounding_interval(compute, sparsity) for compute in budgets_C])
    return _band(compute_C, np.array(values), bounds_C2[:, 0], bounds_C2[:, 1])


def fitted_gain(baseline: Laws, looped: Laws, sparsity: float, compute_C: Floats) -> Band:
    """Compute that a fitted law saves over the baseline's, with its 95% interval over draws."""
    budgets_C = compute_C.tolist()
    values = [float(compute_gain(baseline[0], looped[0], compute, sparsity)) for compute in budgets_C]
    gain_XC = np.stack([compute_gain(baseline[1], looped[1], compute, sparsity) for compute in budgets_C], axis=-1)
    return _band(compute_C, np.array(values), *interval(gain_XC))


def _band(compute_C: Floats, value_C: Numbers, low_C: Floats, high_C: Floats) -> Band:
    value_C, low_C, high_C = (
        np.where(np.isfinite(values_C), values_C, np.nan) for values_C in (value_C, low_C, high_C)
    )
    return Band(compute_C=compute_C, value_C=value_C, low_C=low_C, high_C=high_C)
