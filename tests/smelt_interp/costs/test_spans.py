"""A share of the layers loops the whole number of them that is nearest, in the middle; names count from 1."""

import pytest

from smelt_interp.costs.spans import LayerRange, middle_layers, span_text
from smelt_interp.errors import UserError


@pytest.mark.parametrize(
    ("share", "looped"), [(0.0, 0), (0.17, 2), (0.33, 4), (0.5, 6), (0.67, 8), (0.83, 10), (1.0, 12)]
)
def test_the_papers_shares_of_twelve_layers_loop_as_many_as_they_say(share: float, looped: int) -> None:
    layers = middle_layers(12, share)
    assert len(layers) == looped
    assert layers.start == 12 - layers.stop


@pytest.mark.parametrize("num_layers", range(1, 41))
def test_half_the_layers_are_the_printed_rule(num_layers: int) -> None:
    assert middle_layers(num_layers, 0.5) == LayerRange(int(0.25 * num_layers), int(0.75 * num_layers))


@pytest.mark.parametrize("num_layers", [7, 12])
def test_every_share_is_off_by_at_most_half_a_layer_and_in_the_middle(num_layers: int) -> None:
    for percent in range(101):
        layers = middle_layers(num_layers, percent / 100)
        assert abs(len(layers) - percent / 100 * num_layers) <= 0.5
        assert 0 <= (num_layers - layers.stop) - layers.start <= 1


def test_the_share_obtained_is_said() -> None:
    assert span_text(12, 0.17) == "span 0.17 of 12 layers loops 6-7, a share of 0.1667"
    assert span_text(12, 0) == "span 0 of 12 layers loops none, a share of 0"


def test_layers_are_typed_from_one_and_counted_from_zero() -> None:
    assert LayerRange.parse("3-4") == LayerRange(2, 4)
    assert LayerRange.parse("3") == LayerRange(2, 3)
    assert str(LayerRange(2, 4)) == "3-4"
    for text in ("0-4", "4-3", "3-", "a", "1-999999", ""):
        with pytest.raises(UserError, match=r"must be the first and the last, counted from 1, as 3-4; got "):
            LayerRange.parse(text)
