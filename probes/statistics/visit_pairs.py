"""Which executions of a layer a probe compares: pairs of visits of the layers that run more than once."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

import numpy as np

from probes.statistics.grid import Grid, Place, Where, layer_range, loop_name, pair_label
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, Step, label, revisited_layers

Pair = tuple[int, int]
"""The step indices of two visits of one layer, or of two layers, the earlier first."""


def check_visits(visits: Sequence[int]) -> None:
    """Raises `UserError` unless `visits`, from 0, are two or more different ones."""
    if len(set(visits)) < max(2, len(visits)) or min(visits) < 0:
        named = " ".join(str(visit + 1) for visit in visits)
        raise UserError(f"visits must be two or more different numbers from 1; got {named or 'none'}")


def visit_pairs(architecture: Architecture, recorded: Sequence[int], visits: Sequence[int]) -> tuple[Pair, ...]:
    """The steps of every pair of `visits` (from 0) of every revisited layer, both recorded; none on a Baseline.

    Raises `UserError` for a visit that no layer makes, and when no layer was recorded on two of them.
    """
    check_visits(visits)
    plan = architecture.steps
    if not architecture.loops:
        return ()
    most = max(loop.num_visits for loop in architecture.loops)
    if max(visits) >= most:
        raise UserError(f"visits must be among 1 to {most}; got {max(visits) + 1}")
    step_of = {plan[index]: index for index in recorded}
    found = tuple(
        (step_of[Step(layer, first)], step_of[Step(layer, second)])
        for first, second in combinations(sorted(visits), 2)
        for layer in revisited_layers(plan)
        if Step(layer, first) in step_of and Step(layer, second) in step_of
    )
    if not found:
        named = ", ".join(str(visit + 1) for visit in sorted(visits))
        have = "; ".join(label(plan[index]) for index in recorded[:4]) + ("; ..." if len(recorded) > 4 else "")
        raise UserError(
            f"a capture must hold two of the visits {named} of at least one layer; got {have}: "
            f"{_way_out(plan, recorded)}"
        )
    return found


def _way_out(plan: Plan, recorded: Sequence[int]) -> str:
    """What to do about a capture without a pair, by what it lacks: looped layers, their second visit, those asked."""
    several = revisited_layers(plan)
    layers = [plan[index].layer for index in recorded if plan[index].layer in several]
    if not layers:
        return f"record it again with a layer of {layer_range(several)}, which are visited more than once"
    if len(set(layers)) == len(layers):
        return "record it again with both visits"
    return "compare visits that it holds with --compare"


def not_compared(
    names: Sequence[str],
    grid: Grid,
    visits: Sequence[int],
    where: Mapping[str, str] | None = None,
    why: str = NEEDS_TWO_VISITS,
) -> list[Quantity]:
    """Quantities that compare visits, where there are none to compare: a headline row a pair of visits that says so."""
    places = [
        Place("headline", {"layers": loop_name(loop, grid.architecture), "visit": pair_label(pair)}, [0], [])
        for pair in combinations(sorted(visits), 2)
        for loop in grid.loops
    ]
    nothing, more = np.full((1, 1, 1), np.nan), Where(where or {})
    return [Quantity(name=name, value_RLH=nothing, places=places, n=0, undefined=why, where=more) for name in names]


def pairs_of(architecture: Architecture, steps: Sequence[int]) -> tuple[Pair, ...]:
    """Every pair of visits of a layer among these steps; none where no layer is there twice."""
    return tuple(pair for pair in combinations(steps, 2) if len({architecture.steps[step].layer for step in pair}) == 1)


def once_visited(plan: Plan) -> tuple[int, ...]:
    """The step indices of layers that run once: prelude and coda, or every layer of a Baseline."""
    several = set(revisited_layers(plan))
    return tuple(index for index, step in enumerate(plan) if step.layer not in several)


def consecutive_once(plan: Plan, recorded: Sequence[int]) -> tuple[Pair, ...]:
    """Pairs of recorded steps of layers that run once, one right after the other."""
    alone = [index for index in once_visited(plan) if index in recorded]
    return tuple((first, second) for first, second in pairwise(alone) if second == first + 1)
