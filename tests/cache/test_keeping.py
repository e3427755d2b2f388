"""Captures that are pinned, deleted, held against each other, and what one takes before it is recorded."""

import time
from pathlib import Path

import pytest

from cache import background, keeping
from cache.store import Capture
from smelt_interp.errors import UserError
from tests.support.planted import BASELINE, LOOPED, planted_batch, random_sites
from tests.support.planted_captures import planted_capture, random_batch


def test_the_size_is_that_of_every_step_and_head() -> None:
    looped = LOOPED.architecture()
    alone = keeping.recorded_bytes(looped, (), 3, 10)
    pattern = keeping.recorded_bytes(looped, ("attn.hook_pattern",), 3, 10)
    assert pattern - alone == 3 * 6 * 4 * 10 * 10 * 2  # samples, steps, heads, queries, keys, float16
    wide = keeping.recorded_bytes(looped, ("attn.hook_pattern",), 3, 10, "float32")
    assert wide - alone == 2 * (pattern - alone)
    assert keeping.recorded_bytes(looped, ("no site of it",), 3, 10) == alone
    assert keeping.recorded_bytes(BASELINE.architecture(), ("hook_resid_pre",), 1, 10) - alone // 3 == 4 * 10 * 8 * 2


def test_two_captures_differ_in_what_fixes_their_numbers(tmp_path: Path) -> None:
    one = planted_capture(tmp_path / "one", random_batch())
    other = planted_capture(tmp_path / "other", random_batch(6, suffixes=("hook_resid_post", "attn.hook_q")))
    found = {what: (left, right) for what, left, right in keeping.differences(one, other)}
    assert found["samples.number"] == ("7", "6")
    assert found["attn.hook_q"] == ("-", "6 steps, 4 heads")
    assert found["attn.hook_k"] == ("6 steps, 2 heads", "-")
    assert not {"width", "hook_resid_post"} & set(found)
    once = planted_batch(BASELINE, one.samples, random_sites(BASELINE, one.samples, ("hook_resid_post",)))
    found = {what: values for what, *values in keeping.differences(one, planted_capture(tmp_path / "once", once))}
    assert found["steps"] == ["1 2 3 2 3 4", "1 2 3 4"]
    assert keeping.differences(one, planted_capture(tmp_path / "same", random_batch())) == []


def test_a_capture_is_deleted_with_its_results_unless_something_speaks_against_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    planted_capture(folder, random_batch())
    (folder / "results").mkdir()
    (folder / "results" / "a.json").write_text("{}")
    keeping.pin(folder, True)
    assert keeping.is_pinned(folder)
    with pytest.raises(UserError, match=r"must not be pinned; got .*run: unpin it first"):
        keeping.delete(folder)
    keeping.pin(folder, False)
    keeping.pin(folder, False)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"must hold nothing else; got .*run with notes.txt: move that first"):
        keeping.delete(folder)
    (folder / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UserError, match=r"must be a folder of its own; got .*link, a link"):
        keeping.delete(tmp_path / "link")
    assert len(Capture(folder)) == 7
    keeping.delete(folder)
    assert not folder.exists()
    with pytest.raises(UserError, match=r"a capture must be a folder with a manifest\.json"):
        keeping.delete(folder)


def test_a_recording_that_fails_says_its_last_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    background.start(out, ["--ckpt", str(tmp_path / "gone"), "--samples", "0"])
    with pytest.raises(UserError, match=r"must have a new name; got .*out, which is there"):
        background.start(out, [])
    while background.RUNNING[out].code is None:
        time.sleep(0.05)
    assert background.RUNNING[out].code == 2
    assert background.end(out) == "error: samples must be at least 1; got 0"
    assert (out.exists(), background.RUNNING) == (False, {})
