"""Early exit: planted answers stand, are lost and are picked as they were planted; fewer visits are the network's."""

import numpy as np
import pytest
import torch

from cache.record import run_batches
from model.hooks.looped_model import LoopedModel
from probes import early_exit as probe
from probes.running.probe import Result, run
from probes.statistics.along_steps import predicts
from smelt_interp.errors import UserError
from tests.support.families import SPAN, hooked
from tests.support.networks import tiny_network
from tests.support.planted import BASELINE, LOOPED, pick, same_numbers, text_samples

SAMPLES = text_samples(4, 12, padding=3)
NETWORK = tiny_network(LOOPED)


def measure(network: LoopedModel, batch_size: int = 4, **options: object) -> Result:
    batches = run_batches(network, SAMPLES, probe.needs(network.architecture), batch_size=batch_size)
    return run(batches, {"exit": (probe, probe.Options(**options))}, network=network)["exit"]


def test_planted_answers_stand_and_are_lost_and_gained() -> None:
    next_BT = torch.tensor([[7, 7, 7, 8, 9]])
    answers_XBT = torch.tensor([[[7, 7, 1, 8, 0]], [[7, 2, 7, 8, 0]], [[7, 1, 7, 1, 0]]])
    counted_BT = torch.tensor([[True, True, True, True, False]])
    found = probe.measured(answers_XBT, next_BT, counted_BT)
    assert found["stands"].tolist() == [[1, 2, 4]], (
        "token 1 at once, token 3 after two, and nothing else before the end"
    )
    assert found["right"].tolist() == [[3, 3, 2]]
    assert found["lost"].tolist() == [[2, 1, 0]]
    assert found["gained"].tolist() == [[1, 0, 0]]
    # 7 7 1 8 held against 7 7 7 8: 3 + 3 + 0 + 1 of 16 pairs, times four tokens.
    assert found["shuffled right"][0, 0] == pytest.approx(7 / 4)
    assert found["shuffled stands"][0, 0] == pytest.approx((2 + 2 + 2 + 0) / 4), "held against 7 1 7 1"


def test_rules_take_the_first_exit_that_they_allow() -> None:
    right_XBT = torch.tensor([[[True, False, False]], [[True, True, False]]])
    sure_XBT = torch.tensor([[[0.4, 0.9, 0.2]], [[0.6, 0.9, 0.3]]])
    gate_VBT = torch.tensor([[[0.3, 0.6, 0.1]], [[0.3, 0.1, 0.1]]])
    options = probe.Options(confidences=(0.5,))
    taken = {rule: probe.chosen(at).argmax(-1).tolist()
             for rule, at in probe.rules(right_XBT, sure_XBT, gate_VBT, options).items()}  # fmt: skip
    assert taken == {"oracle": [[0, 1, 1]], "confidence 0.5": [[1, 0, 1]], "gate": [[1, 0, 1]]}


def test_exits_are_the_network_with_fewer_visits_and_the_readout_of_each_step() -> None:
    result = measure(NETWORK)
    rows = result.rows()
    by_visit, by_step = result.figures["rules"].data
    assert by_visit.text == by_step.text == ("oracle", "confidence 0.5", "confidence 0.8", "confidence 0.95")
    (batch,) = run_batches(NETWORK, SAMPLES, ("hook_resid_post",))
    (less,) = run_batches(NETWORK.with_visits(1), SAMPLES, ())
    counted_BT = torch.from_numpy(predicts(batch))
    early_BT, late_BT = less.argmax_BT[counted_BT], batch.argmax_BT[counted_BT]
    stands = pick(rows, quantity="stands", exits="visit", visit=1)
    assert stands["value"] == pytest.approx(float((early_BT == late_BT).float().mean()))
    assert pick(rows, quantity="stands", exits="visit", visit=2)["value"] == 1
    read_BT = NETWORK.readout(batch.sites[2, "hook_resid_post"]).argmax(-1)
    next_BT = torch.from_numpy(np.roll(SAMPLES.ids_NT, -1, 1))
    right = pick(rows, quantity="right", exits="step", level="layer", layers="3", visit=1)["value"]
    assert right == pytest.approx(float((read_BT == next_BT)[counted_BT].float().mean()))
    last = pick(rows, quantity="right", exits="step", level="layer", layers="4", visit=1)["value"]
    assert [row["visit"] for row in rows if row["quantity"] == "lost" and row["exits"] == "visit"] == [1], (
        "2 is the last"
    )
    oracle = pick(rows, quantity="right", exits="step", rule="oracle")
    assert oracle["value"] >= last
    assert pick(rows, quantity="exit", exits="step", rule="confidence 0.95")["value"] <= 6


def test_a_rule_that_always_goes_on_is_the_last_exit_and_its_null() -> None:
    rows = measure(NETWORK, confidences=(1.0,), exits=("visit",)).rows()
    row = pick(rows, quantity="right", rule="confidence 1")
    last = pick(rows, quantity="right", visit=2)["value"]
    assert row["value"] == pytest.approx(last)
    assert row["null_random"] == pytest.approx(last)
    assert pick(rows, quantity="exit", rule="confidence 1")["value"] == 2


def test_batches_do_not_matter_and_any_network_is_read() -> None:
    assert same_numbers(measure(NETWORK).rows(), measure(NETWORK, batch_size=3).rows(), 1e-5)
    once = measure(tiny_network(BASELINE), exits=("visit",)).rows()
    assert {row["value"] for row in once if row["quantity"] == "stands"} == {1.0}
    assert pick(measure(hooked("llama", SPAN)).rows(), quantity="stands", exits="visit", visit=2)["value"] == 1
    with pytest.raises(UserError, match=r"confidences must be one or more different values; got 0\.5 0\.5"):
        probe.Options(confidences=(0.5, 0.5))


@torch.no_grad()
def test_ouros_gate_stops_what_still_runs_and_the_last_visit_has_the_rest() -> None:
    network, tokens_BT = hooked("ouro"), torch.from_numpy(SAMPLES.ids_NT).long()
    gate, left, expected = network.halting, 1.0, []
    _, found = network.run_with_cache(tokens_BT, names_filter=lambda name: name.endswith("resid_post"))
    ends = [step for step, at in enumerate(network.plan) if at.layer == 3]
    for step in ends[:-1]:  # the real code's own words: what remains, times the chance to stop
        chance = torch.sigmoid(gate(network.ln_final(found["hook_resid_post", step])))[..., 0]
        expected.append(left * chance)
        left = left * (1 - chance)
    (batch,) = run_batches(network, SAMPLES, ("hook_resid_post",))
    chances_VBT = probe.gate_chances(network, batch)
    torch.testing.assert_close(chances_VBT, torch.stack([*expected, left]))
    torch.testing.assert_close(chances_VBT.sum(0), torch.ones_like(chances_VBT[0]))
    gate.weight.zero_()
    gate.bias.fill_(-0.5)  # a chance of 0.378, of those that are left: 0.613 by the second visit
    for threshold, at in ((0.37, 1), (0.5, 2), (0.62, 3)):
        rows = measure(network, gate_chance=threshold, exits=("visit",)).rows()
        assert pick(rows, quantity="exit", exits="visit", rule="gate")["value"] == at


def test_a_networks_own_halting_gate_is_a_rule() -> None:
    network = hooked("open_mythos")
    gate = network.halting
    with torch.no_grad():
        gate.halt.weight.zero_()
        gate.halt.bias.fill_(-0.5)  # a chance of 0.378 a visit: three quarters by the second
    rows = measure(network, gate_chance=0.7).rows()
    assert pick(rows, quantity="exit", exits="visit", rule="gate")["value"] == 2
    assert pick(rows, quantity="right", exits="visit", rule="gate")["null_random"] == pytest.approx(
        pick(rows, quantity="right", exits="visit", visit=2)["value"]
    )
    assert not [row for row in rows if row.get("rule") == "gate" and row["exits"] == "step"]
