"""Knobs change what they name, and nothing else; what a page offers always holds the network's own value."""

from dataclasses import replace

import pytest

from smelt_interp.costs.knobs import NO_CHANGES, Knobs, apply_knobs, changes, knob_ranges, own_values
from smelt_interp.costs.presets import DEMO_SMELT, PAPER_ROWS
from smelt_interp.costs.spans import LayerRange
from smelt_interp.errors import UserError

CONFIGS = {
    **{" ".join(key): config for key, config in PAPER_ROWS.items()},
    "demo": DEMO_SMELT,
    "odd": replace(DEMO_SMELT, num_experts=7, width=37, expert_width=3, loop_start=3, loop_stop=4, num_visits=6),
    "one expert": replace(DEMO_SMELT, num_experts=1, top_k=1),
}


def test_knobs_without_changes_leave_the_network_as_it_is() -> None:
    assert apply_knobs(DEMO_SMELT, NO_CHANGES) == DEMO_SMELT


def test_a_knob_changes_its_field_alone() -> None:
    assert apply_knobs(DEMO_SMELT, Knobs(num_experts=24)) == replace(DEMO_SMELT, num_experts=24)
    assert apply_knobs(DEMO_SMELT, Knobs(span=0.75)) == replace(DEMO_SMELT, loop_start=1, loop_stop=7)


def test_looped_layers_can_be_named() -> None:
    assert apply_knobs(DEMO_SMELT, Knobs(layers=LayerRange.parse("3-4"))) == replace(
        DEMO_SMELT, loop_start=2, loop_stop=4
    )


def test_more_visits_scale_by_one_over_their_number() -> None:
    assert apply_knobs(DEMO_SMELT, Knobs(num_visits=4)) == replace(DEMO_SMELT, num_visits=4, loop_scale=0.25)
    assert apply_knobs(replace(DEMO_SMELT, loop_scale=0.7), Knobs(width=80)).loop_scale == 0.7


def test_a_span_of_nothing_is_a_baseline_unless_visits_are_asked_for() -> None:
    assert apply_knobs(DEMO_SMELT, Knobs(span=0)) == replace(
        DEMO_SMELT, loop_start=4, loop_stop=4, num_visits=1, loop_scale=1.0
    )
    with pytest.raises(UserError, match="a span of at least one layer must be looped when num_visits is 3"):
        apply_knobs(DEMO_SMELT, Knobs(span=0, num_visits=3))


def test_what_is_no_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"span must be at most 1; got 1\.5"):
        Knobs(span=1.5)
    with pytest.raises(UserError, match="num_visits must be at least 1; got 0"):
        Knobs(num_visits=0)
    with pytest.raises(UserError, match=r"looped layers must be given by span or by layers; got 0\.5 and 3-4"):
        Knobs(span=0.5, layers=LayerRange(2, 4))
    with pytest.raises(UserError, match=r"num_heads must be a multiple of num_kv_heads \(3\); got 4"):
        apply_knobs(DEMO_SMELT, Knobs(num_kv_heads=3))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_values_around_a_network_hold_its_own(name: str) -> None:
    config = CONFIGS[name]
    own, ranges = own_values(config), knob_ranges(config)
    assert set(ranges) == set(own) - {"span"}
    for knob, values in ranges.items():
        assert own[knob] in values
        assert values[0] >= 1
        assert len(values) > 1
    assert changes(config, own) == NO_CHANGES


def test_only_values_that_are_not_the_networks_own_are_changes() -> None:
    assert changes(DEMO_SMELT, own_values(DEMO_SMELT) | {"width": 72, "span": 1.0}) == Knobs(width=72, span=1.0)
