"""Which part of a run is kept: sites, and for each its steps and heads."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError, one_line
from smelt_interp.sites import SITES, check_suffix


class Kept(NamedTuple):
    """What is kept of one site."""

    steps: tuple[int, ...]
    """Step indices of the plan, ascending."""
    heads: tuple[int, ...]
    """Numbers of the heads on its head axis, ascending; empty for a site without one."""


def num_heads(suffix: str, architecture: Architecture) -> int:
    """Length of the site's head axis when every head is kept; 0 for a site without one."""
    axes = SITES[suffix].axes
    return architecture.num_heads if "Q" in axes else architecture.num_kv_heads if "G" in axes else 0


def num_visits(architecture: Architecture) -> int:
    """The most often that a layer runs."""
    return 1 + max(step.visit for step in architecture.steps)


def head_axis(suffix: str) -> int:
    """Position of the head axis among the site's axes, B first. The site must have one."""
    axes = SITES[suffix].axes
    return axes.index("Q") if "Q" in axes else axes.index("G")


def check_batch_size(batch_size: int) -> None:
    """Raise UserError unless a batch has a row."""
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1; got {batch_size}")


def chosen_steps(architecture: Architecture, layers: Sequence[int], visits: Sequence[int]) -> tuple[int, ...]:
    """Steps of the plan that the filters leave; numbers count from 0, and an empty filter leaves all."""
    return tuple(
        index
        for index, step in enumerate(architecture.steps)
        if (not layers or step.layer in layers) and (not visits or step.visit in visits)
    )


def select(
    architecture: Architecture,
    suffixes: Iterable[str],
    *,
    layers: Sequence[int] = (),
    visits: Sequence[int] = (),
    heads: Sequence[int] = (),
    told_from: int = 0,
) -> dict[str, Kept]:
    """The chosen sites, each with the steps and heads that the filters leave; an empty filter leaves all.

    Every number counts from 0. `heads` are query heads; of keys and values, the heads that serve them are kept.
    Raises UserError for an unknown site, a number that the network does not have, or filters that leave no step; its
    numbers count from `told_from`.
    """
    # Steps that the filters leave.
    for what, numbers, count in (
        ("layers", layers, architecture.num_layers),
        ("visits", visits, num_visits(architecture)),
        ("heads", heads, architecture.num_heads),
    ):
        if outside := [number for number in numbers if not 0 <= number < count]:
            rule = f"{what} must be {told_from} to {told_from + count - 1}, counted from {told_from}"
            raise UserError(f"{rule}; got {outside[0] + told_from}")
    kept_steps = chosen_steps(architecture, layers, visits)
    if not kept_steps:
        chosen = " and ".join(
            f"{what} {' '.join(str(number + told_from) for number in numbers)}"
            for what, numbers in (("layers", layers), ("visits", visits))
        )
        raise UserError(
            f"the chosen layers must run on the chosen visits; got {chosen}, counted from {told_from}: "
            "a layer outside every loop runs once"
        )
    # Heads of a site's own kind.
    query_heads = tuple(sorted(set(heads))) or tuple(range(architecture.num_heads))
    kv_heads = tuple(sorted({head * architecture.num_kv_heads // architecture.num_heads for head in query_heads}))
    heads_by_axis = {"Q": query_heads, "G": kv_heads}
    # Sites that the network has.
    asked = list(map(check_suffix, dict.fromkeys(suffixes)))
    if missing := [suffix for suffix in asked if suffix not in architecture.sites]:
        raise UserError(
            f"a site must be one that a network of family {architecture.family} computes; got {missing[0]}: "
            f"it has {one_line(', '.join(architecture.sites), 170)}"
        )
    return {
        suffix: Kept(kept_steps, next((heads_by_axis[axis] for axis in "QG" if axis in SITES[suffix].axes), ()))
        for suffix in asked
    }
