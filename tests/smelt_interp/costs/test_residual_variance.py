"""The variance of the residual stream: closed form against simulation and against what must hold."""

from dataclasses import replace

import numpy as np
import pytest

from smelt_interp.costs.presets import DEMO_SMELT, PAPER_ROWS
from smelt_interp.costs.residual_variance import VarianceOptions, closed_form, main, simulated
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from tests.support.commands import Command

WITH = {correlation: VarianceOptions(correlation=correlation) for correlation in (0.0, 1.0)}


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("visits", "scale"), [(1, 1.0), (2, 0.5), (2, 1.0), (4, 0.25), (4, 1.0)])
def test_the_closed_form_is_what_correlated_updates_add_up_to(correlation: float, visits: int, scale: float) -> None:
    config = replace(DEMO_SMELT, num_visits=visits, loop_scale=scale)
    options = VarianceOptions(correlation=correlation, samples=40_000, update_variance=0.7, start=2.0)
    exact = closed_form(config, options)
    measured = simulated(config, options, np.random.default_rng(visits))
    # The variance of n normal numbers has a relative standard error of sqrt(2 / n) = 0.7%; 4 of them.
    np.testing.assert_allclose(measured, exact, rtol=0.03)


@pytest.mark.parametrize("visits", [1, 2, 3, 4])
def test_with_one_over_r_a_looped_layer_adds_no_more_than_a_layer_visited_once(visits: int) -> None:
    config = replace(DEMO_SMELT, num_visits=visits, loop_scale=1 / visits)
    once = closed_form(replace(DEMO_SMELT, num_visits=1, loop_scale=1.0), WITH[0.0])[-1]
    assert closed_form(config, WITH[1.0])[-1] == pytest.approx(once)
    looped = config.loop_stop - config.loop_start
    expected = once - looped + looped / visits
    assert closed_form(config, WITH[0.0])[-1] == pytest.approx(expected)


def test_without_it_a_perfectly_repeated_update_adds_r_squared() -> None:
    config = replace(DEMO_SMELT, num_visits=3, loop_scale=1.0)
    looped = config.loop_stop - config.loop_start
    assert closed_form(config, replace(WITH[1.0], start=0.0))[-1] == pytest.approx(
        config.num_layers - looped + 9 * looped
    )


def test_variance_never_falls_along_the_steps() -> None:
    assert (np.diff(closed_form(PAPER_ROWS["600M", "smelt"], VarianceOptions(correlation=0.3))) > 0).all()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"correlation": 1.5}, r"correlation must be at most 1; got 1\.5"),
        ({"correlation": float("nan")}, "correlation must be a number; got nan"),
        ({"update_variance": -1.0}, r"update_variance must be at least 0; got -1\.0"),
        ({"start": 1e308}, r"start must be at most 1e\+100; got 1e\+308"),
        ({"samples": 1}, "samples must be at least 2; got 1"),
        ({"samples": 10**13}, "samples must be at most 1000000; got 10000000000000"),
    ],
)
def test_what_is_no_variance_or_correlation_is_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        VarianceOptions(**values)


def test_the_command_shows_both_scales(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command, quarter = Command(monkeypatch, capsys), VarianceOptions(correlation=0.25)
    report = command.json(main, "--pair", "demo", "--correlation", 0.25)
    assert report["scaled"] == closed_form(DEMO_SMELT, quarter).tolist()
    assert report["unscaled"] == closed_form(replace(DEMO_SMELT, loop_scale=1.0), quarter).tolist()
    assert len(report["scaled_simulated"]) == len(report["steps"]) == len(plan(DEMO_SMELT))
    assert "layer 5, visit 2" in command.text(main, "--pair", "demo")
    assert "correlation must be at most 1; got 2.0" in command.refusal(main, "--correlation", 2)
    assert "seed must be at least 0; got -1" in command.refusal(main, "--seed", -1)
