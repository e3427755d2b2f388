"""Presets are the paper's grid and a demo pair, each matched."""

from dataclasses import replace

import pytest

from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import PAPER_TOLERANCE, budget, mismatch
from smelt_interp.costs.presets import PAIRS, PAPER_PAIRS, PAPER_ROWS, causal_mean, pair
from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from smelt_interp.plan import plan, revisited_layers


def test_the_grid_has_all_eight_rows_and_four_pairs() -> None:
    assert len(PAPER_ROWS) == printed.length("grid", "rows") == 8
    assert set(PAPER_PAIRS) == set(printed.names("architecture", "looped_layers_1_based_inclusive"))


@pytest.mark.parametrize("scale", PAPER_PAIRS)
def test_the_looped_layers_are_those_printed(scale: str) -> None:
    first, last = printed.numbers("architecture", "looped_layers_1_based_inclusive", scale)
    revisited = revisited_layers(plan(PAPER_PAIRS[scale].smelt))
    assert (revisited[0] + 1, revisited[-1] + 1) == (first, last)
    assert revisited_layers(plan(PAPER_PAIRS[scale].baseline)) == ()


@pytest.mark.parametrize("config", PAPER_ROWS.values(), ids=map(" ".join, PAPER_ROWS))
def test_ungated_experts_of_one_and_a_half_times_the_width_cost_the_same(config: ModelConfig) -> None:
    ungated = replace(config, gated_experts=False, expert_width=config.expert_width * 3 // 2)
    assert budget(ungated, 390) == budget(config, 390)


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_is_within_the_papers_tolerances(name: str) -> None:
    chosen = pair(name)
    counts = [budget(config, chosen.attended_tokens) for config in (chosen.smelt, chosen.baseline)]
    assert mismatch(*counts).within(PAPER_TOLERANCE)
    assert chosen.smelt.loop_scale * chosen.smelt.num_visits == 1


def test_the_causal_mean_is_the_mean_number_of_visible_positions() -> None:
    assert causal_mean(160) == sum(range(1, 161)) / 160


def test_an_unknown_pair_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"a pair must be one of 100M, 200M.*; got '20M'; nearest: 200M"):
        pair("20M")
