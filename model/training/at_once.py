"""Members that train at the same time: each a process of its own that runs `model.training.train`, so many at once.

On `cuda` each place has a GPU of its own. What a member says last is its line; one that fails leaves the others alone.
Whatever ends this process ends all, and each goes on from its newest state at the next call: they are stopped when an
exception passes, Ctrl-C too, and when this process is killed they end as they next say how far they are, to nobody.
"""

import errno
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO

import torch

from model.training.options import TRAIN, TrainOptions
from smelt_interp.errors import EXIT_USER, UserError, one_line

SHARED = "cuda"
"""The device that stands for all GPUs; `cuda:0` is one of them, which members then share."""
ERROR = "error: "


@dataclass(slots=True, kw_only=True)
class _Running:
    """A member's process."""

    name: str
    device: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    last: str = "starts"
    """Its last whole line."""
    begun: bytes = b""
    """The line after it, as far as it came."""

    def read(self) -> list[str] | None:
        """The lines that came since; None at the end."""
        data = os.read(self.errors.fileno(), 1 << 16)
        *whole, self.begun = ((self.begun + data) if data else self.begun + b"\n").split(b"\n")
        lines = [one_line(line.decode("utf-8", "replace")) for line in whole if line.strip()]
        self.last = lines[-1] if lines else self.last
        return lines if data or lines else None


@dataclass(slots=True)
class _Screen:
    """On a terminal a line of each that runs, written anew, below what has ended; elsewhere every line that is said."""

    lines: int = 0
    terminal: bool = field(default_factory=lambda: sys.stderr.isatty())

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"{self._up()}{text}", file=sys.stderr, flush=True)

    def said(self, name: str, lines: Sequence[str]) -> None:
        """What one said since; an error is said once it has ended."""
        for line in lines:
            if not (self.terminal or line.startswith(ERROR)):
                self.say(f"{name}: {line}")

    def show(self, running: Iterable[_Running]) -> None:
        """The lines of those that run."""
        if not self.terminal:
            return
        columns, rows = shutil.get_terminal_size()
        lines = [f"{each.name}: {each.last}"[: columns - 1] for each in running][: rows - 2]
        print(self._up() + "".join(f"{line}\n" for line in lines), end="", file=sys.stderr, flush=True)
        self.lines = len(lines)

    def _up(self) -> str:
        """To the first line of those that run, which are cleared."""
        up, self.lines = f"\x1b[{self.lines}A\x1b[J" if self.lines else "", 0
        return up


def train_at_once(runs: Mapping[str, TrainOptions], at_once: int) -> None:
    """Train, or go on with, each run in a process of its own.

    Raises `UserError` for too few GPUs before any starts, and when some have failed, once the others have ended;
    `OSError` when it was no mistake of the user's that one failed of: a full disk, memory, another program.
    """
    waiting, failed, codes, screen = list(runs), list[str](), set[int](), _Screen()
    free = _devices(next(iter(runs.values())).device, at_once)
    with _stopped_at_the_end() as running, selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and free:
                name = waiting.pop(0)
                each = running[name] = _start(name, runs[name], free.pop(0))
                selector.register(each.errors, selectors.EVENT_READ, each)
            screen.show(running.values())
            for key, _ in selector.select():
                each = key.data
                lines = each.read()
                if lines is not None:
                    screen.said(each.name, lines)
                    continue
                # Its error stream is closed, so it has ended: its place is free for the next.
                selector.unregister(each.errors)
                if why := _ended(running.pop(each.name)):
                    failed.append(each.name)
                    codes.add(each.process.returncode)
                screen.say(f"{each.name} failed: {why}" if why else f"{each.name}: done")
                free.append(each.device)
    if failed:
        rest = f"the other {len(runs) - len(failed)} are trained"
        said = f"every member must train; {', '.join(failed)} failed, {rest}: see above, and type it again"
        folder = next(iter(runs.values())).out.parent
        raise UserError(said) if codes == {EXIT_USER} else OSError(errno.EIO, said, str(folder))


def _ended(member: _Running) -> str | None:
    """Why a member failed; None when it did not."""
    code = member.process.wait()
    member.errors.close()
    return None if code == 0 else signal.strsignal(-code) if code < 0 else member.last.removeprefix(ERROR)


def _devices(device: str, at_once: int) -> list[str]:
    """The place of each that runs at the same time."""
    if device != SHARED:
        return [device] * at_once
    if (have := torch.cuda.device_count()) < at_once:
        rule = f"--at-once must be at most the {have} GPUs of this machine; got {at_once}"
        raise UserError(f"{rule}: {'members share one with --device cuda:0' if have else 'choose --device cpu'}")
    return [f"{SHARED}:{number}" for number in range(at_once)]


def _start(name: str, options: TrainOptions, device: str) -> _Running:
    """The command, as a user would type it in this folder; what it prints is in its metrics too."""
    line = [sys.executable, "-m", TRAIN, *replace(options, device=device).arguments(options.out)]
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    return _Running(name=name, device=device, process=process, errors=process.stderr)


@contextmanager
def _stopped_at_the_end() -> Iterator[dict[str, _Running]]:
    """The processes by name; those that still run when it ends are stopped, and waited for."""
    running = dict[str, _Running]()
    try:
        yield running
    finally:
        for each in running.values():
            each.process.terminate()
        for each in running.values():
            each.process.wait()
            each.errors.close()
