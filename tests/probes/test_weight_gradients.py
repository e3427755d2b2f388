"""Each visit's share of a shared weight's gradient: the shares add up to it, and a planted visit has all of it."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from cache.batch import take
from cache.record import run_batches
from model.hooks.looped_model import LoopedModel
from model.hooks.visit_weights import weights_by_visit
from probes import weight_gradients as probe
from probes.running.passes import pass_inputs
from probes.running.probe import Result, run
from probes.statistics.along_steps import predicts
from probes.statistics.sums import Sums
from smelt_interp.errors import UserError
from tests.support.dense import DenseNested
from tests.support.families import SPAN, hooked
from tests.support.networks import tiny_network
from tests.support.planted import BASELINE, LOOPED, pick, same_numbers, text_samples

SAMPLES = text_samples(3, 10, padding=2)
NETWORK = tiny_network(LOOPED)


def measure(network: LoopedModel, batch_size: int = 3, **options: object) -> Result:
    batches = run_batches(network, SAMPLES, (), batch_size=batch_size)
    asked = {"gradients": (probe, probe.Options(**options))}
    return run(batches, asked, network=network)["gradients"]


@pytest.mark.parametrize(
    "network",
    [NETWORK, DenseNested(), hooked("llama", SPAN), hooked("hrm_text")],
    ids=["ours", "nested", "looped span", "own loop"],
)
def test_shares_add_up_to_the_gradient_in_float64(network: LoopedModel) -> None:
    network = copy.deepcopy(network).double()
    (batch,) = run_batches(network, SAMPLES.rows(np.array([0])), (), batch_size=1)
    counts_T = predicts(batch)[0]
    shares = probe.step_gradients(network, batch, counts_T)
    tokens_BT, asked = pass_inputs(network, batch)
    cross_entropy(network(tokens_BT, **asked)[0, :-1], tokens_BT[0, 1:]).backward()
    modules, plan = network.layer_modules(), network.plan
    assert len(shares) == len(plan)
    for step, (layer, _) in enumerate(plan):
        whole = dict(modules[layer if len(modules) < len(plan) else step].named_parameters())
        for name, weight in whole.items():
            total = sum(shares[s][name] for s in range(len(plan)) if plan[s].layer == layer)
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert torch.allclose(total, expected, rtol=1e-10, atol=1e-13), f"{name} of layer {layer}"


def test_weights_are_back_after_the_block_and_after_a_mistake_in_it() -> None:
    before = dict(NETWORK.named_parameters())
    with weights_by_visit(NETWORK) as leaves:
        for _ in range(2):
            NETWORK(torch.full((1, 4), 1))
            assert len(leaves) == len(NETWORK.plan)
        assert dict(NETWORK.named_parameters()).keys() == before.keys()
        assert NETWORK.layers[1].attn.q_proj.weight is leaves[3]["attn.q_proj.weight"]
        with pytest.raises(UserError, match="token ids must be from 0 to 258; got 999"):
            NETWORK(torch.full((1, 4), 999))
        NETWORK(torch.full((1, 4), 1), stop_at=(1, 0))
        NETWORK(torch.full((1, 4), 1))  # from its own beginning, wherever the last one ended
        assert NETWORK.layers[1].attn.q_proj.weight is leaves[3]["attn.q_proj.weight"]
        assert len(leaves) == len(NETWORK.plan)
        for _ in range(2):
            NETWORK(torch.zeros(1, 4, NETWORK.architecture.width), start_at=(1, 1))
            assert len(leaves) == len(NETWORK.plan) - NETWORK.step(1, 1)
    assert not NETWORK._forward_pre_hooks
    assert all(weight is before[name] for name, weight in NETWORK.named_parameters())


def test_numbers_are_those_of_a_dumb_reference() -> None:
    result = measure(NETWORK)
    rows = result.rows()
    assert [len(line.x) for line in result.figures["norms"].data if line.mode == "lines+markers"] == [6, 6]
    expected: dict[str, list[float]] = {"norm": [], "cosine": [], "share": []}
    doubled = NETWORK.with_visits(2, loop_scale=1.0)
    (batch,) = run_batches(doubled, SAMPLES, ())
    for row in range(3):
        steps = probe.step_gradients(doubled, take(batch, np.array([row])), predicts(batch)[row])
        flat = [torch.cat([g.flatten().double() for g in step.values()]) for step in steps]
        whole = flat[2] + flat[4]  # layer 3 from 1
        expected["norm"].append(float(flat[4].norm()))
        expected["cosine"].append(float(flat[2] @ flat[4] / flat[2].norm() / flat[4].norm()))
        expected["share"].append(float((flat[4] @ whole) / (whole @ whole)))
    where = {"level": "layer", "layers": "3", "weights": "all", "scale": "1"}
    assert pick(rows, quantity="gradient norm", visit=2, **where)["value"] == pytest.approx(np.mean(expected["norm"]))
    assert pick(rows, quantity="cosine", **where)["value"] == pytest.approx(np.mean(expected["cosine"]))
    assert pick(rows, quantity="share", visit=2, **where)["value"] == pytest.approx(np.mean(expected["share"]))
    halves = [pick(rows, quantity="share", visit=visit, **where)["value"] for visit in (1, 2)]
    assert sum(halves) == pytest.approx(1)
    assert pick(rows, quantity="share", visit=1, **where)["null_equal"] == 0.5
    assert {row["weights"] for row in rows} == {"all", "attn", "mlp"}


def test_looped_layers_stand_beside_those_that_run_once() -> None:
    products_PSS = np.zeros((1, 6, 6))
    products_PSS[0, range(6), range(6)] = (4.0, 1.0, 1.0, 1.0, 1.0, 4.0)  # norms 2 outside the loop, 1 inside it
    products_PSS[0, 1, 3] = products_PSS[0, 3, 1] = 1.0  # layer 2's visits agree, layer 3's are at right angles
    (batch,) = run_batches(NETWORK, SAMPLES, ())
    layout = probe.lay_out({probe.Variant("1", 2): NETWORK}, batch, probe.Options(), LOOPED.architecture().loops)
    found = probe.measured(products_PSS, layout._replace(parts=("all",)))
    assert found["whole"][:, 0] == pytest.approx([2, 2, 2**0.5, 2])
    assert found["apart"][1:3, 0] == pytest.approx([2**0.5, 2**0.5])
    assert found["cosine"][:, 0] == pytest.approx([1, 0])
    assert found["share"][:, 0] == pytest.approx([1, 0.5, 0.5, 0.5, 0.5, 1])


def test_batches_do_not_matter_and_networks_without_a_loop_or_with_their_own_are_measured() -> None:
    assert same_numbers(measure(NETWORK, scales=("1",)).rows(), measure(NETWORK, 2, scales=("1",)).rows(), 1e-5)
    once = measure(tiny_network(BASELINE), scales=("1/r",)).rows()
    assert pick(once, quantity="cosine")["note"] == "needs two visits: this network visits each layer once"
    assert pick(once, quantity="gradient ratio", weights="all")["value"] > 0
    own = measure(DenseNested().eval()).rows()
    assert {row["scale"] for row in own} == {"kept"}
    assert pick(own, quantity="gradient ratio", weights="qkv", layers="looped 1-2")["note"] == (
        "no layer runs outside the loop"
    )


def test_neighbours_that_are_not_alike_are_no_null() -> None:
    config = replace(LOOPED, num_layers=5, loop_start=3, loop_stop=4)
    network = tiny_network(config)
    network.layers[2] = tiny_network(replace(config, expert_width=4)).layers[2]
    expected = []
    (batch,) = run_batches(network, SAMPLES, ())
    for row in range(3):
        steps = probe.step_gradients(network, take(batch, np.array([row])), predicts(batch)[row])
        first, second = (torch.cat([g.flatten().double() for g in steps[s].values()]) for s in (0, 1))
        expected.append(float(first @ second / first.norm() / second.norm()))
    runs = {probe.Variant("kept", 2): network}
    lay_out, reduce = partial(probe.lay_out, runs), partial(probe.reduce, runs)
    sums = Sums(network.architecture, probe.Options(scales=("kept",)), lay_out, reduce, probe.quantities)
    sums.add(batch)
    rows = probe.result(sums).rows()
    found = pick(rows, quantity="cosine", level="headline", weights="all")
    assert found["null_unlooped"] == pytest.approx(np.mean(expected)), "the second and the third have other shapes"
    assert pick(rows, quantity="cosine", weights="attn")["null_unlooped"] != found["null_unlooped"]
