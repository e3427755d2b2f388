"""Rows stand at each loop on each visit, each step and each head; a network without loops has its middle."""

from dataclasses import replace

import pytest

from probes.statistics.grid import Grid, headline_loops, layer_range
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.plan import Step
from tests.support.planted import BASELINE, LOOPED, NESTED

ARCHITECTURE, ONCE = LOOPED.architecture(), BASELINE.architecture()


def grid(architecture: Architecture, **changes: object) -> Grid:
    steps = tuple(range(len(architecture.steps)))
    values = {"architecture": architecture, "loops": headline_loops(architecture), "steps": steps, **changes}
    return Grid(**values)  # type: ignore[arg-type]  # fields by name


def named(found: Grid, *levels: str) -> list[tuple[object, ...]]:
    return [(*place.where.values(), place.positions, place.heads) for place in found.places(levels)]  # type: ignore[arg-type]  # words


def test_a_row_names_the_layers_that_it_averages() -> None:
    assert [layer_range(layers) for layers in ([2], [2, 3, 4], [2, 4, 5])] == ["3", "3-5", "3, 5, 6"]


def test_the_headline_is_each_loop_on_each_visit_as_far_as_it_was_measured() -> None:
    assert named(grid(ARCHITECTURE), "headline") == [("looped 2-3", 1, [1, 2], []), ("looped 2-3", 2, [3, 4], [])]
    part = grid(ARCHITECTURE, steps=(1, 2, 4))
    assert named(part, "headline") == [("looped 2-3", 1, [0, 1], []), ("looped 3", 2, [2], [])]
    assert named(grid(ARCHITECTURE, steps=(0, 5)), "headline") == []


def test_nested_loops_are_apart() -> None:
    assert named(grid(NESTED), "headline") == [
        ("looped 1, 3", 1, [0, 3], []), ("looped 1, 3", 2, [4, 7], []),
        ("looped 2", 1, [1], []), ("looped 2", 2, [2], []), ("looped 2", 3, [5], []), ("looped 2", 4, [6], []),
    ]  # fmt: skip


def test_steps_and_heads_stand_in_order_and_count_from_one() -> None:
    found = grid(ARCHITECTURE, steps=(2, 4), heads=(1, 3))
    assert named(found, "layer") == [("3", 1, "mean", [0], []), ("3", 2, "mean", [1], [])]
    assert named(found, "head")[:3] == [("3", 1, 2, [0], [0]), ("3", 1, 4, [0], [1]), ("3", 2, 2, [1], [0])]
    assert found.labels() == ["layer 3, visit 1", "layer 3, visit 2"]


def test_pairs_of_visits_are_places_too() -> None:
    found = grid(ARCHITECTURE, steps=((1, 3), (2, 4)))
    assert named(found, "headline", "layer") == [
        ("looped 2-3", "1 vs 2", [0, 1], []), ("2", "1 vs 2", [0], []), ("3", "1 vs 2", [1], [])
    ]  # fmt: skip


@pytest.mark.parametrize(("num_layers", "layers"), [(1, (0,)), (3, (0, 1, 2)), (4, (1, 2)), (8, (2, 3, 4, 5))])
def test_a_network_without_loops_has_its_middle_half(num_layers: int, layers: tuple[int, ...]) -> None:
    steps = tuple(Step(layer, 0) for layer in range(num_layers))
    architecture = replace(ONCE, steps=steps, loop_factors=(1.0,) * num_layers)
    assert headline_loops(architecture) == (Loop(layers, 1),)
    kind = "all" if len(layers) == num_layers else "middle"
    assert named(grid(architecture), "headline")[0][:2] == (f"{kind} {layer_range(layers)}", 1)


def test_beside_a_looped_network_it_has_the_same_layers() -> None:
    outer = replace(LOOPED, loop_start=0, loop_stop=1).architecture()
    assert headline_loops(ONCE, outer) == (Loop((0,), 1),)
    assert headline_loops(ONCE, NESTED) == (Loop((0, 2), 1), Loop((1,), 1))
    deeper = replace(LOOPED, num_layers=9, loop_start=6, loop_stop=8).architecture()
    assert headline_loops(ONCE, deeper) == (Loop((1, 2), 1),), "layers that it lacks"
    assert headline_loops(ARCHITECTURE, outer) == ARCHITECTURE.loops
