"""What is no request, no folder and no batch of a recording is refused in one line, and what was recorded stays."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.batch import Batch
from cache.manifest import REQUEST
from cache.recording import abandon, write_capture
from cache.store import Capture, is_unfinished
from smelt_interp.errors import UserError
from tests.support.planted import split_batch
from tests.support.planted_captures import random_batch, shard_paths
from tests.support.recordings import NUM_SAMPLES, SHARD_SAMPLES, add, record, recording_of, shard_bytes


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(NUM_SAMPLES)


def test_shards_of_another_request_are_refused(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a"
    add(recording_of(out, batch, seed=0, threads=1), batch, slice(1))
    before = shard_bytes(out)
    match = r"shards to go on with must be of the same request; .*/a differs in seed: remove it or choose another"
    with pytest.raises(UserError, match=match):
        recording_of(out, batch, seed=1, threads=1)
    (out / REQUEST).unlink()
    with pytest.raises(UserError, match=r"must hold the shards of one recording; got no request.json in it"):
        recording_of(out, batch, seed=0, threads=1)
    assert shard_bytes(out) == before


def test_a_shard_of_another_request_among_ours(tmp_path: Path, batch: Batch) -> None:
    out, other = tmp_path / "a", tmp_path / "b"
    add(recording_of(out, batch), batch, slice(1))
    add(recording_of(other, batch, seed=1), batch, slice(1, 2))
    stranger = shard_paths(other)[0].rename(out / shard_paths(other)[0].name)
    match = rf"shards to go on with must be of the same request; got {re.escape(str(stranger))}: remove it"
    with pytest.raises(UserError, match=match):
        recording_of(out, batch)
    stranger = stranger.rename(out / "000026-000027.h5")
    with pytest.raises(UserError, match=rf"a shard must be one of its request; got {re.escape(str(stranger))}: remove"):
        recording_of(out, batch)


@pytest.mark.parametrize("text", ["[]", "null", "3", "{", '{"digest":"x","request":3}', "[" * 100_000, "{}"])
def test_a_request_that_is_none(tmp_path: Path, batch: Batch, text: str) -> None:
    out = tmp_path / "a"
    add(recording_of(out, batch), batch, slice(1))
    (out / REQUEST).write_text(text)
    with pytest.raises(UserError, match=r"request must hold .*request.json|request.json must hold the request of"):
        recording_of(out, batch)
    with pytest.raises(UserError, match=r"with 1 finished shards: run the command that records it again$"):
        Capture(out)


@pytest.mark.parametrize("command", [3, "two\nlines", None, "\x1b[2J"])
def test_a_command_in_a_request_that_is_no_line(tmp_path: Path, batch: Batch, command: object) -> None:
    recording_of(tmp_path / "a", batch)
    (tmp_path / "a" / REQUEST).write_text(json.dumps({"command": command}))
    with pytest.raises(UserError, match=r"0 finished shards: run the command that records it again$"):
        Capture(tmp_path / "a")


def test_folders_that_are_no_place_for_a_capture(tmp_path: Path, batch: Batch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    (tmp_path / "old.h5").write_bytes(b"\x89HDF")
    for name, match in (
        ("file/a", r"the output folder must be writable; got .*file/a: Not a directory"),
        ("old.h5", r"the output folder must be writable; got .*old.h5: File exists"),
        ("full", r"a capture must have a folder of its own; got .*full, which holds notes.txt"),
    ):
        with pytest.raises(UserError, match=match):
            record(tmp_path / name, batch)
    with pytest.raises(UserError, match=r"the output folder must be writable; got /proc/none/a: No such file"):
        record(Path("/proc/none/a"), batch)
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "old.h5"]


def test_a_recording_without_any_shard_leaves_no_folder(tmp_path: Path, batch: Batch) -> None:
    recording_of(tmp_path / "a", batch)
    assert is_unfinished(tmp_path / "a")
    abandon(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    recording = recording_of(tmp_path / "a", batch)
    add(recording, batch, slice(1))
    abandon(tmp_path / "a")
    assert is_unfinished(tmp_path / "a")


def test_batches_that_do_not_belong(tmp_path: Path, batch: Batch) -> None:
    recording = recording_of(tmp_path / "a", batch)
    first, second = list(split_batch(batch, SHARD_SAMPLES))[:2]
    some = {key: values for key, values in first.sites.items() if key != (3, "attn.hook_k")}
    infinite = {**first.sites, (1, "hook_resid_post"): first.sites[1, "hook_resid_post"] * np.float32(np.inf)}
    for wrong, match in (
        (replace(first, sample_ids=np.array([2, 0])), r"a batch must hold the next samples of its shard; got \[2, 0\]"),
        (second, r"a batch must hold the next samples of its shard; got \[2, 3\]"),
        (replace(first, sites=some), r"a batch must hold every site of its capture; missing attn.hook_k of step 3"),
        (
            replace(first, heads={**first.heads, "attn.hook_k": (0,)}),
            r"attn.hook_k must have shape \(2, 12, 2, 6\) for heads \[0, 1\]; got",
        ),
        (replace(first, sites=infinite), r"values of hook_resid_post must be finite; got -?inf"),
        (replace(first, logprob_BT=first.logprob_BT * np.nan), r"values of logprob must be finite; got nan"),
    ):
        with pytest.raises(UserError, match=match):
            recording.add(range(SHARD_SAMPLES), [wrong])
    with pytest.raises(UserError, match="a shard must have all its 2 samples; got 0"):
        recording.add(range(SHARD_SAMPLES), [])
    assert shard_bytes(tmp_path / "a") == {}


def test_batches_of_different_types(tmp_path: Path, batch: Batch) -> None:
    first, *rest = split_batch(batch, SHARD_SAMPLES)
    bfloat16 = replace(first, bfloat16=frozenset({"hook_resid_post"}))
    with pytest.raises(UserError, match=r"hook_resid_post must have the type uint16; got float16"):
        write_capture(tmp_path / "a", [bfloat16, *rest])


def test_batches_of_nothing_are_no_capture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batches to write must be at least one; got 0"):
        write_capture(tmp_path / "a", [])
