"""Which executions are compared: every pair of visits that was asked for and recorded."""

from dataclasses import replace

import pytest

from probes.running import catalog
from probes.statistics.grid import Grid
from probes.statistics.visit_pairs import check_visits, consecutive_once, not_compared, once_visited, visit_pairs
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import label, plan
from tests.support.answers import measure
from tests.support.app_captures import episodes
from tests.support.planted import BASELINE, LOOPED, NESTED

THREE = replace(LOOPED, num_layers=6, loop_start=2, loop_stop=4, num_visits=3).architecture()
"""Steps 0 1 | 2 3 | 4 5 | 6 7 | 8 9."""


def test_every_pair_of_visits_of_every_looped_layer() -> None:
    found = visit_pairs(THREE, range(10), (2, 0, 1))
    assert found == ((2, 4), (3, 5), (2, 6), (3, 7), (4, 6), (5, 7))
    for early, late in found:
        assert THREE.steps[early].layer == THREE.steps[late].layer
        assert THREE.steps[early].visit < THREE.steps[late].visit


def test_loops_that_are_nested_have_the_pairs_that_each_makes() -> None:
    assert visit_pairs(NESTED, range(8), (0, 1)) == ((0, 4), (1, 2), (3, 7))
    assert visit_pairs(NESTED, range(8), (1, 3)) == ((2, 6),)


def test_only_recorded_steps_are_paired() -> None:
    assert visit_pairs(THREE, (2, 3, 5, 6), (0, 1, 2)) == ((3, 5), (2, 6))
    for recorded, got, way_out in (
        ((2, 3), "layer 3, visit 1; layer 4, visit 1", "record it again with both visits"),
        ((0, 9), "layer 1, visit 1; layer 6, visit 1", "record it again with a layer of 3-4, which are visited .*"),
        ((3, 7), "layer 4, visit 1; layer 4, visit 3", "compare visits that it holds with --compare"),
    ):
        message = f"^a capture must hold two of the visits 1, 2 of at least one layer; got {got}: {way_out}$"
        with pytest.raises(UserError, match=message):
            visit_pairs(THREE, recorded, (1, 0))


def test_visits_are_two_or_more_that_the_network_makes() -> None:
    for visits, got in (((0,), "1"), ((1, 1), "2 2"), ((), "none"), ((-1, 0), "0 1")):
        with pytest.raises(UserError, match=f"^visits must be two or more different numbers from 1; got {got}$"):
            check_visits(visits)
    with pytest.raises(UserError, match=r"^visits must be among 1 to 3; got 5$"):
        visit_pairs(THREE, range(10), (0, 4))


def test_a_baseline_has_no_pairs_but_names_them() -> None:
    baseline = BASELINE.architecture()
    assert visit_pairs(baseline, range(4), (0, 1)) == ()
    grid = Grid(architecture=baseline, loops=(), steps=())
    assert not_compared(["cosine"], grid, (0, 1))[0].rows() == []
    looped = replace(grid, architecture=THREE, loops=THREE.loops)
    (named,) = not_compared(["cosine"], looped, (2, 0, 1), {"update": "layer"})
    assert [(row["visit"], row["update"]) for row in named.rows()] == [
        ("1 vs 2", "layer"), ("1 vs 3", "layer"), ("2 vs 3", "layer")
    ]  # fmt: skip
    assert {(row["quantity"], row["value"], row["layers"], row["note"]) for row in named.rows()} == {
        ("cosine", None, "looped 3-4", "needs two visits: this network visits each layer once")
    }


def test_consecutive_layers_that_run_once() -> None:
    assert once_visited(THREE.steps) == (0, 1, 8, 9)
    assert consecutive_once(THREE.steps, range(10)) == ((0, 1), (8, 9))
    assert consecutive_once(THREE.steps, (0, 8, 9)) == ((8, 9),)
    assert consecutive_once(plan(BASELINE), range(4)) == ((0, 1), (1, 2), (2, 3))


PAIRED = ("projection_similarity", "expert_overlap", "residual_updates")


@pytest.mark.parametrize("config", [LOOPED, BASELINE])
@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_capture_of_any_one_step_is_measured_or_refused_in_a_line(name: str, config: ModelConfig) -> None:
    probe = catalog.load(name)
    whole = episodes(config)
    for step, of in enumerate(whole.architecture.steps):
        batch = replace(whole, sites={key: array for key, array in whole.sites.items() if key[0] == step})
        if config is BASELINE or name not in PAIRED:
            result = measure(probe, [batch])
            assert result.rows()
            assert result.figures
        else:
            with pytest.raises(UserError, match=f"; got {label(of)}: record it again with "):
                measure(probe, [batch])
