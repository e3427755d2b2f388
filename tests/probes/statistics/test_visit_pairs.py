"""Which executions are compared: every pair of visits that was asked for and recorded."""

from dataclasses import replace

import pytest

from probes.running import catalog
from probes.statistics.visit_pairs import consecutive_once, once_visited, pair_label, pair_labels, visit_pairs
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Step, label, plan
from tests.support.app_captures import episodes
from tests.support.planted import BASELINE, LOOPED

THREE = replace(LOOPED, num_layers=6, loop_start=2, loop_stop=4, num_visits=3)
"""Steps 0 1 | 2 3 | 4 5 | 6 7 | 8 9."""


def test_every_pair_of_visits_of_every_looped_layer() -> None:
    steps = plan(THREE)
    pairs = visit_pairs(THREE, steps, range(10), (3, 1, 2))
    assert [(pair.layer, pair.visits, pair.steps) for pair in pairs] == [
        (2, (0, 1), (2, 4)), (3, (0, 1), (3, 5)),
        (2, (0, 2), (2, 6)), (3, (0, 2), (3, 7)),
        (2, (1, 2), (4, 6)), (3, (1, 2), (5, 7)),
    ]  # fmt: skip
    for pair in pairs:
        assert [steps[index] for index in pair.steps] == [Step(pair.layer, visit) for visit in pair.visits]


def test_only_recorded_steps_are_paired() -> None:
    steps = plan(THREE)
    assert [pair.steps for pair in visit_pairs(THREE, steps, (2, 3, 5, 6), (1, 2, 3))] == [(3, 5), (2, 6)]
    for recorded, got, way_out in (
        ((2, 3), "layer 3, visit 1; layer 4, visit 1", "record it again with both visits"),
        ((0, 9), "layer 1, visit 1; layer 6, visit 1", "record it again with a layer of 3 to 4, which are visited .*"),
        ((3, 7), "layer 4, visit 1; layer 4, visit 3", "compare visits that it holds with --visits"),
    ):
        message = f"^a capture must hold two of the visits 1, 2 of at least one layer; got {got}: {way_out}$"
        with pytest.raises(UserError, match=message):
            visit_pairs(THREE, steps, recorded, (2, 1))


def test_a_baseline_has_no_pairs_but_names_them() -> None:
    assert visit_pairs(BASELINE, plan(BASELINE), range(4), (1, 2)) == []
    assert pair_labels((1, 2)) == ["1 vs 2"]
    assert pair_labels((3, 1, 2)) == ["1 vs 2", "1 vs 3", "2 vs 3"]
    assert pair_label((0, 2)) == "1 vs 3"


def test_consecutive_layers_that_run_once() -> None:
    steps = plan(THREE)
    assert once_visited(steps) == (0, 1, 8, 9)
    assert consecutive_once(steps, range(10)) == [(0, 1), (8, 9)]
    assert consecutive_once(steps, (0, 8, 9)) == [(8, 9)]
    assert consecutive_once(plan(BASELINE), range(4)) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("config", [LOOPED, BASELINE])
@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_capture_of_any_one_step_is_measured_or_refused_in_a_line(name: str, config: ModelConfig) -> None:
    probe = catalog.load(name)
    whole = episodes(config)
    for step in range(len(whole.plan)):
        batch = replace(whole, sites={key: array for key, array in whole.sites.items() if key[0] == step})
        if config is BASELINE or name in ("attention_sink", "dyck_icl"):
            result = probe.measure([batch], probe.Options())
            assert result.rows()
            probe.figure(result)
        else:
            with pytest.raises(UserError, match=f"; got {label(whole.plan[step])}: record it again with "):
                probe.measure([batch], probe.Options())
