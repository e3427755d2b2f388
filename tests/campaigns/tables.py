"""Damaged CSV files are refused in one line, or give finite numbers; spelled otherwise, they give the same."""

import csv
import io
from pathlib import Path

import numpy as np

from smelt_interp.scaling import calibration, command
from smelt_interp.scaling.law import printed_law
from tests.campaigns.campaign import HOSTILE, Case, damaged_bytes, pick
from tests.campaigns.ended import Ended, ended

Rows = list[list[str]]


def runs() -> Rows:
    """Losses of both architectures that follow the printed laws."""
    rows = [["architecture", "flops_per_token", "tokens", "sparsity", "loss"]]
    for name in ("baseline", "smelt"):
        law = printed_law(name)
        for flops in (1e8, 1e9, 1e10):
            for tokens in (1e9, 4e9, 2e10):
                for sparsity in (0.9, 0.97):
                    loss = float(law.loss(flops, sparsity, tokens))
                    rows.append([name, f"{flops:g}", f"{tokens:g}", f"{sparsity}", f"{loss:.6f}"])
    return rows


def repeats() -> Rows:
    """Losses of dense loops in which a visit is worth half of a layer."""
    rows = [["once", "repeated", "visits", "tokens", "loss"]]
    for size in (1e6, 4e6):
        for visits in (1, 2, 4):
            for tokens in (1e7, 4e7, 1.6e8):
                loss = 1.6 + 400 / (size + visits**0.5 * size) ** 0.4 + 300 / tokens**0.35
                rows.append([f"{size:g}", f"{size:g}", f"{visits}", f"{tokens:g}", f"{loss:.6f}"])
    return rows


def scores() -> Rows:
    """Scores that fall with the loss, the looped network's a little higher."""
    rows = [["architecture", "loss", "score"]]
    for name, more in (("baseline", 0.0), ("smelt", 0.05)):
        rows += [
            [name, f"{loss:.3f}", f"{more + 0.8 / (1 + np.exp(3 * (loss - 2))):.5f}"] for loss in np.arange(1, 3, 0.2)
        ]
    return rows


def campaign(folder: Path) -> Case:
    """One file of runs and one of scores."""
    path = folder / "given.csv"
    tables = {"runs": (runs(), command.main, ("fit",)), "scores": (scores(), calibration.main, ("fit",))}

    def report(name: str, data: bytes) -> Ended:
        path.write_bytes(data)
        _, main, words = tables[name]
        return ended(main, *words, str(path), "--draws", "20", "--json")

    undamaged = {name: report(name, text(rows)).document() for name, (rows, _, _) in tables.items()}

    def case(random: np.random.Generator) -> str:
        name = "runs" if random.random() < 0.2 else "scores"  # a fit of runs takes seconds
        rows = [list(row) for row in tables[name][0]]
        if random.random() < 0.2:
            assert report(name, otherwise(random, rows)).document() == undamaged[name]
            return f"{name}: the same, spelled otherwise"
        data = damaged_bytes(random, text(rows)) if random.random() < 0.3 else text(damaged(random, rows))
        end = report(name, data)
        if end.refused():
            return f"{name}: refused"
        assert end.document()
        return f"{name}: taken"

    return case


def text(rows: Rows, **dialect: object) -> bytes:
    out = io.StringIO()
    csv.writer(out, **{"lineterminator": "\n", **dialect}).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogateescape")


def otherwise(random: np.random.Generator, rows: Rows) -> bytes:
    """The same table with a byte order mark, other line ends, quotes, blanks, an extra column, or columns exchanged."""
    match random.integers(6):
        case 0:
            return b"\xef\xbb\xbf" + text(rows)
        case 1:
            return text(rows, lineterminator="\r\n")
        case 2:
            return text(rows, quoting=csv.QUOTE_ALL)
        case 3:
            return text([[f" {cell} " for cell in row] for row in rows])
        case 4:
            return text([[*row, "note"] for row in rows])
        case _:
            order = random.permutation(len(rows[0]))
            return text([[row[column] for column in order] for row in rows])


def damaged(random: np.random.Generator, rows: Rows) -> Rows:
    """A cell, a row or a column that is wrong."""
    row, column = int(random.integers(len(rows))), int(random.integers(len(rows[0])))
    match random.integers(7):
        case 0:
            return [[*each[:column], *each[column + 1 :]] for each in rows]
        case 1:
            return [[*each, each[column]] for each in rows]
        case 2:
            return rows[:row]
        case 3:
            return [*rows, *([rows[row]] * 50)]
        case 4:
            rows[row] = rows[row][:column]
        case _:
            rows[row][column] = pick(random, (*HOSTILE, "\x00", '"'))
    return rows
