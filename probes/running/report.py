"""Results as people and programs read them: networks side by side, a table to print or show, JSON, files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from probes.statistics.grid import RANK, Cell, Level
from probes.statistics.quantities import NULL_PREFIX, OTHER_PREFIX, Record
from smelt_interp.terminal.output_files import make_folder, write_whole
from smelt_interp.terminal.tables import MISSING, Table

_NOT_KEYS = {"level", "value", "low", "high", "n", "note"}
_KINDS = ("looped ", "middle ", "all ")
LONGEST_NOTE = 10
"""Characters of a note that stands in its row of a table; a longer one stands below, under a number."""
NEARLY_NOTHING = 1e-6
"""Below this a table says ~0."""
LARGE = 1000
"""From here to its square a table writes whole numbers."""

# Side by side


def keys_of(rows: Sequence[Record]) -> tuple[str, ...]:
    """The columns that say what a row is about, in order of first appearance."""
    return _columns(rows, lambda name: name not in _NOT_KEYS and not name.startswith((NULL_PREFIX, OTHER_PREFIX)))


def nulls_of(rows: Sequence[Record]) -> tuple[str, ...]:
    """The columns of nulls, in order of first appearance."""
    return _columns(rows, lambda name: name.startswith(NULL_PREFIX))


def _columns(rows: Sequence[Record], keep: Callable[[str], bool]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in row if keep(name)))


def _layers(row: Record) -> str:
    """The numbers of a row's layers, whatever they are to the network: `looped 3-6` and `middle 3-6` are the same."""
    layers = str(row.get("layers"))
    return next((layers.removeprefix(kind) for kind in _KINDS if layers.startswith(kind)), layers)


def join_networks(
    rows: Sequence[Record], other: Sequence[Record], name: str, *, once: bool
) -> tuple[list[Record], list[str]]:
    """The rows with three more columns, in_NAME, in_NAME_low and in_NAME_high: the other network's for the same row,
    and what is to be said about them.

    `once`: the other network visits each layer once, so its one visit stands beside every visit of this one. At the
    headline another network may lack the layers; its own headline then stands there, and that is said.
    """
    names = [column for column in keys_of(rows) if column != "layers"]

    def key(row: Record, visit: Cell, layers: str | None) -> tuple[Cell, ...]:
        return (row["level"], layers, *(visit if column == "visit" else row.get(column) for column in names))

    # Rows of the same layers; at the headline also of others.
    same = {key(row, row.get("visit"), _layers(row)): row for row in other}
    headline = {key(row, row.get("visit"), None): row for row in other if row["level"] == "headline"}
    joined: list[Record] = []
    differing: dict[str, None] = {}
    for row in rows:
        visit = row.get("visit")
        visit = 1 if once and isinstance(visit, int) else visit
        match = same.get(key(row, visit, _layers(row)))
        if match is None and row["level"] == "headline":
            match = headline.get(key(row, visit, None))
            if match is not None and match["value"] is not None:
                differing[f"{name}: layers {match.get('layers')} beside {row.get('layers')}"] = None
        value, low, high = (match["value"], match["low"], match["high"]) if match else (None, None, None)
        column = OTHER_PREFIX + name
        joined.append({**row, column: value, f"{column}_low": low, f"{column}_high": high})
    notes = list(differing)
    if once and any(isinstance(row.get("visit"), str) for row in rows):
        notes.append(f"{name} visits each layer once: it has no number where visits are compared")
    return joined, notes


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


# Tables


def up_to(rows: Sequence[Record], level: Level) -> list[Record]:
    """The rows up to a level."""
    return [row for row in rows if RANK[row["level"]] <= RANK[level]]  # type: ignore[index]  # a Level


def readable(
    rows: Sequence[Record], title: str, others: Mapping[str, str], level: Level, notes: Sequence[str] = ()
) -> Table:
    """The rows up to a level as a table of text: value with its interval, nulls, other networks (their intervals are in
    CSV and JSON), documents, notes. What is the same in every row stands in the title, long words below the table.

    `others`: the name of each other network, and what its column is called.
    """
    shown = up_to(rows, level)
    places = (*keys_of(shown), "n")
    values = {name: {row.get(name) for row in shown} - {None} for name in places}
    # A column that varies stays; one that says the same in every row goes into the title.
    varying = [
        name
        for name in places
        if len(values[name]) > 1 or (values[name] and name != "n" and any(row.get(name) is None for row in shown))
    ]
    facts = [f"{name} {cell_text(next(iter(values[name])))}" for name in places if values[name] and name not in varying]
    known = [name for name in nulls_of(shown) if any(row.get(name) is not None for row in shown)]
    nulls = {name: f"null: {name.removeprefix(NULL_PREFIX).replace('_', ' ')}" for name in known}
    compared = {OTHER_PREFIX + name: header for name, header in others.items()}
    # A long note stands below the table under a number.
    long = [str(row["note"]) for row in shown if len(cell_text(row["note"])) > LONGEST_NOTE]
    marks = {words: f"({number})" for number, words in enumerate(dict.fromkeys(long), start=1)}
    noted = ["note"] if any(row["note"] for row in shown) else []
    body = []
    for row in shown:
        interval = "" if row["low"] is None else f" [{cell_text(row['low'])}, {cell_text(row['high'])}]"
        cells = [row.get(name) for name in (*varying, *nulls, *compared, *noted)]
        written = [marks.get(str(cell), cell_text(cell)) for cell in cells]
        body.append([*written[: len(varying)], cell_text(row["value"]) + interval, *written[len(varying) :]])
    renamed = [f"{header} is {name}" for name, header in others.items() if name != header]
    below = [*(f"{mark} {words}" for words, mark in marks.items()), *([", ".join(renamed)] if renamed else []), *notes]
    columns = [*varying, "value [95%]", *nulls.values(), *compared.values(), *noted]
    return Table("; ".join([title, *([", ".join(facts)] if facts else [])]), columns, body, below)


def cell_text(cell: Cell) -> str:
    """A cell with the digits that a person reads."""
    if cell is None:
        return MISSING
    if not isinstance(cell, float):
        return str(cell)
    if LARGE <= abs(cell) < LARGE**2:
        return f"{cell:.0f}"
    return f"{cell:.3g}" if cell == 0 or abs(cell) >= NEARLY_NOTHING else "~0"


# Files


def json_text(document: object) -> str:
    """Strict JSON (no NaN), indented."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole whenever it is seen. Raises UserError when its folder cannot be written."""
    make_folder(path.parent)
    write_whole(path, text.encode("utf-8", "backslashreplace"))
