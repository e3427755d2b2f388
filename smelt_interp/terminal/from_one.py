"""Numbers of layers, visits and heads: from 0 in Python, from 1 on the command line, as a person reads them."""

from dataclasses import fields
from typing import Annotated, get_type_hints

from pydantic import AfterValidator
from tyro.constructors import PrimitiveConstructorSpec

from smelt_interp.errors import UserError, shown

MOST = 10**9


def _in_range(index: int) -> int:
    if not 0 <= index < MOST:
        raise UserError(
            f"layers, visits and heads must count from 1 to {MOST} (in Python from 0); got {shown(index + 1)}"
        )
    return index


Index = Annotated[
    int,
    AfterValidator(_in_range),
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: int(words[0]) - 1,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value + 1)],
    ),
]
"""A layer, visit or head."""
Indices = tuple[Index, ...]


def from_one(options: type) -> frozenset[str]:
    """The fields of an options class that count from 0 in Python and from 1 where a person reads or types them."""
    kinds = get_type_hints(options, include_extras=True)
    return frozenset(name for name, kind in kinds.items() if kind in (Index, Indices))


def shifted(value: object, by: int) -> object:
    """A number, or each of several, moved by 1 or -1 from one way of counting to the other."""
    if isinstance(value, tuple):
        return tuple(shifted(each, by) for each in value)
    return value + by if isinstance(value, int) else value


def as_typed(options: object) -> dict[str, object]:
    """The fields of an options dataclass with the values that its command takes."""
    counted = from_one(type(options))
    values = {field.name: getattr(options, field.name) for field in fields(options)}  # type: ignore[arg-type]  # a dataclass
    return {name: shifted(value, 1) if name in counted else value for name, value in values.items()}
