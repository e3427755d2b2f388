"""The architecture: loops are read off the plan, and the JSON form is exact."""

import json
from dataclasses import replace

import pytest

from smelt_interp.architecture import Architecture, Loop
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Step
from tests.support.configs import TINY, TINY_BASELINE


def nested(high_cycles: int = 2, low_cycles: int = 3) -> tuple[Step, ...]:
    """Two stacks of two layers: the low one runs `low_cycles` times before each run of the high one."""
    runs = [*[(2, 3)] * low_cycles, (0, 1)] * high_cycles
    seen: dict[int, int] = {}
    steps = []
    for layer in (layer for run in runs for layer in run):
        steps.append(Step(layer, seen.get(layer, 0)))
        seen[layer] = seen.get(layer, 0) + 1
    return tuple(steps)


def dense(steps: tuple[Step, ...]) -> Architecture:
    return Architecture(
        family="test", steps=steps, loop_factors=(1.0,) * len(steps), sites=("attn.hook_pattern",), width=8,
        num_heads=2, num_kv_heads=1, head_width=4, num_experts=0, top_k=0, router="none", vocab_size=10, context=16,
    )  # fmt: skip


@pytest.mark.parametrize("config", [TINY, TINY_BASELINE])
def test_loops_are_those_of_the_config(config: ModelConfig) -> None:
    looped = config.num_visits > 1
    layers = tuple(range(config.loop_start, config.loop_stop))
    assert config.architecture().loops == ((Loop(layers, config.num_visits),) if looped else ())


def test_two_nested_stacks_are_two_loops() -> None:
    architecture = dense(nested())
    assert architecture.loops == (Loop((0, 1), 2), Loop((2, 3), 6))
    assert architecture.loops[0].steps(architecture.steps, 1) == (14, 15)


@pytest.mark.parametrize("architecture", [TINY.architecture(), dense(nested())])
def test_json_gives_the_same_architecture(architecture: Architecture) -> None:
    assert Architecture.from_json(json.loads(json.dumps(architecture.to_json()))) == architecture


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"steps": (Step(0, 1),)}, "visits of a layer must count from 0 in order; layer 0 has visit 0 next; got 1"),
        ({"steps": (Step(1, 0),)}, "layers must count from 0 without a gap"),
        ({"loop_factors": (1.0,)}, "loop_factors must be one a step; got 1"),
        ({"sites": ("attn.nothing",)}, "sites must be hook suffixes of a step; got 'attn.nothing'"),
        ({"top_k": 1}, "top_k must be at most num_experts"),
        ({"router": "softmax"}, "router must be none without experts"),
        ({"width": 0}, "width must be 1 to"),
        ({"width": True}, "width must be 1 to"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        replace(dense(nested()), **change)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"more": 1}, "architecture keys must be fields of Architecture; got more"),
        ({"steps": [[0]]}, "a step must be a pair of whole numbers"),
        ({"steps": 3}, "steps must be a list"),
        ({"loop_factors": ["x"]}, "loop_factors must be numbers"),
        ({"family": 3}, "family must be text"),
        ({"causal": "yes"}, "causal must be true or false"),
    ],
)
def test_json_outside_the_rules_is_refused(change: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Architecture.from_json(dense(nested()).to_json() | change)
