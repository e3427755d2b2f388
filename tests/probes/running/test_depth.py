"""Depth against visit: beside each step of a looped network its unlooped neighbour's layer at the same depth."""

import pytest

from probes.running.depth import at_depth, layers_of, visits_of
from probes.statistics.quantities import Record
from smelt_interp.plan import Step
from tests.support.planted import LOOPED

ARCHITECTURE = LOOPED.architecture()
"""Steps 0 | 1 2 | 3 4 | 5."""


def row(layers: str, visit: int | str, value: float | None, level: str = "layer", **more: str) -> Record:
    return {"level": level, "quantity": "mass", "layers": layers, "visit": visit, "head": "mean", "value": value,
            "n": 3, "null_uniform": 0.1, "note": "", **more}  # fmt: skip


OWN = [
    row("looped 2-3", 1, 0.6, "headline"),
    row("looped 2-3", 2, 0.1, "headline"),
    row("looped 2-3", "2 - 1", -0.5, "headline"),
    row("looped 2-3", "1 vs 2", 0.9, "headline"),
    *(row(str(step.layer + 1), step.visit + 1, 0.5) for step in ARCHITECTURE.steps),
    row("2", 2, 0.5, "head"),
]


def other(layers: int) -> list[Record]:
    """An unlooped network whose layer l, from 1, has l / 10."""
    each = [row(str(layer), 1, layer / 10) for layer in range(1, layers + 1)]
    return [row("middle 2-3", 1, 9.0, "headline"), *each, row("4", 1, 7.0, quantity="entropy")]


def test_a_step_stands_beside_the_layer_that_is_as_deep() -> None:
    joined, notes = at_depth(OWN, ARCHITECTURE, other(6), "once")
    found = [each["null_once_at_depth"] for each in joined]
    # Steps 1 and 2 are the layers 2 and 3 of the other, steps 3 and 4 its layers 4 and 5.
    assert found[:3] == pytest.approx([0.25, 0.45, 0.2])
    assert found[3] is None
    assert found[4:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert found[10] is None
    assert notes == ["once at depth: its layers as many layers deep as each step"]


def test_a_shallower_network_gives_the_layers_that_it_has_and_says_so() -> None:
    joined, notes = at_depth(OWN, ARCHITECTURE, other(4), "once")
    found = [each["null_once_at_depth"] for each in joined]
    assert found[1:3] == pytest.approx([0.4, 0.15])
    assert found[7:10] == [pytest.approx(0.4), None, None]
    assert notes == ["once at depth: its layers as many layers deep as each step; it has none after 4 layers"]
    assert at_depth(OWN, ARCHITECTURE, other(0), "once") == (OWN, [])


def test_rows_say_which_layers_and_visits_they_are_about() -> None:
    assert layers_of(row("looped 3, 5-6", 1, None)) == [2, 4, 5]
    assert layers_of({"level": "headline"}) == []
    assert [visits_of(row("1", visit, None)) for visit in (2, "3 - 1", "1 vs 2")] == [[1], [2, 0], []]
    assert Step(1, 1) in ARCHITECTURE.steps
