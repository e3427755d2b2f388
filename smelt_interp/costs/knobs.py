"""The knobs of one network: its shape changed, everything else as it was."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

from smelt_interp.config import ModelConfig, default_loop_scale
from smelt_interp.errors import UserError

HUNDREDTH_OF_A_LAYER = 0.01
"""A span of 0.3333 of 12 layers is four layers."""

STEPS = {"width": 8, "head_width": 2, "num_experts": 8, "expert_width": 8}
"""From one value of a knob to the next, where the network's own value is such a multiple."""

MOST_VISITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Changes to the first network; own: as the pair or the file has it."""

    width: int | Literal["own"] = "own"
    """Width of the residual stream."""
    num_heads: int | Literal["own"] = "own"
    """Query heads, a multiple of the KV heads."""
    num_kv_heads: int | Literal["own"] = "own"
    """KV heads."""
    head_width: int | Literal["own"] = "own"
    """Width of one head, even."""
    num_experts: int | Literal["own"] = "own"
    """Experts in each layer."""
    expert_width: int | Literal["own"] = "own"
    """Hidden width of one expert."""
    num_visits: int | Literal["own"] = "own"
    """How often the looped span runs."""
    span: float | Literal["own"] = "own"
    """Share of the layers that is looped, in the middle; 0 loops nothing."""

    def __post_init__(self) -> None:
        if self.span != "own" and not 0 <= self.span <= 1:
            raise UserError(f"span must be a share of the layers, from 0 to 1; got {self.span}")


UNTURNED = Knobs()


def looped_span(num_layers: int, span: float) -> tuple[int, int]:
    """First looped layer and one past the last: int(L (1 - span) / 2) and int(L (1 + span) / 2)."""
    first = num_layers * (1 - span) / 2 + HUNDREDTH_OF_A_LAYER
    last = num_layers * (1 + span) / 2 + HUNDREDTH_OF_A_LAYER
    return int(first), int(last)


def turned(config: ModelConfig, knobs: Knobs) -> ModelConfig:
    """The network with its knobs turned, as it would be built anew: a changed number of visits r scales by 1/r.

    A span of no layer makes it a Baseline unless visits are asked for too. Raises `UserError` for a shape outside the
    rules of a config.
    """
    shape = {name: value for name, value in asdict(knobs).items() if value != "own"}
    if "span" in shape:
        shape["loop_start"], shape["loop_stop"] = looped_span(config.num_layers, shape.pop("span"))
        if shape["loop_start"] == shape["loop_stop"]:
            shape.setdefault("num_visits", 1)
    visits = shape.get("num_visits", config.num_visits)
    if visits >= 1 and visits != config.num_visits:
        shape["loop_scale"] = default_loop_scale(visits)
    return replace(config, **shape)


def own_values(config: ModelConfig) -> dict[str, int | float]:
    """What each knob stands at; the span is the share of the layers that is looped."""
    counts = {name: getattr(config, name) for name in asdict(UNTURNED) if name != "span"}
    return counts | {"span": (config.loop_stop - config.loop_start) / config.num_layers}


def around(config: ModelConfig) -> dict[str, range]:
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
