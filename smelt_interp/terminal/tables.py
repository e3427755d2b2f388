"""What a command prints: a table for people, JSON for programs, one line of progress on the error stream."""

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as PrintedTable

WIDTH_WITHOUT_TERMINAL = 150

Cell = str | int | float


class Table(NamedTuple):
    """What a command prints for people, and a page shows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def texts(self) -> dict[str, list[str]]:
        """Each column's cells as they are printed; a column without a header is named by a space."""
        return {column or " ": [_text(row[index]) for row in self.rows] for index, column in enumerate(self.columns)}


def json_text(value: object) -> str:
    """Plain values as indented JSON; a number without a finite value raises, since JSON has none."""
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: object) -> None:
    """Print what `json_text` gives."""
    print(json_text(value))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], notes: Sequence[str] = ()) -> None:
    """Print rows under a title, numbers to the right, then one line a note."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    table = PrintedTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) or row[index] == "" for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table, markup=False)
    for note in notes:
        console.print(note, markup=False)


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else compact(cell)


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) or re.fullmatch(r"[+-]?[\d.]+(e[+-]\d+)?[A-Za-z%]?", cell) is not None


def compact(value: float, digits: int = 6) -> str:
    """A number as a person reads it, to so many significant digits: 141.953M, 0.0312, 12."""
    if isinstance(value, int) and abs(value) < 100_000:
        return str(value)
    if abs(value) >= 1e18:
        return f"{value:.{digits}g}"
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def percent(fraction: float) -> str:
    """A signed fraction in percent with two decimals."""
    return f"{100 * fraction:+.2f}%"


SECONDS_BETWEEN_LINES = 30


class Progress:
    """One line on the error stream: what, how many, seconds left. It is rewritten on a terminal; elsewhere, as in a
    log, a new one is written every 30 seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._start = self._said = time.monotonic()

    def show(self, done: int) -> None:
        """Say how many of the total are done; the last call ends the line."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not terminal and now - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = now
        left = (now - self._start) / max(done, 1) * (self._total - done)
        begin, end = ("\r", "" if done < self._total else "\n") if terminal else ("", "\n")
        print(f"{begin}{self._what}: {done}/{self._total}, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)
