"""Curves are the law at their points, and bands are what the report says of the same budget."""

import numpy as np
import pytest

from smelt_interp.scaling.command import DrawOptions, Fits, PrintedOptions, fit_grids, fit_report, printed_report
from smelt_interp.scaling.curves import (
    budgets,
    fitted_frontier,
    fitted_gain,
    printed_frontier,
    printed_gain,
    surfaces,
)
from smelt_interp.scaling.fit import Grid
from smelt_interp.scaling.law import printed_law
from smelt_interp.scaling.robust_fit import interval

LAWS = {"baseline": printed_law("baseline"), "smelt": printed_law("smelt")}


@pytest.fixture(scope="module")
def fits() -> Fits:
    flops, sparsity, tokens = (
        axis.ravel() for axis in np.meshgrid((6e8, 1e9, 4e9), (0.85, 0.95), np.geomspace(1e10, 2e11, 3), indexing="ij")
    )
    wobble = np.exp(0.003 * np.random.default_rng(0).standard_normal(len(flops)))
    grids = {
        name: Grid(
            flops_per_token=flops, sparsity=sparsity, tokens=tokens, loss=law.loss(flops, sparsity, tokens) * wobble
        )
        for name, law in LAWS.items()
    }
    return fit_grids({"all": grids}, 30, 0, lambda done: None)


def test_budgets_hold_the_asked_ones() -> None:
    compute_C = budgets((1e22, 1e20))
    assert compute_C[0] < 1e20 < 1e22 < compute_C[-1]
    np.testing.assert_allclose(np.diff(np.log(compute_C)), np.log(compute_C[1] / compute_C[0]))


def test_a_surface_is_the_law_and_its_frontier_is_the_lowest_point_of_each_budget() -> None:
    compute_C = np.array([1e20, 1e21])
    found = surfaces(list(LAWS.values()), 0.95, compute_C)
    for surface, law in zip(found, LAWS.values(), strict=True):
        np.testing.assert_array_equal(surface.flops_per_token_F, found[0].flops_per_token_F)
        levels = np.arange(surface.lowest_level, surface.highest_level * 1.0001, surface.level_step)
        assert min(one.loss_DF.min() for one in found) <= levels[0] < levels[-1]
        assert levels[-1] <= max(one.loss_DF.max() for one in found)
        assert 6 <= len(levels) <= 15
        assert surface.loss_DF[3, 5] == law.loss(surface.flops_per_token_F[5], 0.95, surface.tokens_D[3])
        np.testing.assert_allclose(surface.best_flops_per_token_C * surface.best_tokens_C, compute_C)
        for flops, tokens, compute in zip(
            surface.best_flops_per_token_C, surface.best_tokens_C, compute_C, strict=True
        ):
            assert surface.flops_per_token_F[0] < flops < surface.flops_per_token_F[-1]
            nearby = [law.loss(flops * factor, 0.95, compute / (flops * factor)) for factor in (0.9, 1.1)]
            assert law.loss(flops, 0.95, tokens) < min(nearby)


def test_printed_curves_say_what_the_report_says() -> None:
    report = printed_report(PrintedOptions(compute=(1e20, 1e22), sparsity=(0.85, 0.97)))
    compute_C = np.array([1e20, 1e22])
    for sparsity in (0.85, 0.97):
        band = printed_gain(sparsity, compute_C)
        rows = [row["gain"] for row in report["gains"] if row["sparsity"] == sparsity]
        for name, values in (("value", band.value_C), ("low", band.low_C), ("high", band.high_C)):
            assert values.tolist() == pytest.approx([row[name] for row in rows])
        for architecture, law in LAWS.items():
            losses = [
                row["loss"]
                for row in report["frontier"]
                if (row["sparsity"], row["architecture"]) == (sparsity, architecture)
            ]
            assert printed_frontier(law, sparsity, compute_C).value_C.tolist() == pytest.approx(losses)


def test_fitted_curves_say_what_the_report_says(fits: Fits) -> None:
    report = fit_report(fits, DrawOptions(compute=(1e20, 1e22), sparsity=(0.95,), draws=30))
    compute_C = np.array([1e20, 1e22])
    laws = {name: fitted.laws for name, fitted in fits["all"].items()}
    frontier = fitted_frontier(laws["smelt"], 0.95, compute_C)
    gain = fitted_gain(laws["baseline"], laws["smelt"], 0.95, compute_C)
    losses = [row["loss"] for row in report["frontier"] if row["architecture"] == "smelt"]
    for band, rows in ((frontier, losses), (gain, [row["gain"] for row in report["gains"]])):
        for name, values in (("value", band.value_C), ("low", band.low_C), ("high", band.high_C)):
            assert values.tolist() == pytest.approx([row[name] for row in rows])


def test_where_a_loss_is_never_reached_the_band_is_not_a_number(fits: Fits) -> None:
    baseline, (looped, drawn) = (fits["all"][name].laws for name in ("baseline", "smelt"))
    assert np.isfinite(interval(np.asarray(drawn.floor))).all()
    gain = fitted_gain(baseline, (looped._replace(floor=3.0), drawn), 0.95, np.array([1e21]))
    assert np.isnan(gain.value_C).all()
    assert np.isfinite(gain.high_C).all()
