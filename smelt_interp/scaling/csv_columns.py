"""Tables of numbers from CSV files: named columns, every value checked, every error with its line."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError, shown
from smelt_interp.input_files import read_input

if TYPE_CHECKING:
    from pandas import DataFrame

Floats = NDArray[np.float64]

MOST_BYTES = 16_000_000
SHOWN_HEADER = 120
"""Characters of a header that a message repeats."""
BASELINE = "baseline"
"""The architecture in a file that the others are measured against."""


class Rule(NamedTuple):
    """What a number in a column must be."""

    says: str
    holds: Callable[[Floats], NDArray[np.bool_]]


ANY = Rule("be a finite number within 1e100", lambda values: abs(values) <= 1e100)
LOSS = Rule("be a number from 1e-6 to 1e6", lambda values: (values >= 1e-6) & (values <= 1e6))
LARGE = Rule("be a number from 1 to 1e40", lambda values: (values >= 1) & (values <= 1e40))
SHARE = Rule("be a share of at least 0 and below 1", lambda values: (values >= 0) & (values < 1))


def read_columns(
    path: Path, words: tuple[str, ...], numbers: Mapping[str, Rule], optional: tuple[str, ...]
) -> "DataFrame":
    """The named columns of a CSV file with a header line, words as text and numbers as floats; others are left alone.

    `optional` names columns of words that may be absent. Raises `UserError` for a file that is absent or not UTF-8,
    for a missing column, and for the first value outside its rule, with its line.
    """
    import pandas as pd  # half a second to import, which `--help` need not wait for

    data = read_input(path, "a CSV file", MOST_BYTES)
    try:
        # Blank lines are kept, so that a row's number is its line's.
        cells = pd.read_csv(
            BytesIO(data), header=None, dtype=str, encoding="utf-8-sig", na_filter=False, skip_blank_lines=False
        )
    except pd.errors.EmptyDataError:
        cells = pd.DataFrame([[""]])
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise UserError(f"{path} must be a CSV file in UTF-8; {error}") from None
    header = [str(name).strip() for name in cells.iloc[0]]
    required = (*words, *numbers)
    if missing := [name for name in required if name not in header]:
        lacks = f"missing {', '.join(missing)} in the header {shorten(','.join(header), SHOWN_HEADER)!r}"
        raise UserError(f"{path} must have the columns {', '.join(required)}, separated by commas; {lacks}")
    if len(set(header)) < len(header):
        raise UserError(f"{path} must name each column once; got {', '.join(header)}")
    rows = cells.iloc[1:].set_axis(header, axis=1).fillna("")
    rows = rows[(rows != "").any(axis=1)]
    if rows.empty:
        raise UserError(f"{path} must hold at least one row below its header; got none")
    found = pd.DataFrame(index=rows.index)
    for name in (*words, *(name for name in optional if name in header)):
        found[name] = rows[name].str.strip()
        if (given := found[name] != "").all():
            continue
        raise UserError(f"{path} line {given.idxmin() + 1}: {name} must be given; got nothing")
    for name, rule in numbers.items():
        found[name] = pd.to_numeric(rows[name].str.strip(), errors="coerce").astype(float)
        holds = np.isfinite(found[name]) & rule.holds(found[name])
        if not holds.all():
            line = holds.idxmin()
            raise UserError(f"{path} line {line + 1}: {name} must {rule.says}; got {shown(rows[name][line])}")
    return found.reset_index(drop=True)
