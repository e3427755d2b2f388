"""Tables of numbers from CSV files: named columns, every value checked, every error with its line."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError

Floats = NDArray[np.float64]

SHOWN_HEADER = 120
"""Characters of a header that a message repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a number in a column must be."""

    says: str
    holds: Callable[[float], bool]


BASELINE = "baseline"
"""The architecture in a file that the others are measured against."""

ANY = Rule(says="be a finite number", holds=lambda _: True)
POSITIVE = Rule(says="be a finite number above 0", holds=lambda value: value > 0)
LARGE = Rule(says="be a number from 1 to 1e40", holds=lambda value: 1 <= value <= 1e40)
SHARE = Rule(says="be a share of at least 0 and below 1", holds=lambda value: 0 <= value < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one file, in the order of its lines."""

    words: dict[str, list[str]]
    numbers: dict[str, Floats]


def read_columns(path: Path, words: tuple[str, ...], numbers: dict[str, Rule], optional: tuple[str, ...]) -> Columns:
    """Read the named columns of a CSV file with a header line; other columns are left alone.

    `optional` names columns of words that may be absent. Raises `UserError` for a file that is absent or not UTF-8,
    for a missing column, and for the first value outside its rule, with its line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            rows = [(reader.line_num, row) for row in reader]
    except FileNotFoundError:
        raise UserError(f"a CSV file must exist; got {path}") from None
    except (IsADirectoryError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} must be a CSV file in UTF-8; {error}") from None
    required = (*words, *numbers)
    if missing := [name for name in required if name not in header]:
        lacks = f"missing {', '.join(missing)} in the header {shorten(','.join(header), SHOWN_HEADER)!r}"
        raise UserError(f"{path} must have the columns {', '.join(required)}, separated by commas; {lacks}")
    if len(set(header)) < len(header):
        raise UserError(f"{path} must name each column once; got {', '.join(header)}")
    if not rows:
        raise UserError(f"{path} must hold at least one row below its header; got none")
    found_words = [*words, *(name for name in optional if name in header)]
    return Columns(
        words={name: [_word(path, line, name, row[name]) for line, row in rows] for name in found_words},
        numbers={
            name: np.array([_number(path, line, name, row[name], rule) for line, row in rows])
            for name, rule in numbers.items()
        },
    )


def _word(path: Path, line: int, name: str, value: str | None) -> str:
    if value is None or not value.strip():
        raise UserError(f"{path} line {line}: {name} must be given; got nothing")
    return value.strip()


def _number(path: Path, line: int, name: str, value: str | None, rule: Rule) -> float:
    try:
        number = float(value or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not rule.holds(number):
        raise UserError(f"{path} line {line}: {name} must {rule.says}; got {value!r}")
    return number
