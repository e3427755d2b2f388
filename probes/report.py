"""Results as people and programs read them: networks side by side, a terminal table, CSV, JSON, written atomically."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from probes.contract import NULL_PREFIX, Cell, Level, Row
from smelt_interp.errors import UserError

RANK: dict[Level, int] = {"headline": 0, "layer": 1, "split": 1, "head": 2}
"""A table of one level shows the rows of every level up to its rank."""
OTHER_PREFIX = "in_"
"""Before the name of another network, in the columns that hold what that network has for the same row."""
NEEDS_TWO_VISITS = "needs two visits"
_NOT_KEYS = {"level", "value", "low", "high", "n", "note"}


LONGEST_NOTE = 15
"""Characters of a note that stands in its row of a table; a longer one stands below, under a number."""
NEARLY_NOTHING = 1e-6
"""Below this a table says ~0."""

# Side by side


def keys_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The columns that say what a row is about, in order of first appearance."""
    return _columns(rows, lambda name: name not in _NOT_KEYS and not name.startswith((NULL_PREFIX, OTHER_PREFIX)))


def nulls_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The columns of nulls, in order of first appearance."""
    return _columns(rows, lambda name: name.startswith(NULL_PREFIX))


def _columns(rows: Sequence[Row], keep: Callable[[str], bool]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in row if keep(name)))


def _key(row: Row, names: Sequence[str], visit: Cell) -> tuple[Cell, ...]:
    # The headline averages over the looped layers of a network, whatever their numbers are in that network.
    ignored = {"layers"} if row["level"] == "headline" else set()
    return tuple(visit if name == "visit" else row.get(name) for name in ("level", *names) if name not in ignored)


def beside(rows: Sequence[Row], other: Sequence[Row], name: str, *, once: bool) -> list[Row]:
    """The rows with three more columns, in_NAME, in_NAME_low and in_NAME_high: the other network's for the same row.

    `once`: the other network visits each layer once, so its first visit stands beside every visit of this one, and
    what compares two visits is marked as needing two.
    """
    names = keys_of(rows)
    theirs = {_key(row, names, row.get("visit")): row for row in other}
    joined: list[Row] = []
    for row in rows:
        visit = row.get("visit")
        match = theirs.get(_key(row, names, 1 if once and isinstance(visit, int) else visit))
        value, low, high = (match["value"], match["low"], match["high"]) if match else (None, None, None)
        if once and isinstance(visit, str) and value is None:
            value = NEEDS_TWO_VISITS
        column = OTHER_PREFIX + name
        joined.append({**row, column: value, f"{column}_low": low, f"{column}_high": high})
    return joined


# Rendering


def table(rows: Sequence[Row], title: str, others: Sequence[str], level: Level) -> Table:
    """A terminal table of the rows up to `level`: value with its interval, nulls, other networks (their intervals are
    in CSV and JSON), n, notes. What is the same in every row stands in the title, long words below the table."""
    shown = [row for row in rows if RANK[_level(row)] <= RANK[level]]
    places = (*keys_of(shown), "n")
    values = {name: {row.get(name) for row in shown} - {None} for name in places}
    varying = [name for name in places if len(values[name]) > 1]
    varying += [name for name in places[:-1] if len(values[name]) == 1 and any(row.get(name) is None for row in shown)]
    varying.sort(key=places.index)
    facts = ", ".join(
        f"{name} {_text(next(iter(values[name])))}" for name in places if values[name] and name not in varying
    )
    names = {OTHER_PREFIX + name: name for name in others}
    nulls = {name: f"null: {name.removeprefix(NULL_PREFIX).replace('_', ' ')}" for name in nulls_of(shown)}
    long = [
        str(row.get(name)) for row in shown for name in ("note", *names) if len(_text(row.get(name))) > LONGEST_NOTE
    ]
    marks = {words: f"({number})" for number, words in enumerate(dict.fromkeys(long), start=1)}
    drawn = Table(
        title=escape(f"{title}; {facts}" if facts else title),
        caption=escape("\n".join(f"{mark} {words}" for words, mark in marks.items())),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in varying:
        drawn.add_column(name, justify="right" if name == "n" else "left", no_wrap=name == "quantity")
    drawn.add_column("value [95%]", justify="right", no_wrap=True)
    for name in (*nulls.values(), *names.values()):
        drawn.add_column(name, justify="right", overflow="fold", min_width=max(map(len, name.split(" "))))
    drawn.add_column("")
    for row in shown:
        interval = "" if row["low"] is None else f" [{_text(row['low'])}, {_text(row['high'])}]"
        cells = [row.get(name) for name in (*varying, *nulls, *names, "note")]
        written = [marks.get(str(cell), _text(cell)) for cell in cells]
        drawn.add_row(*written[: len(varying)], _text(row["value"]) + interval, *written[len(varying) :])
    return drawn


def print_tables(tables: Iterable[Table], lines: Iterable[str]) -> None:
    """Print tables, then lines, to the terminal; to a pipe at full width, so that nothing is cut."""
    console = Console(highlight=False) if Console().is_terminal else Console(width=200)
    for drawn in tables:
        console.print(drawn)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _level(row: Row) -> Level:
    return next(level for level in RANK if level == row["level"])


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if cell == 0 or abs(cell) >= NEARLY_NOTHING else "~0"
    return str(cell)


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV, one column for every name that occurs; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def json_text(document: object) -> str:
    """Strict JSON (no NaN), indented."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


# Files


def check_folder(folder: Path) -> None:
    """Raise UserError unless the folder is there, or can be made, and can be written to. Nothing is made."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = "no writable folder" if nearest.is_dir() else "a file"
        raise UserError(f"the output folder must be writable; got {folder} ({nearest} is {what})")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is complete whenever it is seen. Raises UserError when its folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UserError(f"the output folder must be writable; got {path.parent} ({error.strerror})") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
