"""Budgets reproduce the paper's grid to its last digit; that they are what the network has is in tests/model."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smelt_interp.costs.budget import (
    PAPER_TOLERANCE,
    Mismatch,
    attention_interval,
    budget,
    figures,
    main,
    mismatch,
    printed_geometry,
    row_index,
)
from smelt_interp.costs.presets import DEMO_BASELINE, DEMO_SMELT, PAPER_PAIRS, PAPER_ROWS
from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from tests.support.commands import Command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_parameters_are_paid_once_a_layer_and_flops_and_cache_once_a_step() -> None:
    once, thrice = budget(replace(DEMO_SMELT, num_visits=1)), budget(replace(DEMO_SMELT, num_visits=3))
    assert once.parameters == thrice.parameters
    assert (once.executed_depth, thrice.executed_depth) == (8, 16)
    assert thrice.flops.forward == pytest.approx(2 * once.flops.forward)
    assert thrice.kv_bytes == 2 * once.kv_bytes


@pytest.mark.portable
@pytest.mark.parametrize("attended", [385, 390, 394])
@pytest.mark.parametrize(("scale", "architecture"), list(PAPER_ROWS))
def test_every_printed_figure_is_reproduced_to_its_last_digit(scale: str, architecture: str, attended: float) -> None:
    row = ("grid", "rows", row_index(scale, architecture), "printed")
    counts = budget(PAPER_ROWS[scale, architecture], attended)
    baseline = budget(PAPER_ROWS[scale, "baseline"], attended)
    without_gains = counts.parameters.norm_gains
    expected = {
        "active": (counts.parameters.active, counts.parameters.active - without_gains),
        "total": (counts.parameters.total, counts.parameters.total - without_gains),
        "flop_ratio": (counts.flops.training / baseline.flops.training,),
        "kv_ratio": (counts.kv_bytes / baseline.kv_bytes,),
    }
    for name, values in expected.items():
        for ours in values:
            if (scale, architecture, name) == ("1.6B", "baseline", "flop_ratio"):
                assert ours == 1  # printed is the ratio of the row below it
            else:
                assert printed.figure(*row, name).agrees(ours)


def test_without_the_router_the_printed_totals_are_missed() -> None:
    row = ("grid", "rows", row_index("200M", "smelt"), "printed")
    parameters = budget(PAPER_ROWS["200M", "smelt"]).parameters
    assert not printed.figure(*row, "active").agrees(parameters.active - parameters.router)


@pytest.mark.parametrize(("scale", "architecture"), list(PAPER_ROWS))
def test_the_derived_heads_lie_in_the_interval_that_contradicts_the_printed(scale: str, architecture: str) -> None:
    row = ("grid", "rows", row_index(scale, architecture), "printed")
    config = PAPER_ROWS[scale, architecture]
    low, high = attention_interval(config, printed.figure(*row, "active"), printed.figure(*row, "total"))
    assert low < budget(config).parameters.projections < high
    # The interval knows nothing of the expert width.
    assert (low, high) == attention_interval(
        replace(config, expert_width=1), printed.figure(*row, "active"), printed.figure(*row, "total")
    )


def test_seven_of_eight_printed_geometries_contradict_their_own_totals() -> None:
    rows = [found for scale in PAPER_PAIRS for found in printed_geometry(scale)]
    contradicted = [row for row in rows if any("attention" in sentence for sentence in row.contradictions)]
    assert len(contradicted) == 7
    assert rows[0].architecture == "baseline"
    assert rows[0].contradictions == ()
    assert rows[0].printed_heads == rows[0].derived_heads


def test_a_pair_is_within_tolerance_only_when_all_three_are() -> None:
    tolerance = Mismatch(flops=0.1, total_parameters=0.1, kv_bytes=0.1)
    inside = Mismatch(flops=-0.1, total_parameters=0.05, kv_bytes=0.1)
    assert inside.within(tolerance)
    assert inside.largest == 0.1
    for name in ("flops", "total_parameters", "kv_bytes"):
        assert not replace(inside, **{name: -0.11}).within(tolerance)


@pytest.mark.parametrize("attended", [-1.0, float("nan"), float("inf")])
def test_an_attended_length_that_is_no_length_is_refused(attended: float) -> None:
    with pytest.raises(UserError, match="attended_tokens must be 0 or more; got"):
        budget(DEMO_SMELT, attended)


def test_the_command_gives_the_same_numbers_as_text_and_json(command: Command) -> None:
    report = command.json(main, "--pair", "200M")
    smelt = budget(PAPER_ROWS["200M", "smelt"], 390)
    assert report["budgets"]["smelt"]["training_flops"] == smelt.flops.training
    assert report["mismatch"]["flops"] == mismatch(smelt, budget(PAPER_ROWS["200M", "baseline"], 390)).flops
    assert report["mismatch"]["within_paper_tolerance"]
    assert len(report["printed_geometry"]) == 2
    text = command.text(main, "--pair", "200M")
    assert "KV cache +3.12%; within the paper's tolerances of 3.9%, 1.0%, 3.6%" in text
    assert "printed 16 x 4 x 55, here 24 x 4 x 44" in text
    assert "contradiction: flop_ratio is printed 1.029, the printed heads give 0.986" in text


def test_the_command_reads_two_configs_and_says_when_they_do_not_match(command: Command, tmp_path: Path) -> None:
    paths = [tmp_path / "looped.json", tmp_path / "baseline.json"]
    for path, config in zip(paths, (replace(DEMO_SMELT, num_experts=24), DEMO_BASELINE), strict=True):
        path.write_text(json.dumps(config.to_json()))
    assert "NOT within the paper's tolerances" in command.text(main, "--config", *paths)
    report = command.json(main, "--config", paths[0], "--attended-tokens", 100)
    assert list(report["budgets"]) == [str(paths[0])]
    assert report["budgets"][str(paths[0])]["attended_tokens"] == 100


def test_the_command_changes_the_knobs_of_the_first_network_only(command: Command) -> None:
    report = command.json(main, "--pair", "200M", "--num-visits", 3, "--num-experts", 320, "--span", 0.5)
    changed = replace(PAPER_ROWS["200M", "smelt"], num_visits=3, num_experts=320)
    assert report["budgets"]["smelt"] == figures(changed, budget(changed, 390))
    assert report["budgets"]["baseline"] == command.json(main, "--pair", "200M")["budgets"]["baseline"]
    assert not report["mismatch"]["within_paper_tolerance"]
    assert "span must be at most 1; got 2.0" in command.refusal(main, "--pair", "200M", "--span", 2)


def test_a_config_is_compared_with_itself_changed(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEMO_SMELT.to_json()))
    budgets = command.json(main, "--config", path, path, "--num-experts", 32)["budgets"]
    assert [shown["router_parameters"] for shown in budgets.values()] == [
        budget(replace(DEMO_SMELT, num_experts=count)).parameters.router for count in (32, 16)
    ]


def test_the_parts_add_up(command: Command) -> None:
    for shown in command.json(main, "--pair", "demo")["budgets"].values():
        shared = [shown[name] for name in ("projection_parameters", "router_parameters", "norm_gain_parameters")]
        assert sum(shared) + shown["expert_parameters"] == shown["total_parameters"]
        assert sum(shared) + shown["chosen_expert_parameters"] == shown["active_parameters"]


def test_bad_input_ends_in_one_line(command: Command, tmp_path: Path) -> None:
    assert "must be named by either --pair or --config; got neither" in command.refusal(main)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEMO_SMELT.to_json() | {"top_k": 99}))
    assert "top_k must be at most num_experts (16); got 99" in command.refusal(main, "--config", path)
    assert "got both" in command.refusal(main, "--pair", "demo", "--config", path)
    assert "one file or two; got 3" in command.refusal(main, "--config", path, path, path)
    assert "a pair must be one of" in command.refusal(main, "--pair", "3B")
    assert "attended_tokens must be at least 0; got -1.0" in command.refusal(
        main, "--pair", "demo", "--attended-tokens", "-1"
    )


def test_the_numbers_import_neither_torch_nor_an_optimiser() -> None:
    modules = [
        *(f"costs.{name}" for name in ("presets", "budget", "matching", "sparsity", "serving", "residual_variance")),
        *("scaling.command", "scaling.calibration", "paper.table"),
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module('smelt_interp.' + name)\n"
        "heavy = [name for name in ('torch', 'scipy', 'h5py', 'plotly', 'pandas') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_papers_tolerances_are_the_printed_ones() -> None:
    assert PAPER_TOLERANCE.flops == printed.number("grid", "max_mismatch_printed", "flops")
