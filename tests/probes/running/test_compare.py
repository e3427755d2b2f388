"""Edits are compared with the network as it is, sample by sample, however the samples are batched."""

import numpy as np
import pytest
import torch

from model.hooks import interventions
from model.hooks.interventions import Target
from probes.running.compare import EditedPasses, compare, dyck_loss, exact_match, loss
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from tests.support.dense import DenseNested
from tests.support.networks import tiny_network
from tests.support.planted import text_samples

OURS, DENSE = tiny_network(), DenseNested().eval()
SAMPLES = text_samples(5, 12, padding=2)
EDITS = {
    "mean": interventions.mean(Target("hook_mlp_out", (3, 4))),
    "resample": interventions.resample(Target("attn.hook_z", (3,), (1,))),
    "zero at the start": interventions.zero(Target("hook_attn_out", (0,))),
    "random": interventions.at_random(interventions.skip([4])),
}


def test_the_numbers_do_not_depend_on_the_batches():
    for model in (OURS, DENSE):
        whole, one_by_one = (compare(model, SAMPLES, EDITS, loss, batch_size=size) for size in (5, 1))
        np.testing.assert_allclose(whole.by_sample, one_by_one.by_sample, rtol=1e-5)
        np.testing.assert_allclose(whole.table.iloc[:, 1:], one_by_one.table.iloc[:, 1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EDITS)
def test_a_pass_that_restarts_is_the_whole_pass(name, monkeypatch):
    rows = np.arange(5)
    restarted = EditedPasses(OURS, SAMPLES, {name: EDITS[name]}).scores(rows, {"loss": loss})
    monkeypatch.setattr(OURS, "restarts", False)
    whole = EditedPasses(OURS, SAMPLES, {name: EDITS[name]}).scores(rows, {"loss": loss})
    np.testing.assert_allclose(restarted[name], whole[name], rtol=1e-6)
    assert np.array_equal(restarted[""], whole[""])


def test_a_mean_is_that_of_all_tokens_without_padding():
    passes = EditedPasses(OURS, SAMPLES, {"mean": EDITS["mean"]}, batch_size=2)
    tokens_BT = torch.from_numpy(SAMPLES.ids_NT.astype(np.int64))
    _, cache = OURS.run_with_cache(tokens_BT)
    for at in EDITS["mean"].sites:
        kept = torch.cat([cache[at][row, :length] for row, length in enumerate(SAMPLES.length_N.tolist())])
        torch.testing.assert_close(passes._mean[at].float(), kept.mean(0).detach())


def test_the_loss_is_the_networks_own_and_an_edit_of_nothing_has_no_effect():
    own = OURS.loss(torch.from_numpy(SAMPLES.rows(np.array([0])).ids_NT.astype(np.int64)), attention="eager").next_token
    same = interventions.swap(OURS, "hook_attn_out", layer=1, visits=(1, 1))
    found = compare(OURS, SAMPLES, {"nothing": same}, loss)
    assert found.by_sample["unedited"][0] == pytest.approx(own.item(), abs=1e-5)
    assert (found.table[["effect", "low", "high"]] == 0).all(axis=None)
    assert found.table["n"].tolist() == [5]


def test_dyck_episodes_are_scored_as_the_dyck_probe_scores_them():
    samples = load_samples(DataOptions(samples=4, shots=(1,), length=48, max_total=6), 64, BYTES)
    right_BTW = torch.nn.functional.one_hot(torch.from_numpy(np.roll(samples.ids_NT, -1, 1)).long(), 259) * 50.0
    assert exact_match(samples, right_BTW).tolist() == [1] * 4
    assert dyck_loss(samples, right_BTW).abs().max() < 1e-6
    assert exact_match(samples, -right_BTW).tolist() == [0] * 4
    uniform = dyck_loss(samples, 0 * right_BTW)
    assert uniform.tolist() == pytest.approx([np.log(259)] * 4)
    assert loss(samples, 0 * right_BTW).tolist() == pytest.approx([np.log(259)] * 4)


def test_another_sample_is_of_another_document():
    samples = load_samples(DataOptions(samples=2, shots=(0, 1), length=48, max_total=6), 64, BYTES)
    passes = EditedPasses(OURS, samples, {})
    assert (samples.document_N[passes._other_N] != samples.document_N).all()


def test_what_cannot_be_compared_is_one_line():
    with pytest.raises(UserError, match="a hook must be on a site that a network of family dense-nested has"):
        compare(DENSE, SAMPLES, {"routing": interventions.zero(Target("mlp.hook_router_logits", (8,)))}, loss)
    with pytest.raises(UserError, match="an edit must have a name; got an empty one"):
        compare(OURS, SAMPLES, {"": EDITS["mean"]}, loss)
    with pytest.raises(UserError, match=r"a score must be one number a sample, \(5,\); got shape \(5, 12, "):
        compare(OURS, SAMPLES, EDITS, lambda samples, logits: logits)
    with pytest.raises(UserError, match="batch_size must be"):
        compare(OURS, SAMPLES, EDITS, loss, batch_size=0)
    alone = SAMPLES.rows(np.zeros(2, np.int64))
    compare(OURS, alone, {"mean": EDITS["mean"]}, loss)
    with pytest.raises(UserError, match=r"samples to resample from must be of 2 documents or more, .*; got 1: give"):
        compare(OURS, alone, {"resample": EDITS["resample"]}, loss)
    with pytest.raises(UserError, match="edits and samples must be at least one; got 0 and 5"):
        compare(OURS, SAMPLES, {}, loss)
