"""A printed figure against ours: matches, differs, or not testable.

A printed figure is known to half of its last digit. A printed mean is held against our mean, a printed range against
the range of our layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from smelt_interp.paper.printed import Figure

Answer = Literal["matches", "differs", "not testable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A printed figure or range, times a scale."""

    figures: tuple[Figure, ...]
    scale: float = 1.0

    @property
    def ends(self) -> tuple[float, float]:
        """The figure twice, or both ends."""
        return self.figures[0].value * self.scale, self.figures[-1].value * self.scale

    @property
    def allowed(self) -> tuple[float, float]:
        """The range that rounding allows: half of the last digit more on either side."""
        return self.figures[0].bounds[0] * self.scale, self.figures[-1].bounds[1] * self.scale

    def text(self) -> str:
        """As it is printed, or scaled."""
        texts = [figure.text if self.scale == 1 else f"{figure.value * self.scale:.3g}" for figure in self.figures]
        return " to ".join(texts)


class Ours(dict[str, float]):
    """`value`, `low` and `high` of one row, scaled."""


def side(ours: Ours, allowed: tuple[float, float]) -> str:
    """Whether an interval lies `lower` or `higher` than a range; empty where they meet."""
    return "lower" if ours["high"] < allowed[0] else "higher" if ours["low"] > allowed[1] else ""


def verdict(ours: Sequence[Ours], allowed: tuple[float, float]) -> tuple[Answer, str]:
    """Whether a mean, or every layer, meets the printed range, and on which side those lie that do not."""
    sides = [side(each, allowed) for each in ours]
    outside = " and ".join(dict.fromkeys(word for word in sides if word))
    if not outside:
        return "matches", ""
    inside = f"; {sides.count('')} of {len(ours)} in" if len(ours) > 1 else ""
    return "differs", outside + inside


def reaches(value: float, ends: tuple[float, float], null: float) -> bool:
    """Whether a value is at least as far from the null as the near end of a range that lies on one side of it."""
    return value >= ends[0] > null or value <= ends[1] < null
