"""Attribution: the contributions add up to the logit, and what alone writes has all of it."""

import numpy as np
import pytest
import torch

from cache.record import run_batches
from model.hooks.looped_model import LoopedModel
from probes import logit_attribution as probe
from probes.running.probe import Result, run
from probes.statistics.along_steps import predicts
from smelt_interp.sites import SITES
from tests.support.dense import DenseNested
from tests.support.families import SPAN, hooked
from tests.support.networks import tiny_network
from tests.support.planted import LOOPED, pick, same_numbers, text_samples

SAMPLES = text_samples(5, 12, padding=3)
NETWORK = tiny_network(LOOPED)


def measure(network: LoopedModel, batch_size: int = 5, *, centre: bool = True) -> Result:
    batches = run_batches(network, SAMPLES, probe.needs(network.architecture), batch_size=batch_size)
    return run(batches, {"logit": (probe, probe.Options(centre=centre))}, network=network)["logit"]


def values(rows: list[dict[str, object]], level: str, of: str) -> dict[tuple[object, ...], float]:
    return {
        (row["layers"], row["visit"], row.get("head") or row.get("expert")): row["value"]
        for row in rows
        if row["level"] == level and row.get("of") == of
    }


@pytest.mark.parametrize("centre", [True, False])
def test_steps_heads_and_experts_add_up_to_the_logit(centre: bool) -> None:
    result = measure(NETWORK, centre=centre)
    rows = result.rows()
    drawn = [line.name for line in result.figures["steps"].data if line.mode == "lines+markers"]
    assert drawn == ["contribution, attention", "contribution, experts"]
    (batch,) = run_batches(NETWORK, SAMPLES, ("hook_resid_post",))
    logits_BTW = NETWORK.readout(batch.sites[5, "hook_resid_post"]).detach()
    chosen = [logits_BTW[b, t, SAMPLES.ids_NT[b, t + 1]] - centre * logits_BTW[b, t].mean()
              for b, t in np.argwhere(predicts(batch))]  # fmt: skip
    logit = pick(rows, quantity="logit")["value"]
    assert logit == pytest.approx(float(torch.stack(chosen).mean()), abs=1e-5)
    assert pick(rows, quantity="remainder")["value"] == pytest.approx(0, abs=1e-5)
    entered = pick(rows, layers="entered")["value"]
    for level in ("headline", "layer"):
        parts = sum(sum(values(rows, level, of).values()) for of in ("attention", "experts"))
        assert entered + parts == pytest.approx(logit, abs=1e-5)
    for of in ("attention", "experts"):
        units, steps = values(rows, "head", of), values(rows, "layer", of)
        assert len(units) == 6 * (4 if of == "attention" else 8)
        for (layers, visit, _), value in steps.items():
            assert sum(x for at, x in units.items() if at[:2] == (layers, visit)) == pytest.approx(value, abs=1e-6)


def test_a_head_that_alone_writes_has_all_and_a_constant_token_has_no_more_than_its_null() -> None:
    network = tiny_network(LOOPED)
    with torch.no_grad():
        for layer in network.layers:
            layer.mlp.w_out.zero_()
            layer.attn.o_proj.weight.zero_()
        network.layers[2].attn.o_proj.weight[:, 6:12] = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    rows = measure(network).rows()
    wrote = {at for at, value in values(rows, "head", "attention").items() if value != 0}
    assert wrote == {("3", 1, 2), ("3", 2, 2)}
    assert not any(values(rows, "head", "experts").values())
    with torch.no_grad():  # every token's unembedding is one vector: whose turn it is makes no difference
        network.unembed.weight[:] = network.unembed.weight[0].clone()
    row = pick(measure(network, centre=False).rows(), level="layer", layers="3", visit=2, of="attention")
    assert row["null_shuffled"] == pytest.approx(row["value"], rel=1e-5)


@pytest.mark.parametrize("network", [NETWORK, hooked("olmoe", SPAN)], ids=["ours", "olmoe"])
def test_no_part_of_a_step_is_kept_at_a_width_each(network: LoopedModel) -> None:
    sites = probe.needs(network.architecture)
    assert {SITES[site].axes for site in sites} == {"BTD"}, "the stream and updates alone are recorded"
    assert {probe.HEADS, probe.SLOTS} < {*network.architecture.sites}


def test_batches_do_not_matter() -> None:
    assert same_numbers(measure(NETWORK).rows(), measure(NETWORK, batch_size=2).rows(), 1e-5)


def test_other_networks_are_attributed_as_far_as_their_streams_are_sums() -> None:
    rows = measure(hooked("llama", SPAN)).rows()
    assert pick(rows, quantity="remainder")["value"] == pytest.approx(0, abs=1e-5)
    assert {row["of"] for row in rows if row.get("of")} == {"attention", "MLP"}, "a dense network has no experts"
    mixture = measure(hooked("olmoe", SPAN)).rows()
    for of, found in (("attention", rows), ("attention", mixture), ("experts", mixture)):
        units = values(found, "head", of)
        for (layers, visit, _), value in values(found, "layer", of).items():
            assert sum(x for at, x in units.items() if at[:2] == (layers, visit)) == pytest.approx(value, abs=1e-6)
    own = measure(hooked("dory")).rows()
    assert {row["of"] for row in own if row.get("of")} == {"layer"}
    nested = measure(DenseNested().eval()).rows()
    assert abs(pick(nested, quantity="remainder")["value"]) > 1e-3, "a state there is a sum of two stacks"


@pytest.mark.parametrize("centre", [True, False])
@torch.no_grad()
def test_behind_a_layer_norm_updates_count_without_their_mean_and_its_bias_has_a_row(centre: bool) -> None:
    network = hooked("gpt2", SPAN)
    rows = measure(network, centre=centre).rows()
    assert pick(rows, quantity="remainder")["value"] == pytest.approx(0, abs=1e-6)
    bias = pick(rows, layers="bias")["value"]
    parts = pick(rows, layers="entered")["value"] + sum(
        sum(values(rows, "layer", of).values()) for of in ("attention", "MLP")
    )
    assert parts + bias == pytest.approx(pick(rows, quantity="logit")["value"], abs=1e-6)
    next_WD = network.W_U.T - centre * network.W_U.mean(1)
    (batch,) = run_batches(network, SAMPLES, ("hook_resid_post",))
    followed = [next_WD[SAMPLES.ids_NT[b, t + 1]] for b, t in np.argwhere(predicts(batch))]
    assert bias == pytest.approx(float(torch.stack(followed).mean(0) @ network.ln_final.bias), abs=1e-7)
