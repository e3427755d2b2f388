"""Whatever ends a writer, at whichever call to the system, a file is there whole, or as it was, or not at all.

The injection is Python's audit hook, in a child: it is told of every file that is opened, renamed or removed.
"""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from model.network import LoopedMoE
from smelt_interp.errors import run_command
from smelt_interp.terminal.output_files import write_whole
from tests.campaigns.campaign import Case, check_line, pick
from tests.support.forked import Child
from tests.support.networks import tiny_network

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")
ENDS = ("a full disk", "a failing disk", "Ctrl-C", "a kill")
FIRST, SECOND = b"first " * 1000, b"second " * 5000


def campaign(folder: Path) -> Case:
    """A file that is replaced, and a checkpoint that is written."""
    network, target = tiny_network(), folder / "target"

    def replace_file() -> None:
        write_whole(target / "file", SECOND)

    def write_checkpoint() -> None:
        network.save_pretrained(target / "checkpoint", readme="# Tiny\n")

    def case(random: np.random.Generator) -> str:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        write_whole(target / "file", FIRST)
        what, work = pick(random, (("file", replace_file), ("checkpoint", write_checkpoint)))
        end, call = pick(random, ENDS), int(random.integers(1, 25))
        code, errors = Child(lambda: run_command(lambda: stopped(work, target, call, end))).wait()
        check_end(code, errors, end)
        check_files(target, network)
        if code != -signal.SIGKILL:  # a writer that could clear up has done so
            left = [path.name for path in target.iterdir() if path.name not in ("file", "checkpoint")]
            assert left == [], f"{end} at call {call} of the {what}: {left} stay"
        if not (target / "checkpoint").exists():
            write_checkpoint()  # what is left does not stand in the way
        replace_file()
        check_files(target, network)
        return f"{what}: {end if code else 'done'}"

    return case


def stopped(work: Callable[[], None], folder: Path, call: int, end: str) -> None:
    """Do the work, and end it at that call about something in the folder."""
    left = call

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        left -= 1
        if left == 0:
            if end == "a kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "Ctrl-C":
                raise KeyboardInterrupt
            number = errno.ENOSPC if end == "a full disk" else errno.EIO
            raise OSError(number, os.strerror(number), str(arguments[0]))

    sys.addaudithook(audit)
    work()
    left = -1


def check_end(code: int, errors: str, end: str) -> None:
    if code == 0:
        return
    assert code in {"Ctrl-C": (130,), "a kill": (-signal.SIGKILL,)}.get(end, (1, 2)), f"{end}: exit {code}: {errors}"
    if code > 0:
        line = errors.removesuffix("\n").removeprefix("error: ")
        check_line(line)


def check_files(target: Path, network: LoopedMoE) -> None:
    assert (target / "file").read_bytes() in (FIRST, SECOND)
    if (target / "checkpoint").exists():
        read = LoopedMoE.from_pretrained(target / "checkpoint").state_dict()
        assert all(torch.equal(read[name], weight) for name, weight in network.state_dict().items())
