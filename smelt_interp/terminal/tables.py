"""What a command prints: a table for people, JSON for programs."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from rich.cells import cell_len

WIDTH_WITHOUT_TERMINAL = 150
LONGEST_WHOLE = 30
"""Columns of cells no longer than this are not broken over lines where there is no terminal; longer ones are prose."""
MISSING = "-"

Cell = str | int | float | None
"""None, and NaN, are cells without a value."""


class Table(NamedTuple):
    """What a command prints for people, and a page shows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    @classmethod
    def side_by_side(cls, title: str, columns: Mapping[str, Mapping[str, Cell]], notes: Sequence[str] = ()) -> Self:
        """One line a figure, one column a network; the ratio of two in a last column."""
        rows: list[list[Cell]] = []
        for label in next(iter(columns.values())):
            cells = [each[label] for each in columns.values()]
            rows.append([label, *cells, *([_ratio(*cells)] if len(cells) == 2 else [])])
        return cls(title, ["", *columns, *(["ratio"] if len(columns) == 2 else [])], rows, notes)

    def texts(self) -> dict[str, list[str]]:
        """Each column's cells as they are printed; a column without a header is named by a space."""
        return {
            column or " ": [cell_text(row[index]) for row in self.rows] for index, column in enumerate(self.columns)
        }


def json_text(value: object) -> str:
    """Plain values as indented JSON; a number without a finite value raises, since JSON has none."""
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: object) -> None:
    """Print what `json_text` gives."""
    print(json_text(value))


def print_table(table: Table) -> None:
    """Print rows under a title, numbers to the right, then one line a note; to a pipe as wide as short cells need."""
    # Pages make tables and print none.
    from rich.console import Console
    from rich.table import Table as PrintedTable

    console = Console(highlight=False)
    drawn, width = PrintedTable(box=None, pad_edge=False, header_style="bold"), 0
    for name, texts in zip(table.columns, table.texts().values(), strict=True):
        numeric = all(text in ("", MISSING) or _is_number(text) for text in texts)
        longest = max(map(cell_len, (name, *texts)))
        whole = longest <= LONGEST_WHOLE and not console.is_terminal
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
        width += 2 + min(longest, LONGEST_WHOLE)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(WIDTH_WITHOUT_TERMINAL, width))
    for row in table.rows:
        drawn.add_row(*map(cell_text, row))
    console.print(table.title, style="bold", markup=False, soft_wrap=True)
    console.print(drawn, markup=False)
    for note in table.notes:
        console.print(note, markup=False, soft_wrap=True)


def cell_text(cell: Cell) -> str:
    """A cell as it is printed."""
    if cell is None or cell != cell:
        return MISSING
    return cell if isinstance(cell, str) else compact(cell)


def _ratio(first: Cell, second: Cell) -> str:
    if isinstance(first, int | float) and isinstance(second, int | float) and second:
        return f"{first / second:.4f}"
    return ""


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(inf|[\d.]+(e[+-]?\d+)?[A-Za-z%]?)", text) is not None


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
