"""How far a long task is: one line on the error stream with the rate and the time left."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30
SECONDS_BETWEEN_REWRITES = 0.1
_LINE = "{desc}: {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left"


class Progress:
    """What, how many, how fast, time left. The line is rewritten on a terminal; elsewhere, as in a log, a new one is
    written every 30 seconds."""

    def __init__(self, what: str, total: int, unit: str = "", begun: int = 0) -> None:
        """`begun`: how many were done before, which the rate leaves out."""
        self._what = what
        self._total = total
        self._unit = unit
        self._begun = begun
        self._start = time.monotonic()
        self._said = -SECONDS_BETWEEN_REWRITES if sys.stderr.isatty() else 0.0

    def show(self, done: int) -> None:
        """Say how many of the total are done; the last call ends the line."""
        passed, terminal, last = time.monotonic() - self._start, sys.stderr.isatty(), done >= self._total
        between = SECONDS_BETWEEN_REWRITES if terminal else SECONDS_BETWEEN_LINES
        if passed - self._said < between and not (terminal and last):
            return
        self._said = passed
        line = tqdm.format_meter(
            done, self._total, passed, prefix=self._what, unit=self._unit, bar_format=_LINE, initial=self._begun
        )
        begin, end = ("\r", "\x1b[K\n" if last else "\x1b[K") if terminal else ("", "\n")
        print(f"{begin}{' '.join(line.split())}{end}", end="", file=sys.stderr, flush=True)
