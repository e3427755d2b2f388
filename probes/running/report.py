"""Results as people and programs read them: networks side by side, a terminal table, CSV, JSON, written atomically."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from probes.running.contract import NULL_PREFIX, RANK, Cell, Level, Row, rank
from smelt_interp.terminal.output_files import make_folder

OTHER_PREFIX = "in_"
"""Before the name of another network, in the columns that hold what that network has for the same row."""
NEEDS_TWO_VISITS = "needs two visits"
"""What stands there for a network without a second visit."""
_NOT_KEYS = {"level", "value", "low", "high", "n", "note"}


LONGEST_NOTE = 10
"""Characters of a note that stands in its row of a table; a longer one stands below, under a number."""
NEARLY_NOTHING = 1e-6
"""Below this a table says ~0."""
LARGE = 1000
"""From here to its square a table writes whole numbers."""
FULL_WIDTH = 400
"""Characters of a line that no table reaches."""

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


def short_names(first: str, others: Sequence[str]) -> dict[str, str]:
    """What a table calls the networks beside `first`: their names without the words that all names end with (the data
    set's), and without the name of `first` before a variant of it; in full where that would make two alike.

    "demo-smelt-dyck" beside "demo-baseline-dyck" and "demo-smelt-untrained-dyck": demo-baseline and untrained.
    """
    words = [name.split("-") for name in (first, *others)]
    most = min(map(len, words)) - 1
    shared = next(n for n in range(most, -1, -1) if len({tuple(each[len(each) - n :]) for each in words}) == 1)
    own, *rest = ("-".join(each[: len(each) - shared]) for each in words)
    short = [name.removeprefix(f"{own}-") for name in rest]
    return dict(zip(others, short if len({own, *short}) == len(words) else others, strict=True))


def table(rows: Sequence[Row], title: str, others: Mapping[str, str], level: Level) -> Table:
    """A terminal table of the rows up to `level`: value with its interval, nulls, other networks (their intervals are
    in CSV and JSON), n, notes. What is the same in every row stands in the title, long words below the table.

    `others`: the name of each other network, and what its column is called.
    """
    shown = [row for row in rows if rank(row) <= RANK[level]]
    places = (*keys_of(shown), "n")
    values = {name: {row.get(name) for row in shown} - {None} for name in places}
    varying = [
        name
        for name in places
        if len(values[name]) > 1 or (values[name] and name != "n" and any(row.get(name) is None for row in shown))
    ]
    facts = ", ".join(
        f"{name} {_text(next(iter(values[name])))}" for name in places if values[name] and name not in varying
    )
    below, compared = _beside_columns(shown, others)
    nulls = {name: f"null: {name.removeprefix(NULL_PREFIX).replace('_', ' ')}" for name in nulls_of(shown)}
    long = [str(row["note"]) for row in shown if len(_text(row["note"])) > LONGEST_NOTE]
    marks = {words: f"({number})" for number, words in enumerate(dict.fromkeys(long), start=1)}
    drawn = Table(
        title=escape(f"{title}; {facts}" if facts else title),
        caption=escape("\n".join([*(f"{mark} {words}" for words, mark in marks.items()), *below])),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for name in varying:
        drawn.add_column(name, justify="right" if name == "n" else "left", no_wrap=name == "quantity")
    drawn.add_column("value [95%]", justify="right", no_wrap=True)
    for name, header in {**nulls, **compared}.items():
        words = [*header.split(), *(_text(row.get(name)) for row in shown)]  # a long header folds, a number never
        drawn.add_column(header, justify="right", width=max(map(len, words)))
    noted = ("note",) if any(row["note"] for row in shown) else ()
    for _ in noted:
        drawn.add_column("")
    for row in shown:
        interval = "" if row["low"] is None else f" [{_text(row['low'])}, {_text(row['high'])}]"
        cells = [row.get(name) for name in (*varying, *nulls, *compared, *noted)]
        written = [marks.get(str(cell), _text(cell)) for cell in cells]
        drawn.add_row(*written[: len(varying)], _text(row["value"]) + interval, *written[len(varying) :])
    return drawn


def _beside_columns(rows: Sequence[Row], others: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Lines below the table about the other networks, and the columns of those that have a number for any row."""
    shortened = [f"{header} is {name}" for name, header in others.items() if name != header]
    lines = [", ".join(shortened)] if shortened else []
    columns = {}
    for name, header in others.items():
        cells = [row.get(OTHER_PREFIX + name) for row in rows]
        if any(isinstance(cell, float) for cell in cells):
            columns[OTHER_PREFIX + name] = header.replace("-", "-\n")
        if NEEDS_TWO_VISITS in cells:
            lines.append(f"{header} visits each layer once: it has no number where visits are compared")
    return lines, columns


def print_tables(tables: Iterable[Table], lines: Iterable[str]) -> None:
    """Print tables, then lines, to the terminal; to a pipe at full width, so that nothing is cut."""
    console = Console(highlight=False) if Console().is_terminal else Console(width=FULL_WIDTH)
    for drawn in tables:
        around = drawn.title, drawn.caption
        drawn.title = drawn.caption = None  # rich would fold them to the width of the columns
        console.print()
        console.print(around[0], style="bold", soft_wrap=True)
        console.print(drawn)
        if around[1]:
            console.print(around[1], soft_wrap=True)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _text(cell: Cell) -> str:
    if cell is None or cell == NEEDS_TWO_VISITS:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    if LARGE <= abs(cell) < LARGE**2:
        return f"{cell:.0f}"
    return f"{cell:.3g}" if cell == 0 or abs(cell) >= NEARLY_NOTHING else "~0"


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


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is complete whenever it is seen. Raises UserError when its folder cannot be written."""
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
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
