"""Which layers are looped: a share in the middle, or first and last by number."""

import re
from dataclasses import dataclass
from typing import Annotated, Self

from tyro.constructors import PrimitiveConstructorSpec

from smelt_interp.errors import UserError, shown


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Neighbouring layers, counted from 0, `stop` being one past the last; a person reads and types them from 1."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The layers that "3-4" or "3" names. Raises `UserError` for any other text."""
        found = re.fullmatch(r"([1-9]\d{0,4})(?:-([1-9]\d{0,4}))?", text.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise UserError(f"looped layers must be the first and the last, counted from 1, as 3-4; got {shown(text)}")
        return cls(first - 1, last)

    def __str__(self) -> str:
        return f"{self.start + 1}-{self.stop}" if self.stop > self.start else "none"

    def __len__(self) -> int:
        return self.stop - self.start


Layers = Annotated[
    LayerRange,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FIRST-LAST",
        instance_from_str=lambda words: LayerRange.parse(words[0]),
        is_instance=lambda value: isinstance(value, LayerRange),
        str_from_instance=lambda layers: [str(layers)],
    ),
]
"""As an option's type."""


def middle_layers(num_layers: int, share: float) -> LayerRange:
    """The layers in the middle whose number is nearest to a share of all, an odd one out being the coda's.

    Halves go to the even number, which makes a share of a half the paper's int(L / 4) to int(3 L / 4) at every depth.
    """
    count = round(share * num_layers)
    start = (num_layers - count) // 2
    return LayerRange(start, start + count)


def span_text(num_layers: int, share: float) -> str:
    """What a share of the layers came out as: "span 0.17 of 12 layers loops 6-7, a share of 0.1667"."""
    layers = middle_layers(num_layers, share)
    return f"span {share:g} of {num_layers} layers loops {layers}, a share of {len(layers) / num_layers:.4g}"
