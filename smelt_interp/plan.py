"""The plan: the only place that knows the order in which a looped network runs its layers.

Shape suffixes, used in every file of the project: B batch, T query position, S key position, D width, Q query
heads, G key/value heads, C head width, E experts, K chosen experts, F expert width, V visits, N tokens in a flat
list, W vocabulary. `x_BTD` is a tensor of axes batch, position, width.
"""

from typing import TYPE_CHECKING, NamedTuple

from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from smelt_interp.config import ModelConfig


class Step(NamedTuple):
    """One execution of a layer. Both numbers count from 0; a layer outside the loop has visit 0."""

    layer: int
    visit: int


Plan = tuple[Step, ...]


def plan(config: "ModelConfig") -> Plan:
    """Every layer execution, in order; its length is the executed depth, a position in it is the step index s."""
    first, last = config.loop_start, config.loop_stop
    prelude = [Step(layer, 0) for layer in range(first)]
    loop = [Step(layer, visit) for visit in range(config.num_visits) for layer in range(first, last)]
    coda = [Step(layer, 0) for layer in range(last, config.num_layers)]
    return (*prelude, *loop, *coda)


def step_scale(config: "ModelConfig", step: Step) -> float:
    """The factor on this step's residual updates: `loop_scale` inside the looped span, 1 outside."""
    return config.loop_scale if config.loop_start <= step.layer < config.loop_stop else 1.0


def step_index(steps: Plan, layer: object, visit: object) -> int:
    """The position of a visit in the plan. Raises `UserError`, with the visits that the layer has, for any other."""
    if (layer, visit) in steps:
        return steps.index((layer, visit))
    visits = [step.visit for step in steps if step.layer == layer]
    has = f"layer {layer} has visits {visits}" if visits else f"layers are 0 to {max(step.layer for step in steps)}"
    raise UserError(f"a (layer, visit) must be in the plan; got ({layer}, {visit}); {has}")


def visits_of(steps: Plan, layer: int) -> tuple[int, ...]:
    """The step indices at which a layer runs, first visit first; empty for a layer that never runs."""
    return tuple(index for index, step in enumerate(steps) if step.layer == layer)


def revisited_layers(steps: Plan) -> tuple[int, ...]:
    """The layers that run more than once, in order; empty for a Baseline."""
    return tuple(sorted({step.layer for step in steps if step.visit > 0}))


def label(step: Step) -> str:
    """The step as a person reads it, counted from 1: `layer 5, visit 2`."""
    return f"layer {step.layer + 1}, visit {step.visit + 1}"
