"""The filters keep what they name, by the plan, and refuse what the network does not have."""

import pytest

from cache.selection import Kept, head_axis, num_heads, select
from smelt_interp.errors import UserError
from tests.support.planted import BASELINE, LOOPED

SUFFIXES = ("attn.hook_pattern", "attn.hook_k", "hook_resid_post")


def test_no_filter_keeps_every_step_and_head() -> None:
    steps = (0, 1, 2, 3, 4, 5)
    assert select(LOOPED.architecture(), SUFFIXES) == {
        "attn.hook_pattern": Kept(steps, (0, 1, 2, 3)),
        "attn.hook_k": Kept(steps, (0, 1)),
        "hook_resid_post": Kept(steps, ()),
    }


def test_layers_and_visits_name_steps_of_the_plan() -> None:
    # Plan of LOOPED: layers 0 | 1 2 | 1 2 | 3.
    assert select(LOOPED.architecture(), SUFFIXES, visits=[1])["hook_resid_post"].steps == (3, 4)
    assert select(LOOPED.architecture(), SUFFIXES, layers=[2, 0])["hook_resid_post"].steps == (0, 2, 4)
    assert select(LOOPED.architecture(), SUFFIXES, layers=[2], visits=[1])["hook_resid_post"].steps == (4,)


def test_of_keys_the_heads_that_serve_the_chosen_queries_are_kept() -> None:
    kept = select(LOOPED.architecture(), SUFFIXES, heads=[3, 2])
    assert kept["attn.hook_pattern"].heads == (2, 3)
    assert kept["attn.hook_k"].heads == (1,)
    assert kept["hook_resid_post"].heads == ()


def test_head_axes() -> None:
    assert [(num_heads(suffix, LOOPED.architecture())) for suffix in SUFFIXES] == [4, 2, 0]
    assert head_axis("attn.hook_pattern") == 1
    assert head_axis("attn.hook_k") == 2


@pytest.mark.parametrize(
    ("filters", "match"),
    [
        ({"layers": [4]}, r"layers must be 0 to 3, counted from 0; got 4"),
        ({"visits": [0, 2]}, r"visits must be 0 to 1, counted from 0; got 2"),
        ({"heads": [-1]}, r"heads must be 0 to 3, counted from 0; got -1"),
        ({"layers": [0], "visits": [1]}, r"the chosen layers must run on the chosen visits; got layers 0 and "),
    ],
)
def test_filters_outside_the_network(filters: dict[str, list[int]], match: str) -> None:
    with pytest.raises(UserError, match=match):
        select(LOOPED.architecture(), SUFFIXES, **filters)


def test_a_baseline_has_no_second_visit() -> None:
    with pytest.raises(UserError, match=r"visits must be 0 to 0, counted from 0; got 1"):
        select(BASELINE.architecture(), SUFFIXES, visits=[1])


def test_an_unknown_site_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"got 'attn.hook_patern'; nearest: attn.hook_pattern"):
        select(LOOPED.architecture(), ["attn.hook_patern"])
