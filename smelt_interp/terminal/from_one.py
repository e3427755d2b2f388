"""Numbers of layers, visits and heads: from 0 in Python, from 1 on the command line, as a person reads them."""

from typing import Annotated

from pydantic import Field
from tyro.constructors import PrimitiveConstructorSpec

Index = Annotated[
    int,
    Field(ge=0, le=10**9),
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
