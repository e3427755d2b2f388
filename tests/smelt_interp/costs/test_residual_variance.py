"""The variance of the residual stream: closed form against simulation and against what must hold."""

from dataclasses import replace

import numpy as np
import pytest

from smelt_interp.costs.presets import DEMO_SMELT, PAPER_ROWS
from smelt_interp.costs.residual_variance import closed_form, main, simulated
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from tests.support.commands import Command


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("visits", "scale"), [(1, 1.0), (2, 0.5), (2, 1.0), (4, 0.25), (4, 1.0)])
def test_the_closed_form_is_what_correlated_updates_add_up_to(correlation: float, visits: int, scale: float) -> None:
    config = replace(DEMO_SMELT, num_visits=visits, loop_scale=scale)
    exact = closed_form(config, correlation, update_variance=0.7, start=2.0)
    generator = np.random.default_rng(visits)
    measured = simulated(config, correlation, generator, samples=40_000, update_variance=0.7, start=2.0)
    # The variance of n normal numbers has a relative standard error of sqrt(2 / n) = 0.7%; 4 of them.
    np.testing.assert_allclose(measured, exact, rtol=0.03)


@pytest.mark.parametrize("visits", [1, 2, 3, 4])
def test_with_one_over_r_a_looped_layer_adds_no_more_than_a_layer_visited_once(visits: int) -> None:
    config = replace(DEMO_SMELT, num_visits=visits, loop_scale=1 / visits)
    once = closed_form(replace(DEMO_SMELT, num_visits=1, loop_scale=1.0), 0.0)[-1]
    assert closed_form(config, 1.0)[-1] == pytest.approx(once)
    looped = config.loop_stop - config.loop_start
    expected = once - looped + looped / visits
    assert closed_form(config, 0.0)[-1] == pytest.approx(expected)


def test_without_it_a_perfectly_repeated_update_adds_r_squared() -> None:
    config = replace(DEMO_SMELT, num_visits=3, loop_scale=1.0)
    looped = config.loop_stop - config.loop_start
    assert closed_form(config, 1.0, start=0.0)[-1] == pytest.approx(config.num_layers - looped + 9 * looped)


def test_variance_never_falls_along_the_steps() -> None:
    assert (np.diff(closed_form(PAPER_ROWS["600M", "smelt"], 0.3)) > 0).all()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"correlation": 1.5}, "correlation must be from 0 to 1; got 1.5"),
        ({"correlation": float("nan")}, "correlation must be from 0 to 1"),
        ({"correlation": 0.5, "update_variance": -1.0}, "update_variance must be from 0 to 1e\\+100; got -1.0"),
        ({"correlation": 0.5, "start": -1.0}, "start must be from 0 to 1e\\+100; got -1.0"),
        ({"correlation": 0.5, "start": 1e308}, "start must be from 0 to 1e\\+100; got 1e\\+308"),
    ],
)
def test_what_is_no_variance_or_correlation_is_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        closed_form(DEMO_SMELT, **values)


@pytest.mark.parametrize("samples", [1, 10**13])
def test_a_simulation_is_of_two_samples_to_a_million(samples: int) -> None:
    with pytest.raises(UserError, match=f"samples must be from 2 to 1000000; got {samples}"):
        simulated(DEMO_SMELT, 0.5, np.random.default_rng(0), samples=samples)


def test_the_command_shows_both_scales(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(monkeypatch, capsys)
    report = command.json(main, "--pair", "demo", "--correlation", 0.25)
    assert report["scaled"] == closed_form(DEMO_SMELT, 0.25).tolist()
    assert report["unscaled"] == closed_form(replace(DEMO_SMELT, loop_scale=1.0), 0.25).tolist()
    assert len(report["scaled_simulated"]) == len(report["steps"]) == len(plan(DEMO_SMELT))
    assert "layer 5, visit 2" in command.text(main, "--pair", "demo")
    assert "correlation must be from 0 to 1; got 2.0" in command.refusal(main, "--correlation", 2)
    assert "--seed must be at least 0" in command.refusal(main, "--seed", -1)
