"""Layers to run several times in a network that runs each of them once, as every command that opens one takes them."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from smelt_interp.costs.spans import LayerRange, Layers
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, Step
from smelt_interp.validation import validated

NO_LAYERS = LayerRange(0, 0)
TWICE: tuple[int, Literal["1/r"]] = 2, "1/r"
"""Visits and factor of a span of which nothing else is asked."""
Visits = Annotated[int, Field(ge=2, le=1000)]
"""How often a span runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedSpan:
    """A span of neighbouring layers, how often it runs, and the factor on its updates at every visit."""

    layers: LayerRange
    visits: int
    factor: float

    def plan(self, num_layers: int) -> Plan:
        """Every layer once, those of the span `visits` times. Raises `UserError` for a span outside the layers."""
        first, stop = self.layers.start, self.layers.stop
        if stop > num_layers:
            raise UserError(f"--loop must lie within layers 1 to {num_layers}; got {self.layers}")
        looped = [Step(layer, visit) for visit in range(self.visits) for layer in range(first, stop)]
        after = range(stop, num_layers)
        return (*(Step(layer, 0) for layer in range(first)), *looped, *(Step(layer, 0) for layer in after))

    def factors(self, plan: Plan) -> tuple[float, ...]:
        """The loop factor of each step of its plan."""
        looped = range(self.layers.start, self.layers.stop)
        return tuple(self.factor if step.layer in looped else 1.0 for step in plan)


@validated
class OpeningOptions:
    """How a checkpoint is opened."""

    loop: Layers = NO_LAYERS
    """First and last layer, counted from 1 (8-22), of a span that is run again: in a network without loops, with the
    weights that it has."""
    visits: Visits = TWICE[0]
    """With --loop: how often the span runs."""
    loop_scale: Literal["1/r"] | Annotated[float, Field(gt=0, le=1)] = TWICE[1]
    """Factor on the updates of the looped layers; 1/r is one over the number of visits."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint brings with it."""
    allow_download: bool = False
    """Take a hub id too, and fetch it."""

    def __post_init__(self) -> None:
        if not self.loop and (self.visits, self.loop_scale) != TWICE:
            raise UserError(f"--visits and --loop-scale must come with --loop, the layers that they are of; got "
                            f"{self.visits} and {self.loop_scale} without: a trained loop runs as it is")  # fmt: skip


Options = TypeVar("Options", bound=OpeningOptions)


def unlooped(options: Options) -> Options:
    """The same without a span that is run again."""
    visits, scale = TWICE
    return replace(options, loop=NO_LAYERS, visits=visits, loop_scale=scale)


def looped_span(options: OpeningOptions) -> LoopedSpan | None:
    """The span that is run again; None when no layers are named."""
    if not options.loop:
        return None
    factor = 1 / options.visits if options.loop_scale == "1/r" else options.loop_scale
    return LoopedSpan(layers=options.loop, visits=options.visits, factor=factor)
