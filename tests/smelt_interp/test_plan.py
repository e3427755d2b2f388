"""The plan: the order in which layers run, worked by hand and for any config."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Step, label, plan, revisited_layers, step_index, step_scale, visits_of
from tests.support.configs import TINY, TINY_BASELINE, VARIANTS


def test_the_paper_s_order():
    assert plan(TINY) == (Step(0, 0), Step(1, 0), Step(2, 0), Step(1, 1), Step(2, 1), Step(3, 0))
    assert plan(VARIANTS["nothing looped"]) == plan(TINY_BASELINE) == tuple(Step(layer, 0) for layer in range(4))
    assert [step.layer for step in plan(VARIANTS["all layers looped"])] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [step.layer for step in plan(VARIANTS["three visits"])] == [0, 1, 2, 1, 2, 1, 2, 3]


def test_visits_and_their_scale():
    steps = plan(TINY)
    assert visits_of(steps, 1) == (1, 3)
    assert visits_of(steps, 0) == (0,)
    assert visits_of(steps, 9) == ()
    assert revisited_layers(steps) == (1, 2)
    assert revisited_layers(plan(TINY_BASELINE)) == ()
    assert [step_scale(TINY, step) for step in steps] == [1, 0.5, 0.5, 0.5, 0.5, 1]


@pytest.mark.parametrize(
    ("visit", "message"),
    [
        ((2, 2), r"a \(layer, visit\) must be in the plan; got \(2, 2\); layer 2 has visits \[0, 1\]"),
        ((9, 0), r"got \(9, 0\); layers are 0 to 3"),
    ],
)
def test_a_visit_outside_the_plan_is_named(visit, message):
    with pytest.raises(UserError, match=message):
        step_index(plan(TINY), *visit)


def test_a_person_counts_from_1():
    assert label(Step(4, 1)) == "layer 5, visit 2"


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_layers = draw(st.integers(1, 12))
    start = draw(st.integers(0, num_layers - 1))
    return replace(
        TINY,
        num_layers=num_layers,
        loop_start=start,
        loop_stop=draw(st.integers(start + 1, num_layers)),
        num_visits=draw(st.integers(1, 5)),
    )


@given(configs())
def test_any_plan_runs_every_layer_in_turn(config):
    steps = plan(config)
    assert [step_index(steps, *step) for step in steps] == list(range(len(steps)))
    looped = config.loop_stop - config.loop_start
    assert len(steps) == config.num_layers + looped * (config.num_visits - 1)
    assert len(set(steps)) == len(steps)
    for layer in range(config.num_layers):
        visits = [steps[index].visit for index in visits_of(steps, layer)]
        inside = config.loop_start <= layer < config.loop_stop
        assert visits == list(range(config.num_visits if inside else 1))
    for before, after in pairwise(steps):
        back = before.layer == config.loop_stop - 1 and after == (config.loop_start, before.visit + 1)
        onward = after.layer == before.layer + 1 and after.visit in (before.visit, 0)
        assert back or onward
