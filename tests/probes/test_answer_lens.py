"""Answers along the steps: the last state is the network's own answer, and what is kept is read back."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.record import record
from cache.store import Capture
from probes import answer_lens as probe
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.dyck_scores import teacher_forced
from smelt_interp.data.samples import Role
from smelt_interp.errors import UserError
from tests.support.networks import tiny_network
from tests.support.planted import LOOPED, text_samples

DYCK = DataOptions(samples=3, length=48, shots=(2,), max_total=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two networks, and of the first a capture of three episodes and one of text."""
    folder, network = tmp_path_factory.mktemp("answers"), tiny_network(LOOPED)
    network.save_pretrained(folder / "tiny", readme="")
    tiny_network(LOOPED, seed=1).save_pretrained(folder / "other", readme="")
    episodes = load_samples(DYCK, 48, network.tokenizer)
    for name, samples in (("dyck", episodes), ("text", text_samples(2, 48))):
        source = {"loop": {"layers": "2-3", "visits": 2, "factor": 0.5}} if name == "text" else {}
        record(network, samples, folder / name, suffixes=(), source=source, command=f"x --ckpt tiny --out {name}")
    return folder


def test_the_last_state_is_the_networks_own_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(folder / "dyck")
    assert probe.read_answers(capture) is None
    words = ["--ckpt", str(folder / "tiny"), "--capture", str(folder / "dyck"), "--batch-size", "2"]
    monkeypatch.setattr(sys, "argv", ["probes.answer_lens", *words])
    probe.main()
    answers = probe.read_answers(capture)
    assert answers is not None
    assert answers.lenses == ("stream", "coda")
    (batch,) = capture.batches(())
    right_B = teacher_forced(batch.samples, np.asarray(batch.argmax_BT).astype(np.int64), newline=True)
    for row, episode in enumerate(answers.episodes):
        at = np.flatnonzero(batch.samples.role_NT[row] == Role.ANSWER)
        own = np.exp(np.asarray(batch.logprob_BT)[row, at - 1])
        # The coda lens ends with the state that enters the coda: both ends are the network.
        for lens, states in (("stream", 7), ("coda", 6)):
            assert len(episode.rank[lens]) == states
            np.testing.assert_allclose(episode.probability[lens][-1], own, atol=2e-6)
            first = [rank == 1 for rank in episode.rank[lens][-1]]
            assert first == (np.asarray(batch.argmax_BT)[row, at - 1] == batch.samples.ids_NT[row, at]).tolist()
        assert episode.right == right_B[row] == (episode.first_from("stream") < 7)
        assert (episode.sample, episode.shots) == (row, 2)
    # Means over tokens: this network answers none right, so that all numbers stand under wrong.
    assert not right_B.any()
    (row,) = [row for row in answers.rows if (row["level"], row["layers"], row["lens"], row["quantity"])
              == ("layer", "4", "stream", "probability")]  # fmt: skip
    ends = np.concatenate([episode.probability["stream"][-1] for episode in answers.episodes])
    assert row["in_wrong"] == pytest.approx(ends.mean(), abs=1e-6)
    assert (row["value"], row["note"]) == (None, "no episode is answered right")


def test_what_an_episode_says_of_itself_and_its_figure(folder: Path) -> None:
    states = {"rank": [[9, 1], [1, 1], [1, 2], [1, 1], [1, 1]], "top": ["ab", ")a", ")b", ")a", ")a"]}
    episode = probe.Episode(
        sample=4, right=True, shots=2, depth=1, tokens=(")", "a"), rank={"stream": states["rank"]},
        probability={"stream": [[0.1, 0.2]] * 5}, top={"stream": [list(top) for top in states["top"]]},
    )  # fmt: skip
    assert episode.first_from("stream") == 3
    assert episode.flips("stream") == 4
    capture = Capture(folder / "dyck")
    answers = probe.Answers([], (episode,), "")
    frame = probe.episode_frame(answers, capture, "stream", right=True)
    assert frame.loc[0, ["sample", "answer", "stands after", "flips"]].tolist() == [5, ")a", "layer 3, visit 1", 4]
    assert len(probe.episode_frame(answers, capture, "stream", right=False)) == 0
    (drawn,) = probe.episode_figure(episode, capture, "stream").data
    assert [list(row) for row in drawn.text] == [["a", ")", ")", ")", ")"], ["b", "a", "b", "a", "a"]]
    never = replace(episode, rank={"stream": [[2, 2]] * 5})
    assert probe.episode_frame(probe.Answers([], (never,), ""), capture, "stream", right=True)["stands after"][0] == (
        "never"
    )


def test_the_command_names_the_checkpoint_and_the_loop(folder: Path) -> None:
    line = "python -m probes.answer_lens --ckpt tiny --capture"
    assert probe.command_for(Capture(folder / "dyck")) == f"{line} {folder / 'dyck'}"
    loop = "--loop 2-3 --visits 2 --loop-scale 0.5"
    assert probe.command_for(Capture(folder / "text")) == f"{line} {folder / 'text'} {loop}"


def test_another_network_and_a_capture_without_episodes_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"--ckpt must be the network that .*dyck was recorded from; got .*other"):
        probe.measure(probe.Options(ckpt=folder / "other", capture=folder / "dyck"))
    with pytest.raises(UserError, match=r"a capture must hold Dyck episodes; got .*text"):
        probe.measure(probe.Options(ckpt=folder / "tiny", capture=folder / "text"))
    with pytest.raises(UserError, match="lenses must be one or more different values; got coda coda"):
        probe.Options(ckpt=folder, capture=folder, lenses=("coda", "coda"))


@pytest.mark.parametrize("change", ["{", "[]", "digest", "tokens"])
def test_what_was_not_written_of_this_capture_is_told(folder: Path, tmp_path: Path, change: str) -> None:
    capture = Capture(folder / "dyck")
    path = capture.path / "results" / probe.FILE
    kept = path.read_text()
    said = json.loads(kept)
    if change == "digest":
        said["networks"][0]["digest"] = "0"
    elif change == "tokens":
        said["episodes"][0]["rank"]["stream"][2].pop()
    path.write_text(json.dumps(said) if change in ("digest", "tokens") else change)
    try:
        with pytest.raises(UserError, match=r"answer_lens.json must be what probes.answer_lens wrote of this capture;"):
            probe.read_answers(capture)
    finally:
        path.write_text(kept)
