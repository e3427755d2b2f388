"""What is said of each sample and of each of its tokens, on planted captures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.recording import write_capture
from cache.store import Capture
from probes import sample_values
from probes.sample_values import chosen_samples, coloured, colourings, sample_frame
from smelt_interp.data.samples import Role
from smelt_interp.errors import UserError
from tests.support.app_captures import VISIT_MASS, episodes
from tests.support.planted import BASELINE, planted_batch, text_samples


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Three episodes; token t costs t / 10 nats, the first and the last answer are right, visit 2 turns each update
    around and doubles it."""
    batch = episodes()
    samples, length = batch.samples, batch.samples.ids_NT.shape[1]
    logprob_BT = np.broadcast_to(-(np.arange(length) + 1) / 10, samples.ids_NT.shape).astype(np.float32)
    argmax_BT = np.roll(samples.ids_NT, -1, 1)
    argmax_BT[1, int(np.flatnonzero(samples.role_NT[1] == Role.ANSWER)[0]) - 1] = 0
    sites = dict(batch.sites)
    update = sites[1, "hook_resid_mid"]
    for step, times in ((1, 1.0), (3, -2.0)):
        sites[step, "hook_resid_post"] = sites[step, "hook_resid_pre"] + times * update
    planted = replace(batch, sites=sites, logprob_BT=logprob_BT, argmax_BT=argmax_BT.astype(np.int32))
    return write_capture(tmp_path_factory.mktemp("captures") / "run", [planted], dtype="float32")


def test_a_sample_has_what_was_planted(capture: Capture) -> None:
    frame = sample_frame(capture, "attention_sink")
    assert frame["sample"].tolist() == [1, 2, 3]
    assert frame["right"].tolist() == [True, False, True]
    assert frame["shots"].tolist() == [2, 2, 2]
    length_N = capture.samples.length_N
    np.testing.assert_allclose(frame["loss (nats)"], [np.arange(1, n).mean() / 10 for n in length_N], rtol=1e-6)
    for visit, mass in enumerate(VISIT_MASS, start=1):
        np.testing.assert_allclose(frame[f"start mass, looped 2-3, visit {visit}"], mass, rtol=1e-5)
    np.testing.assert_allclose(frame["start mass, looped 2-3, visit 2 - 1"], VISIT_MASS[1] - VISIT_MASS[0], rtol=1e-5)


def test_a_document_does_not_predict_the_one_packed_after_it(tmp_path: Path) -> None:
    samples = replace(text_samples(1, 8), segment_start_NT=np.array([[0, 0, 0, 0, 4, 4, 4, 4]], np.int32))
    logprob_BT = np.full((1, 8), -1.0, np.float32)
    logprob_BT[0, 3] = -100.0
    batch = planted_batch(BASELINE, samples, {}, logprob_BT=logprob_BT)
    capture = write_capture(tmp_path / "packed", [batch])
    assert sample_frame(capture)["loss (nats)"].tolist() == [1.0]


def test_the_list_of_failures_is_a_filter(capture: Capture) -> None:
    frame = sample_frame(capture)
    assert chosen_samples(frame, show="wrong")["sample"].tolist() == [2]
    assert chosen_samples(frame, show="right", descending=True)["sample"].tolist() == [3, 1]
    by_tokens = chosen_samples(frame, by="tokens")["tokens"].tolist()
    assert by_tokens == sorted(by_tokens)
    assert chosen_samples(frame, by="sample", least=2, most=2)["sample"].tolist() == [2]
    assert chosen_samples(frame.drop(columns="right"), show="wrong").empty


def test_tokens_have_their_loss_and_start_mass(capture: Capture) -> None:
    loss = coloured(capture, 1, "loss", 0, 0)
    length = int(capture.samples.length_N[1])
    np.testing.assert_allclose(loss.values_T[1:], np.arange(1, length) / 10, rtol=1e-6)
    assert np.isnan(loss.values_T[0])
    assert loss.most == pytest.approx((length - 1) / 10)
    assert (loss.readings[0], loss.readings[3]) == ("no number", "loss 0.300 nats")
    for visit, mass in enumerate(VISIT_MASS):
        found = coloured(capture, 1, "start mass", 2, visit)
        np.testing.assert_allclose(found.values_T[1:], mass, rtol=1e-5)
        assert np.isnan(found.values_T[0])
        assert f"layer 3, visit {visit + 1}" in found.summary


def test_a_visit_that_turns_an_update_around_and_doubles_it_says_so(capture: Capture) -> None:
    cosine, size = (coloured(capture, 0, name, 1, 0) for name in ("cosine", "update ratio"))
    np.testing.assert_allclose(cosine.values_T, -1, atol=1e-5)
    np.testing.assert_allclose(size.values_T, 1, atol=1e-5)  # twice as large is one doubling
    assert set(size.readings) == {"update ratio 2.000"}


def test_a_token_has_the_expert_of_its_largest_weight(capture: Capture) -> None:
    found = coloured(capture, 2, "expert", 1, 1)
    row, length = slice(2, 3), int(capture.samples.length_N[2])
    chosen_TK, weight_TK = (capture.read(f"mlp.hook_expert_{name}", 3, row)[0] for name in ("indices", "weights"))
    for token in range(length):
        best = int(chosen_TK[token, weight_TK[token].argmax()])
        assert found.values_T[token] == best
        assert found.readings[token].startswith(f"expert {best + 1} (")
    assert len(set(found.categories)) == 8


def test_without_a_second_visit_nothing_is_compared(tmp_path: Path, capture: Capture) -> None:
    assert colourings(capture, 1) == ("loss", "start mass", "expert", "cosine", "update ratio")
    baseline = write_capture(tmp_path / "baseline", [episodes(BASELINE)])
    assert colourings(baseline, 1) == ("loss", "start mass", "expert")
    with pytest.raises(UserError, match="two visits of the layer must be recorded for cosine; got layer 2"):
        coloured(baseline, 0, "cosine", 1, 0)
    assert "attention_sink" in sample_values.able(baseline)
