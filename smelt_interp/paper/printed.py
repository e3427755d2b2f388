"""The figures that the paper prints (arXiv:2609.01343), read by their path in `paper_numbers.json`.

They are data and stay in that one file, so no figure is typed twice. What is printed is a string there, since 0.60 says
more than 0.6. Parameters and FLOPs are absolute counts, losses nats a token, gains and changes fractions.
"""

import json
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("paper_numbers.json")

Key = str | int


@cache
def _document() -> object:
    return json.loads(PATH.read_text(encoding="utf-8"))


def entry(*keys: Key) -> object:
    """What lies at a path, e.g. `entry("grid", "rows", 0, "scale")`. Raises `KeyError` where there is nothing."""
    value = _document()
    for key in keys:
        in_table = isinstance(value, dict) and key in value
        in_list = isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value)
        if not (in_table or in_list):
            raise KeyError(keys)
        value = value[key]  # type: ignore[index]  # a table or a list that holds the key
    return value


class Figure(NamedTuple):
    """A printed figure, known to half of its last digit: "0.60" to 0.005, "3.70e9" to 5e6."""

    text: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text)

    @property
    def unit(self) -> float:
        """What one unit of the last digit is worth."""
        exponent = Decimal(self.text).as_tuple().exponent
        assert isinstance(exponent, int)
        return 10.0**exponent

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest number that rounds to it."""
        return self.value - self.unit / 2, self.value + self.unit / 2

    def agrees(self, ours: float) -> bool:
        """Whether ours rounds to it; half a unit off counts as rounded either way."""
        return abs(ours - self.value) <= 0.5 * self.unit * (1 + 1e-9)

    def shown(self) -> str:
        """Every digit, with a letter for a power of ten: 3.70G."""
        digits, power = self.text.partition("e")[::2]
        letter = {"": "", "3": "k", "6": "M", "9": "G"}.get(power)
        return self.text if letter is None else f"{digits}{letter}"


def figure(*keys: Key) -> Figure:
    """The printed figure at a path. Raises `KeyError` where there is none."""
    value = entry(*keys)
    try:
        float(value if isinstance(value, str) else "")
    except ValueError:
        raise KeyError(keys) from None
    return Figure(str(value))


def figures(*keys: Key) -> tuple[Figure, ...]:
    """The list of printed figures at a path, or the one that stands there alone."""
    if not isinstance(entry(*keys), list):
        return (figure(*keys),)
    return tuple(figure(*keys, index) for index in range(length(*keys)))


def number(*keys: Key) -> float:
    """The number at a path, or a printed figure's. Raises `KeyError` where there is neither."""
    value = entry(*keys)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return figure(*keys).value
    return float(value)


def integer(*keys: Key) -> int:
    """The whole number at a path. Raises `KeyError` where there is none."""
    value = number(*keys)
    if value != int(value):
        raise KeyError(keys)
    return int(value)


def text(*keys: Key) -> str:
    """The string at a path. Raises `KeyError` where there is none."""
    value = entry(*keys)
    if not isinstance(value, str):
        raise KeyError(keys)
    return value


def length(*keys: Key) -> int:
    """How many entries the list or table at a path has. Raises `KeyError` where there is neither."""
    value = entry(*keys)
    if not isinstance(value, (list, dict)):
        raise KeyError(keys)
    return len(value)


def numbers(*keys: Key) -> tuple[float, ...]:
    """The list of numbers at a path. Raises `KeyError` where there is none."""
    if not isinstance(entry(*keys), list):
        raise KeyError(keys)
    return tuple(number(*keys, index) for index in range(length(*keys)))


def names(*keys: Key) -> tuple[str, ...]:
    """The keys of the table at a path, in the file's order. Raises `KeyError` where there is none."""
    value = entry(*keys)
    if not isinstance(value, dict):
        raise KeyError(keys)
    return tuple(value)
