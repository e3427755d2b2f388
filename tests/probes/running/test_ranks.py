"""Recording and probes over ranks: the same shards, and the same answers, whichever rank had which samples."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cache import record
from model import ranks
from probes import ablation, expert_overlap
from tests.support.networks import tiny_network
from tests.support.ranked import under_ranks

SAMPLES = "--data dyck backcopy --shots 0 --samples 5 --length 32"
"""Two sets, so that of four ranks some have a sample of each and others two."""
LINES = {
    "capture": (record.main, f"record --ckpt ../tiny --out capture --batch-size 2 {SAMPLES}"),
    "read": (expert_overlap.main, "probe --capture capture --batch-size 2 --json"),
    "run": (ablation.main, f"probe --ckpt ../tiny --sites hook_mlp_out --no-untrained --json {SAMPLES}"),
}


@ranks.joined()
def measure(rank: int) -> None:
    """A capture, a probe of it, and a probe that runs the network, each as its command; what a rank prints is kept."""
    for name, (main, line) in LINES.items():
        sys.argv = line.split()
        with Path(f"{name}-{rank}").open("w") as printed, redirect_stdout(printed):
            main()


def check_close(one: object, other: object, within: float) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_close(one[key], other[key], within)
    elif isinstance(one, list) and isinstance(other, list):
        for each, its in zip(one, other, strict=True):
            check_close(each, its, within)
    else:
        assert other == (pytest.approx(one, rel=0, abs=within) if isinstance(one, float) else one)


def test_captures_and_answers_are_those_of_one_rank(tmp_path, monkeypatch):
    """A probe that runs the network does so in batches of other shapes, whose float32 numbers differ in the last
    bits."""
    tiny_network().save_pretrained(tmp_path / "tiny", readme="# Tiny\n")
    monkeypatch.setattr(record, "MOST_BATCHES", 1)
    monkeypatch.setattr(sys, "argv", [])
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        monkeypatch.chdir(folder)
        if size == 1:
            measure(0)
        else:
            assert [code for code, _ in under_ranks(size, measure)] == [0] * size
        said = {path.name for path in folder.iterdir() if path.is_file() and path.stat().st_size}
        assert said == {"capture-0", "read-0", "run-0"}
    shards = [path.name for path in (tmp_path / "1/capture").iterdir() if path.is_file()]
    assert len(shards) == 6
    for size in ("2", "4"):
        for name in shards:
            one, other = ((tmp_path / each / "capture" / name).read_bytes() for each in ("1", size))
            assert one == other, name
        for name, within in (("read", 1e-12), ("run", 1e-6)):
            one, other = (json.loads((tmp_path / each / f"{name}-0").read_text()) for each in ("1", size))
            check_close(one, other, within)
