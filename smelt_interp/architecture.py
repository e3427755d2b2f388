"""What every reader of a network needs to know, owned by the network and stored in every capture.

Nobody rebuilds a plan from a config: a capture, a probe and a page read it here. Loops are read off the plan.
"""

import json
from dataclasses import MISSING, dataclass, fields
from typing import Literal, NamedTuple, Self, cast

from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, Step
from smelt_interp.sites import SITES

Router = Literal["softmax", "sigmoid", "none"]

MOST_STEPS = 10_000
"""A plan is a list of hooked steps; one this long is a slip of the keyboard."""
LARGEST = 10**9
"""Of a width, a count or a context."""


class Loop(NamedTuple):
    """A group of layers that run equally often, more than once."""

    layers: tuple[int, ...]
    """Ascending, from 0."""
    num_visits: int

    def steps(self, plan: Plan, visit: int) -> tuple[int, ...]:
        """The step indices of these layers on one visit, from 0, in order of execution."""
        return tuple(index for index, step in enumerate(plan) if step.visit == visit and step.layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The plan and the shape of a network, whatever family it is of.

    Raises `UserError` naming the field, its rule and its value when a field is outside its rule.
    """

    family: str
    """`smelt` for the networks of `model.network`, otherwise the name of a family."""
    steps: Plan
    """Every layer execution, in order; a position in it is the step index s."""
    loop_factors: tuple[float, ...]
    """Factor on the residual updates of each step; 1 outside loops."""
    sites: tuple[str, ...]
    """Suffixes of `smelt_interp.sites.SITES` that a pass of this network can compute."""
    width: int
    """Width D of the residual stream."""
    num_heads: int
    """Query heads Q."""
    num_kv_heads: int
    """Key/value heads G."""
    head_width: int
    """Width C of one head."""
    num_experts: int
    """Experts E of a layer; 0 in a dense network."""
    top_k: int
    """Experts K that each token is sent to; 0 in a dense network."""
    router: Router
    """How router logits become scores; `none` in a dense network."""
    vocab_size: int
    context: int
    """Longest sequence, in tokens."""
    causal: bool = True
    """Whether a query sees earlier keys alone; otherwise every key of its segment."""

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_kv_heads", "head_width", "vocab_size", "context"):
            _require_count(name, getattr(self, name), 1)
        for name in ("num_experts", "top_k"):
            _require_count(name, getattr(self, name), 0)
        _require(0 < len(self.steps) <= MOST_STEPS, f"steps must be 1 to {MOST_STEPS}", len(self.steps))
        seen: dict[int, int] = {}
        for layer, visit in self.steps:
            _require(
                type(layer) is int and layer >= 0 and visit == seen.get(layer, 0),
                f"the visits of a layer must count from 0 in order; layer {layer} has visit {seen.get(layer, 0)} next",
                visit,
            )
            seen[layer] = visit + 1
        _require(set(seen) == set(range(len(seen))), "layers must count from 0 without a gap", sorted(seen)[-1])
        _require(len(self.loop_factors) == len(self.steps), "loop_factors must be one a step", len(self.loop_factors))
        for factor in self.loop_factors:
            _require(0 < factor <= 1, "loop_factors must be in (0, 1]", factor)
        if unknown := [site for site in self.sites if site not in SITES]:
            raise UserError(f"sites must be hook suffixes of a step; got {unknown[0]!r}")
        rule = f"num_heads must be a multiple of num_kv_heads ({self.num_kv_heads})"
        _require(self.num_heads % self.num_kv_heads == 0, rule, self.num_heads)
        rule = f"top_k must be at most num_experts ({self.num_experts}), and 0 exactly when it is"
        _require(self.top_k <= self.num_experts and (self.top_k > 0) == (self.num_experts > 0), rule, self.top_k)
        _require((self.router == "none") == (self.num_experts == 0), "router must be none without experts", self.router)

    @property
    def num_layers(self) -> int:
        """Physical layers."""
        return len({step.layer for step in self.steps})

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Groups of layers that run equally often, more than once, by their first layer; none in a Baseline."""
        visits = [0] * self.num_layers
        for step in self.steps:
            visits[step.layer] += 1
        groups: dict[int, list[int]] = {}
        for layer, count in enumerate(visits):
            if count > 1:
                groups.setdefault(count, []).append(layer)
        return tuple(sorted(Loop(tuple(layers), count) for count, layers in groups.items()))

    def to_json(self) -> dict[str, object]:
        """A dictionary of plain values, one entry a field."""
        values: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "steps": [list(step) for step in self.steps],
            "loop_factors": list(self.loop_factors),
            "sites": list(self.sites),
        }

    @classmethod
    def from_json(cls, values: dict[str, object]) -> Self:
        """The architecture with exactly these values; unknown or missing keys and other types raise `UserError`."""
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if unknown := sorted(set(values) - known):
            raise UserError(f"architecture keys must be fields of Architecture; got {', '.join(unknown)}")
        if missing := sorted(required - set(values)):
            raise UserError(f"an architecture must give every required field; missing {', '.join(missing)}")
        for name in ("steps", "loop_factors", "sites"):
            _require(isinstance(values[name], list), f"{name} must be a list", json.dumps(values[name])[:80])
        steps = cast("list[object]", values["steps"])
        for step in steps:
            holds = isinstance(step, list) and len(step) == 2 and all(type(number) is int for number in step)
            _require(holds, "a step must be a pair of whole numbers, layer and visit", json.dumps(step)[:80])
        for factor in cast("list[object]", values["loop_factors"]):
            _require(type(factor) in (int, float), "loop_factors must be numbers", json.dumps(factor)[:80])
        for name, kind in (("family", str), ("router", str)):
            _require(isinstance(values[name], kind), f"{name} must be text", json.dumps(values[name])[:80])
        _require(isinstance(values.get("causal", True), bool), "causal must be true or false", values.get("causal"))
        return cls(
            **{  # type: ignore[arg-type]  # checked above and in __post_init__
                **values,
                "steps": tuple(Step(*cast("list[int]", step)) for step in steps),
                "loop_factors": tuple(cast("list[float]", values["loop_factors"])),
                "sites": tuple(cast("list[str]", values["sites"])),
            }
        )


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise UserError(f"{rule}; got {value}")


def _require_count(name: str, value: object, least: int) -> None:
    _require(type(value) is int and least <= value <= LARGEST, f"{name} must be {least} to {LARGEST}", value)
