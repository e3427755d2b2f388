"""Members at once: each a process with a place of its own; what one does leaves the others alone."""

import fcntl
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.training import members
from model.training.at_once import train_at_once
from model.training.members import MemberOptions, train_members
from model.training.options import TrainOptions
from smelt_interp.data.mixture import MixtureOptions
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from tests.support.forked import Child

OPTIONS = TrainOptions(config="small.json", out=Path("run"))
MEMBER = """
import fcntl, os, sys, time
out, device = (sys.argv[sys.argv.index(name) + 1] if name in sys.argv else "cpu" for name in ("--out", "--device"))
file = open(out, "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(device, file=file, flush=True)
waits = "waits" in out or "ends" in out
while waits:
    print(f"trained: 1/2, 1 tokens/s, {out}", file=sys.stderr, flush=True)
    time.sleep(0.02)
    waits = "waits" in out or not os.path.exists("fails")
if "fails" in out:
    print("error: training must stay finite", file=sys.stderr)
    sys.exit(1 if "disk" in out else 2)
"""


@pytest.fixture(autouse=True)
def _quick_members(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command is a script that does as its folder's name says; of what torch would do it does nothing."""
    monkeypatch.chdir(tmp_path)
    Path("model/training").mkdir(parents=True)
    for name, text in (("__init__", ""), ("training/__init__", ""), ("training/train", MEMBER)):
        Path(f"model/{name}.py").write_text(text)


def runs(*names: str, device: str = "cpu") -> dict[str, TrainOptions]:
    return {name: replace(OPTIONS, out=Path(name), device=device) for name in names}


def test_a_process_is_given_what_the_run_is():
    mixture = MixtureOptions(context=16, text=("a text", "b"), source="excerpts")
    options = replace(OPTIONS, out=Path("a run"), mixture=mixture, learning_rate=1e-3, optimizer="muon", seed=3)
    for asked in (options, replace(OPTIONS, config="", preset="demo-smelt", branch_from="x", horizons=(3, 4))):
        assert parse(TrainOptions, prog="", description="", args=asked.arguments(asked.out)) == asked
    assert options.command().endswith("--mixture.text 'a text' b --mixture.source excerpts")


def test_a_member_that_fails_is_named_and_the_others_end_each_on_a_gpu_of_its_own(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="every member must train; fails failed, the other 2 are trained: see above"):
        train_at_once(runs("ends", "fails", "last", device="cuda"), 2)
    ends, fails, last = (Path(name).read_text().strip() for name in ("ends", "fails", "last"))
    assert (ends, fails) == ("cuda:0", "cuda:1")
    assert last in (ends, fails)
    said = capfd.readouterr().err
    assert re.search(r"^ends: trained: 1/2, 1 tokens/s, ends$", said, re.MULTILINE)
    assert re.findall(r"^fails.*$", said, re.MULTILINE) == ["fails failed: training must stay finite"]
    assert sorted(re.findall(r"^(\w+): done$", said, re.MULTILINE)) == ["ends", "last"]
    with pytest.raises(UserError, match=r"--at-once must be at most the 2 GPUs of this machine; got 3: .* cuda:0"):
        train_at_once(runs("a", "b", "c", device="cuda"), 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"the 0 GPUs of this machine; got 2: choose --device cpu"):
        train_at_once(runs("a", "b", device="cuda"), 2)
    assert not Path("a").exists()


def test_a_member_that_no_mistake_of_the_users_ended_is_no_error_of_the_users():
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train_at_once(runs("fails", "fails, disk"), 2))
    assert ended.value.code == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_what_ends_the_parent_ends_every_member(number, code):
    parent = Child(lambda: run_command(lambda: train_at_once(runs("waits", "waits too"), 2)))
    started = [Path(name) for name in ("waits", "waits too")]
    _until(lambda: all(path.exists() and path.read_text() for path in started))
    parent.send(number)
    _until(lambda: not parent.running())
    _until(lambda: all(map(_is_free, started)))
    ended, said = parent.wait()
    assert ended == code
    assert said.endswith("interrupted\n") == (code == 130)


def test_ranks_train_one_member_together(monkeypatch):
    monkeypatch.setattr(members, "num_ranks", lambda: 2)
    with pytest.raises(UserError, match=r"--at-once must be 1 under torchrun, .*; got 3"):
        train_members([], MemberOptions(baseline="demo", out=Path("out"), at_once=3))


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock of a run any more."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it took too long")
