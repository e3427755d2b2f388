"""A recording that runs beside a long-lived program: started with the command's own words, watched, and its last line
told when it fails."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from smelt_interp.errors import UserError, one_line

LONGEST_TAIL = 4000
"""Bytes of the error stream that are looked at."""


class Background:
    """One `python -m cache.record` in a process of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115  # as long as the process is watched
        command = [sys.executable, "-m", "cache.record", *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True
        )

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def last_line(self) -> str:
        """What it said last on its error stream."""
        # Without moving the place in the file: the process writes where this one's is.
        file = self._errors.fileno()
        tail = os.pread(file, LONGEST_TAIL, max(0, os.fstat(file).st_size - LONGEST_TAIL))
        lines = tail.decode(errors="replace").replace("\r", "\n").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return one_line(said[-1]) if said else ""

    def close(self) -> None:
        """Let go of what it said."""
        self._errors.close()


RUNNING: dict[Path, Background] = {}
"""By folder, those that this program started and has not told the end of."""


def start(out: Path, words: Sequence[str]) -> None:
    """Record into a new folder. Raises UserError for one that is there, or is being recorded by this program."""
    if out.exists() or out in RUNNING:
        raise UserError(f"a capture to record must have a new name; got {out}, which is there: choose another")
    RUNNING[out] = Background([*words, "--out", str(out)])


def end(out: Path) -> str:
    """Forget one that has ended: what it said last where it failed, nothing where it is recorded, or where another
    visitor's page was first."""
    ended = RUNNING.pop(out, None)
    if ended is None:
        return ""
    said = ended.last_line() if ended.code else ""
    ended.close()
    return said
