"""What campaigns share: damage that is drawn at random from a seed, and what may come of it.

A campaign is a function `campaign(folder)` that lays its undamaged originals down in a folder and returns `case`; and
`case(random)` damages one of them, tries it, and returns what came of it in a word or two. Only two things may: the
damage is refused in one line, or everything is as the damaged thing says. Anything else is an AssertionError.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from smelt_interp.errors import LONGEST_MESSAGE, UserError

Case = Callable[[np.random.Generator], str]
Campaign = Callable[[Path], Case]
Value = TypeVar("Value")

HOSTILE_NUMBERS = ("inf", "-inf", "nan", "1e400", "-1", "0", "-0.0", "1e30", "1e-300", "9" * 400, "1_0", "0x10", "1,5")
HOSTILE_TEXTS = ("", " ", "-", "--", "\n", "a\nb", "\x1b[31m", "\x07", "é", "\udcff", "٣", "x" * 5000, "../..")
HOSTILE = (*HOSTILE_NUMBERS, *HOSTILE_TEXTS)
HOSTILE_JSON = (
    None, True, -1, 0, 1, 2, 10**6, 10**30, -(10**30), 0.5, 1e300, "", "x", "\x00", "\n", [], [1], {}, {"a": 1},
)  # fmt: skip


def check_line(line: str) -> None:
    """What a user reads is one short line of printable characters."""
    assert line, "an error without words"
    assert line.isprintable(), f"not one line of printable characters: {line!r}"
    assert len(line) < LONGEST_MESSAGE, f"{len(line)} characters: {line!r}"


def tried(work: Callable[[], Value]) -> Value | None:
    """What the work gives; None when it refuses in one line. Any other exception is a finding."""
    try:
        return work()
    except UserError as error:
        check_line(str(error))
        return None


def pick(random: np.random.Generator, choices: "tuple[Value, ...] | list[Value]") -> Value:
    return choices[random.integers(len(choices))]


def damaged_bytes(random: np.random.Generator, data: bytes) -> bytes:
    """Bytes with a bit turned, cut short, with a stretch zeroed, repeated, taken out or exchanged."""
    start, stop = sorted(int(at) for at in random.integers(0, len(data) + 1, 2))
    stop = min(stop, start + 4096)
    match random.integers(6):
        case 0:
            at = int(random.integers(len(data)))
            return data[:at] + bytes([data[at] ^ (1 << int(random.integers(8)))]) + data[at + 1 :]
        case 1:
            return data[:start]
        case 2:
            return data[:start] + bytes(stop - start) + data[stop:]
        case 3:
            return data[:stop] + data[start:stop] + data[stop:]
        case 4:
            return data[:start] + data[stop:]
        case _:
            return data[:start] + random.bytes(stop - start) + data[stop:]


def damaged_json(random: np.random.Generator, document: dict[str, object]) -> dict[str, object]:
    """An object with one field gone, added, or of another value; a field that is an object may be damaged within."""
    damaged, name = dict(document), pick(random, sorted(document))
    inner = document[name]
    if isinstance(inner, dict) and inner and random.random() < 0.5:
        damaged[name] = damaged_json(random, inner)
        return damaged
    match random.integers(8):
        case 0:
            del damaged[name]
        case 1:
            damaged[f"{name}_"] = inner
        case _:
            damaged[name] = pick(random, HOSTILE_JSON)
    return damaged
