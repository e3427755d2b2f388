"""Which executions of a layer a probe compares: pairs of visits of the revisited layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, Step, label, revisited_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitPair:
    """Two visits of one layer."""

    layer: int
    """From 0."""
    visits: tuple[int, int]
    """From 0, the earlier one first."""
    steps: tuple[int, int]
    """Their step indices in the plan."""


def visit_pairs(config: ModelConfig, steps: Plan, recorded: Sequence[int], visits: Sequence[int]) -> list[VisitPair]:
    """Every pair of `visits` (counted from 1) of every revisited layer, both steps recorded; none on a Baseline.

    Raises `UserError` for fewer than two visits, one that the network does not make, or one that was not recorded.
    """
    check_visits(visits)
    if config.num_visits == 1:
        return []
    if max(visits) > config.num_visits:
        raise UserError(f"visits must be among 1 to {config.num_visits}; got {max(visits)}")
    step_of = {steps[index]: index for index in recorded}
    found = [
        VisitPair(
            layer=layer, visits=(first, second), steps=(step_of[Step(layer, first)], step_of[Step(layer, second)])
        )
        for first, second in combinations(sorted(visit - 1 for visit in visits), 2)
        for layer in revisited_layers(steps)
        if Step(layer, first) in step_of and Step(layer, second) in step_of
    ]
    if not found:
        raise UserError(
            f"a capture must hold two of the visits {', '.join(map(str, sorted(visits)))} of at least one layer; got "
            f"{'; '.join(label(steps[index]) for index in recorded)}: {_way_out(steps, recorded)}"
        )
    return found


def _way_out(steps: Plan, recorded: Sequence[int]) -> str:
    """What to do about a capture without a pair, by what it lacks: looped layers, their second visit, those asked."""
    several = revisited_layers(steps)
    layers = [steps[index].layer for index in recorded if steps[index].layer in several]
    if not layers:
        first, last = several[0] + 1, several[-1] + 1
        return f"record it again with a layer of {first} to {last}, which are visited more than once"
    if len(set(layers)) == len(layers):
        return "record it again with both visits"
    return "compare visits that it holds with --visits"


def check_visits(visits: Sequence[int]) -> None:
    """Raises `UserError` unless `visits` are two or more different numbers from 1."""
    if len(set(visits)) < 2 or len(set(visits)) < len(visits) or min(visits) < 1:
        raise UserError(f"visits must be two or more different numbers from 1; got {' '.join(map(str, visits))}")


def pair_label(visits: tuple[int, int]) -> str:
    """`1 vs 2`: the visits, counted from 1, as a row names them."""
    return f"{visits[0] + 1} vs {visits[1] + 1}"


def pair_labels(visits: Sequence[int]) -> list[str]:
    """The label of every pair that was asked for, so that a Baseline can mark each as needing two visits."""
    return [pair_label(pair) for pair in combinations(sorted(visit - 1 for visit in visits), 2)]


def once_visited(steps: Plan) -> tuple[int, ...]:
    """The step indices of layers that run once: prelude and coda, or every layer of a Baseline."""
    several = set(revisited_layers(steps))
    return tuple(index for index, step in enumerate(steps) if step.layer not in several)


def consecutive_once(steps: Plan, recorded: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of recorded steps of layers that run once, one right after the other."""
    alone = [index for index in once_visited(steps) if index in recorded]
    return [(first, second) for first, second in pairwise(alone) if second == first + 1]
