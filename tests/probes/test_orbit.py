"""The orbit: a planted spiral has its contraction and its angle, and longer runs are the network run longer."""

import numpy as np
import pytest
import torch

from cache.record import run_batches
from model.hooks.looped_model import LoopedModel
from probes import orbit as probe
from probes.running.probe import Result, run
from probes.statistics.along_steps import predicts
from probes.statistics.sums import Reduced, Sums
from tests.support.dense import DenseNested
from tests.support.families import SPAN, hooked
from tests.support.networks import tiny_network
from tests.support.planted import BASELINE, LOOPED, pick, planted_batch, same_numbers, text_samples

SAMPLES = text_samples(5, 14, padding=3)
NETWORK = tiny_network(LOOPED)


def measure(network: LoopedModel, batch_size: int = 5, **options: object) -> Result:
    asked = probe.Options(**{"most_visits": 2, **options})
    batches = run_batches(network, SAMPLES, (), batch_size=batch_size)
    return run(batches, {"orbit": (probe, asked)}, network=network)["orbit"]


def test_a_spiral_has_the_contraction_and_the_angle_that_were_planted() -> None:
    turn, shrink = np.radians(30), 0.8
    steps = [shrink**v * np.array([np.cos(v * turn), np.sin(v * turn), 0]) for v in range(4)]
    path_VD = torch.tensor(np.cumsum([[0, 0, 1.0], *steps], 0))
    scales_BT = 1 + torch.rand(5, 14, dtype=torch.float64)  # a token's norm does not count
    states_BVTD = path_VD[None, :, None] * scales_BT[:, None, :, None]
    batch = planted_batch(LOOPED, SAMPLES, {})
    counted_BT = predicts(batch)
    states_BVTD[:, 0] *= torch.from_numpy(counted_BT)[..., None]  # padding enters with nothing
    gram_BVV, shuffled_BVV = probe.products(states_BVTD, torch.from_numpy(counted_BT))
    sums = {"kept, loop.gram": gram_BVV, "kept, loop.shuffled": shuffled_BVV, "tokens": counted_BT.sum(1)}
    layout = probe.Layout((probe.Track("kept", "loop", ()),), (), (), "")
    planted = Sums(
        LOOPED.architecture(), probe.Options(), lambda *_: layout,
        lambda *_: Reduced(by_sample=sums, defined={"samples": counted_BT.any(1)}), probe.quantities,
    )  # fmt: skip
    planted.add(batch)
    rows = probe.result(planted).rows()
    path = probe.result(planted).figures["path"].data[0]
    reached = np.hypot(np.diff(path.x), np.diff(path.y)) <= np.array([shrink**v + 1e-9 for v in range(4)])
    assert reached.all(), "no step is longer on the plane than it is"
    for visit in (2, 3, 4):
        assert pick(rows, quantity="contraction", visit=visit)["value"] == pytest.approx(shrink)
        angle = pick(rows, quantity="angle (degrees)", visit=visit)
        assert [angle["value"], angle["null_shuffled"]] == pytest.approx([30, 30]), "tokens are alike"
    assert pick(rows, quantity="step length", visit=3)["value"] == pytest.approx(shrink**2)
    norm = pick(rows, quantity="state norm", visit=4)
    assert norm["value"] == pytest.approx(float(path_VD[-1].norm()))
    assert norm["null_orthogonal"] == pytest.approx(np.sqrt(1 + sum(shrink ** (2 * v) for v in range(4))))
    centred_VD = path_VD.numpy() - path_VD.numpy().mean(0)
    variances = np.linalg.svd(centred_VD, compute_uv=False) ** 2
    assert pick(rows, quantity="straightness")["value"] == pytest.approx(variances[0] / variances.sum())


def test_every_number_is_that_of_the_network_run_longer() -> None:
    rows = measure(NETWORK, most_visits=3, scales=("kept", "1/r")).rows()
    (batch,) = run_batches(NETWORK, SAMPLES, ())
    counted_BT = torch.from_numpy(predicts(batch))
    for scale in ("kept", "1/r"):
        longer = NETWORK.with_visits(3, loop_scale=scale)
        (again,) = run_batches(longer, SAMPLES, ("hook_resid_pre", "hook_resid_post"))
        loss = -float((again.logprob_BT * counted_BT).sum() / counted_BT.sum())
        assert pick(rows, quantity="loss", scale=scale, visit=3)["value"] == pytest.approx(loss, rel=1e-5)
        entering, *after = (again.sites[1, "hook_resid_pre"], *(again.sites[s, "hook_resid_post"] for s in (2, 4, 6)))
        steps = [(b - a) / entering.norm(dim=-1, keepdim=True)
                 for a, b in zip((entering, *after), after, strict=False)]  # fmt: skip
        token_BT = torch.arange(14) < torch.from_numpy(SAMPLES.length_N)[:, None]
        square = [float((step[token_BT] ** 2).sum()) for step in steps]
        contraction = pick(rows, quantity="contraction", scale=scale, visit=3)["value"]
        assert contraction == pytest.approx((square[2] / square[1]) ** 0.5, rel=1e-5)
        cosine = float((steps[2] * steps[1])[token_BT].sum()) / (square[2] * square[1]) ** 0.5
        angle = pick(rows, quantity="angle (degrees)", scale=scale, visit=3)["value"]
        assert np.cos(np.radians(angle)) == pytest.approx(cosine, abs=1e-5)
    kept = pick(rows, quantity="loss", scale="kept", visit=2)["value"]
    assert kept == pytest.approx(-float((batch.logprob_BT * counted_BT).sum() / counted_BT.sum()), rel=1e-5)
    assert pick(rows, quantity="loss", scale="kept", visit="3 - 1")["value"] == pytest.approx(
        pick(rows, quantity="loss", scale="kept", visit=3)["value"]
        - pick(rows, quantity="loss", scale="kept", visit=1)["value"]
    )


def test_a_loop_that_writes_nothing_stays_and_loses_nothing() -> None:
    network = tiny_network(LOOPED)
    with torch.no_grad():
        for layer in (1, 2):
            network.layers[layer].attn.o_proj.weight.zero_()
            network.layers[layer].mlp.w_out.zero_()
    rows = measure(network).rows()
    losses = [row for row in rows if row["quantity"] == "loss" and isinstance(row["visit"], int)]
    assert len({row["value"] for row in losses}) == 1
    assert losses[0]["null_no_loop"] == pytest.approx(losses[0]["value"])
    assert pick(rows, quantity="step length", visit=2)["value"] == 0
    assert pick(rows, quantity="angle (degrees)", visit=2)["value"] is None


def test_batches_do_not_matter() -> None:
    assert same_numbers(measure(NETWORK).rows(), measure(NETWORK, batch_size=2).rows(), 1e-4)


def test_any_network_is_followed_as_far_as_it_goes() -> None:
    once = measure(tiny_network(BASELINE)).rows()
    assert pick(once, quantity="state norm")["visit"] == 1
    assert {row["note"] for row in once if row["quantity"] == "loss"} == {
        "", "needs two visits: this network visits each layer once"
    }  # fmt: skip
    own = measure(DenseNested().eval()).rows()
    assert max(row["visit"] for row in own if row["quantity"] == "contraction") == 6
    loss = pick(own, quantity="loss")
    assert (loss["visit"], loss["note"][:57]) == (6, "visits must be those that the code of family dense-nested")
    family = measure(hooked("llama", SPAN), most_visits=3).rows()
    assert [row["visit"] for row in family if row["quantity"] == "loss"] == [1, 2, 3, "2 - 1", "3 - 1"]
    assert pick(family, quantity="angle (degrees)", visit=3)["layers"] == "looped 2-3"
