"""Sparsity is measured against the fully active control by compute."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import budget, row_index
from smelt_interp.costs.presets import DEMO_BASELINE, DEMO_SMELT, PAPER_PAIRS, PAPER_ROWS
from smelt_interp.costs.sparsity import fully_active_control, main, sparsity, with_sparsity
from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from tests.support.commands import Command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_the_control_itself_has_sparsity_zero() -> None:
    control = budget(fully_active_control(DEMO_BASELINE))
    found = sparsity(control, control)
    assert found.sparsity == found.parameter_ratio_sparsity == 0
    assert found.dense_equivalent_parameters == control.parameters.total == control.parameters.active


@pytest.mark.parametrize("scale", PAPER_PAIRS)
def test_the_sparsity_of_every_baseline_is_the_printed_one(scale: str) -> None:
    baseline = PAPER_ROWS[scale, "baseline"]
    found = sparsity(budget(baseline, 390), budget(fully_active_control(baseline), 390)).sparsity
    assert printed.figure("grid", "rows", row_index(scale, "baseline"), "printed", "sparsity").agrees(found)


def test_twice_the_visits_halve_no_parameter_but_raise_the_equivalent() -> None:
    control = budget(fully_active_control(DEMO_BASELINE))
    once, twice = (sparsity(budget(replace(DEMO_SMELT, num_visits=visits)), control) for visits in (1, 2))
    assert once.parameter_ratio_sparsity == twice.parameter_ratio_sparsity
    assert twice.dense_equivalent_parameters == pytest.approx(1.5 * once.dense_equivalent_parameters)
    assert twice.sparsity < once.sparsity


@pytest.mark.parametrize("wanted", [0.85, 0.95, 0.97])
def test_a_wanted_sparsity_is_met_by_the_nearest_number_of_experts(wanted: float) -> None:
    def measured(config: ModelConfig) -> float:
        return sparsity(budget(config, 390), budget(fully_active_control(config), 390)).sparsity

    found = with_sparsity(PAPER_ROWS["200M", "baseline"], wanted, 390)
    off = [abs(measured(replace(found, num_experts=found.num_experts + more)) - wanted) for more in (-1, 0, 1)]
    assert min(off) == off[1]
    assert off[1] < 2e-3
    assert with_sparsity(found, wanted, 390, multiple=8).num_experts == 8 * round(found.num_experts / 8)


def test_a_sparsity_beyond_the_routers_cost_is_refused() -> None:
    with pytest.raises(UserError, match=r"sparsity must be below 0\.\d+, where the router's FLOPs .*; got 0\.9999"):
        with_sparsity(PAPER_ROWS["200M", "baseline"], 0.9999, 390)


def test_a_looped_network_is_no_control() -> None:
    with pytest.raises(UserError, match="a control must be of an unlooped network; got num_visits 2"):
        fully_active_control(DEMO_SMELT)


def test_the_command_shows_the_printed_figure_beside_ours(command: Command, tmp_path: Path) -> None:
    report = command.json(main, "--pair", "200M")
    smelt, baseline = report["networks"]
    assert smelt["printed_sparsity"] == printed.number(
        "grid", "rows", row_index("200M", "smelt"), "printed", "sparsity"
    )
    assert baseline["sparsity"] == pytest.approx(baseline["printed_sparsity"], abs=5e-4)
    assert "parameter_ratio_sparsity" in command.text(main, "--pair", "demo")
    path = tmp_path / "looped.json"
    path.write_text(json.dumps(DEMO_SMELT.to_json()))
    assert "give the Baseline that the network is matched to as well" in command.refusal(main, "--config", path)
