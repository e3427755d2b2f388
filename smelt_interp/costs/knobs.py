"""The knobs of one network: its shape changed, everything else as it was."""

import math
from dataclasses import asdict, replace
from typing import Literal

from smelt_interp.config import Count, ModelConfig, default_loop_scale
from smelt_interp.costs.spans import Layers, middle_layers
from smelt_interp.errors import UserError
from smelt_interp.validation import Share, validated

STEPS = {"width": 8, "head_width": 2, "num_experts": 8, "expert_width": 8}
"""From one value of a knob to the next, where the network's own value is such a multiple."""

MOST_VISITS = 4
SPANS = ("span", "layers")


@validated
class Knobs:
    """Changes to the first network; own: as the pair or the file has it."""

    width: Count | Literal["own"] = "own"
    """Width of the residual stream."""
    num_heads: Count | Literal["own"] = "own"
    """Query heads, a multiple of the KV heads."""
    num_kv_heads: Count | Literal["own"] = "own"
    """KV heads."""
    head_width: Count | Literal["own"] = "own"
    """Width of one head, even."""
    num_experts: Count | Literal["own"] = "own"
    """Experts in each layer."""
    expert_width: Count | Literal["own"] = "own"
    """Hidden width of one expert."""
    num_visits: Count | Literal["own"] = "own"
    """How often the looped layers run."""
    span: Share | Literal["own"] = "own"
    """Share of the layers that is looped, in the middle, rounded to whole layers; 0 loops nothing."""
    layers: Layers | Literal["own"] = "own"
    """Looped layers, first and last counted from 1, in place of a span: 3-4."""

    def __post_init__(self) -> None:
        if self.span != "own" and self.layers != "own":
            raise UserError(f"looped layers must be given by span or by layers; got {self.span} and {self.layers}")


NO_CHANGES = Knobs()


def apply_knobs(config: ModelConfig, knobs: Knobs) -> ModelConfig:
    """The network with these changes, as it would be built anew: a changed number of visits r scales by 1/r.

    A span of no layer makes it a Baseline unless visits are asked for too. Raises `UserError` for a shape outside the
    rules of a config.
    """
    shape = {name: value for name, value in asdict(knobs).items() if name not in SPANS and value != "own"}
    layers = knobs.layers if knobs.span == "own" else middle_layers(config.num_layers, knobs.span)
    if layers != "own":
        shape |= {"loop_start": layers.start, "loop_stop": layers.stop}
        if len(layers) == 0:
            shape.setdefault("num_visits", 1)
    visits = shape.get("num_visits", config.num_visits)
    if visits != config.num_visits:
        shape["loop_scale"] = default_loop_scale(visits)
    return replace(config, **shape)


def own_values(config: ModelConfig) -> dict[str, int | float]:
    """What each knob with a scale stands at; the span is the share of the layers that is looped."""
    names = [name for name in asdict(NO_CHANGES) if name not in SPANS]
    span = (config.loop_stop - config.loop_start) / config.num_layers
    return {name: getattr(config, name) for name in names} | {"span": span}


def knob_ranges(config: ModelConfig) -> dict[str, range]:
    """Values to try of each whole-number knob, the network's own among them: from half of it to twice."""
    ranges = {}
    for name, own in own_values(config).items():
        if name == "num_visits":
            ranges[name] = range(1, max(MOST_VISITS, config.num_visits) + 1)
        elif isinstance(own, int):
            step = math.gcd(own, config.num_kv_heads if name == "num_heads" else STEPS.get(name, 1))
            ranges[name] = range(own - (own - 1) // 2 // step * step, 2 * own + 1, step)
    return ranges


def changes(config: ModelConfig, values: dict[str, int | float]) -> Knobs:
    """The knobs that stand at these values; a value that is the network's own is not a change."""
    own = own_values(config)
    return Knobs(**{name: value for name, value in values.items() if value != own[name]})  # type: ignore[arg-type]  # by name
