"""The lens: at the end it is the network, and a state that nothing changes reads the same whatever comes after."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cache.record import run_batches
from model.hooks.looped_model import LoopedModel
from probes import logit_lens as probe
from probes.running.passes import pass_inputs
from probes.running.probe import Result, run
from probes.statistics.along_steps import predicts
from smelt_interp.errors import UserError
from tests.support.dense import DenseNested
from tests.support.networks import tiny_network
from tests.support.planted import BASELINE, LOOPED, pick, same_numbers, text_samples

SAMPLES = text_samples(5, 14, padding=3)
NETWORK = tiny_network(LOOPED)


def measure(network: LoopedModel, options: probe.Options | None = None, batch_size: int = 5) -> Result:
    batches = run_batches(network, SAMPLES, probe.needs(network.architecture), batch_size=batch_size)
    return run(batches, {"lens": (probe, options or probe.Options())}, network=network)["lens"]


def at(rows: list[dict[str, object]], quantity: str, layer: int, visit: int, lens: str = "stream") -> object:
    return pick(rows, quantity=quantity, level="layer", layers=str(layer), visit=visit, lens=lens)["value"]


def test_after_the_last_step_the_lens_is_the_network() -> None:
    rows = measure(NETWORK).rows()
    assert at(rows, "KL to the end", 4, 1) == pytest.approx(0, abs=1e-6)
    assert at(rows, "answer is first", 4, 1) == at(rows, "answer rank", 4, 1) == 1
    (batch,) = run_batches(NETWORK, SAMPLES, ())
    counted_BT = torch.from_numpy(predicts(batch))
    assert at(rows, "loss", 4, 1) == pytest.approx(-float((batch.logprob_BT * counted_BT).sum() / counted_BT.sum()))
    # The coda lens on the state that enters the coda is the network too.
    assert at(rows, "KL to the end", 3, 2, "coda") == pytest.approx(0, abs=1e-6)


def test_numbers_are_those_of_a_dumb_reference() -> None:
    rows = measure(NETWORK).rows()
    (batch,) = run_batches(NETWORK, SAMPLES, ())
    tokens_BT, asked = pass_inputs(NETWORK, batch)
    with torch.no_grad():
        _, cache = NETWORK.run_with_cache(tokens_BT, **asked)
        lens_BTW = NETWORK.readout(cache["blocks.2.hook_resid_post"])
        coda_BTW = NETWORK(cache["blocks.2.hook_resid_post"], start_at=(3, 0), **asked)
        before_BTW = NETWORK.readout(cache["blocks.1.hook_resid_post"])
    expected: dict[str, list[float]] = {"stream": [], "coda": [], "flips": []}
    for b, t in np.argwhere(predicts(batch)):
        chosen = int(tokens_BT[b, t + 1])
        for name, logits in (("stream", lens_BTW[b, t]), ("coda", coda_BTW[b, t])):
            expected[name].append(1 + sum(bool(x > logits[chosen]) for x in logits))
        expected["flips"].append(bool(lens_BTW[b, t].argmax() != before_BTW[b, t].argmax()))
    assert at(rows, "next token rank", 3, 1) == pytest.approx(np.mean(expected["stream"]))
    assert at(rows, "next token rank", 3, 1, "coda") == pytest.approx(np.mean(expected["coda"]))
    assert at(rows, "flips", 3, 1) == pytest.approx(np.mean(expected["flips"]))


def test_a_second_visit_that_writes_nothing_changes_no_reading() -> None:
    network = tiny_network(LOOPED)
    with torch.no_grad():
        for layer in (1, 2):
            network.layers[layer].attn.o_proj.weight.zero_()
            network.layers[layer].mlp.w_out.zero_()
    rows = measure(network).rows()
    for lens in ("stream", "coda"):
        readings = {at(rows, "loss", layer, visit, lens) for layer in (2, 3) for visit in (1, 2)}
        assert len(readings) == 1
        assert at(rows, "flips", 3, 2, lens) == 0


def test_batches_do_not_matter_and_a_network_without_a_coda_says_so() -> None:
    assert same_numbers(measure(NETWORK).rows(), measure(NETWORK, batch_size=2).rows(), 1e-5)
    whole = tiny_network(replace(LOOPED, loop_start=0, loop_stop=4))
    notes = {row["note"] for row in measure(whole).rows() if row["lens"] == "coda"}
    assert notes == {"no layer runs after the loop, or no pass can start at one"}
    assert measure(tiny_network(BASELINE)).rows()


def test_a_network_that_cannot_start_in_the_middle_is_read_by_the_stream_lens() -> None:
    network = DenseNested().eval()
    rows = measure(network, probe.Options(lenses=("stream",))).rows()
    end = network.plan[-1]
    assert at(rows, "KL to the end", end.layer + 1, end.visit + 1) == pytest.approx(0, abs=1e-6)
    with pytest.raises(UserError, match="lenses must be one or more different values; got stream stream"):
        probe.Options(lenses=("stream", "stream"))
