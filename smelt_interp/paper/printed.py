"""The figures that the paper prints (arXiv:2609.01343), read by their path in `paper_numbers.json`.

They are data and stay in that one file, so no figure is typed twice. Parameters and FLOPs are absolute counts,
losses nats a token, compute-efficiency gains fractions.
"""

import json
from functools import cache
from pathlib import Path

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


def number(*keys: Key) -> float:
    """The number at a path. Raises `KeyError` where there is none."""
    value = entry(*keys)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise KeyError(keys)
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
