"""The shape of a looped Mixture-of-Experts transformer: one frozen record, its rules, and its JSON form."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input
from smelt_interp.plan import plan, step_scale
from smelt_interp.sites import SITES
from smelt_interp.validation import validated

RouterKind = Literal["softmax", "sigmoid"]
NormedTogether = Literal["head", "all heads"]

MOST_STEPS = 10_000
"""A plan is a list of hooked steps; one this long is a slip of the keyboard."""
MOST_WEIGHTS = 10**12
"""In one matrix, or in one layer's experts together. Far below it, sizes in bytes fit 64 bits."""
MOST_BYTES = 1_000_000
"""Of a config file."""

Count = Annotated[int, Field(ge=1, le=10**12)]
LayerIndex = Annotated[int, Field(ge=0, le=MOST_STEPS)]


def default_loop_scale(num_visits: int) -> float:
    """The factor 1/r on every residual update of the looped span when a network is first built."""
    return 1.0 / num_visits


@validated
class ModelConfig:
    """Everything that fixes a network. A Baseline is a config with `num_visits=1`.

    Raises `UserError` naming the field, its rule and its value when a field is outside its rule.
    """

    num_layers: Count
    """Physical layers, each with its own weights."""
    width: Count
    """Width D of the residual stream."""
    num_heads: Count
    """Query heads Q."""
    num_kv_heads: Count
    """Key/value heads G; each serves num_heads / num_kv_heads query heads."""
    head_width: Count
    """Width C of one head; num_heads * head_width need not equal width."""
    num_experts: Count
    """Experts E in each layer."""
    top_k: Count
    """Experts K that each token is sent to."""
    expert_width: Count
    """Hidden width F of one expert."""
    vocab_size: Count
    context: Count
    """Longest sequence, in tokens."""
    loop_start: LayerIndex
    """First looped layer."""
    loop_stop: LayerIndex
    """One past the last looped layer; equal to loop_start when nothing is looped."""
    num_visits: Count
    """How often the looped span runs."""
    loop_scale: Annotated[float, Field(gt=0, le=1)]
    """Factor on each residual update inside the looped span. A stored number: it stays as trained when more or
    fewer visits are run. `default_loop_scale` gives the value for a new network."""
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    rope_base: Annotated[float, Field(gt=1, le=10**12)] | None = 10_000.0
    """Base of the rotary position embedding; None is a network without one."""
    qk_norm: bool = False
    """RMSNorm with a learned gain on queries and keys, before RoPE."""
    qk_norm_over: NormedTogether = "head"
    """What that norm takes the mean over: each head, whose gain is that of every head, or all heads as one vector."""
    gated_experts: bool = True
    """SwiGLU experts; False is two matrices with SiLU between."""
    router: RouterKind = "softmax"
    """Scores over all experts from which the top k are taken."""
    renormalise_top_k: bool = True
    """Divide the chosen scores by their sum."""
    tied_unembedding: bool = False

    def __post_init__(self) -> None:
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads must be a multiple of num_kv_heads ({self.num_kv_heads})",
            self.num_heads,
        )
        _require(self.top_k <= self.num_experts, f"top_k must be at most num_experts ({self.num_experts})", self.top_k)
        # One expert's share of itself is 1 whatever the router says, so no loss would reach the router.
        untrainable = self.renormalise_top_k and self.top_k == 1 < self.num_experts
        rule = f"renormalise_top_k must be false when top_k is 1 of {self.num_experts} experts"
        _require(not untrainable, rule, self.renormalise_top_k)
        rule = "qk_norm_over must be 'head' when qk_norm is false"
        _require(self.qk_norm or self.qk_norm_over == "head", rule, repr(self.qk_norm_over))
        span = f"{self.loop_start}..{self.loop_stop}"
        rule = f"the looped span must satisfy loop_start <= loop_stop <= num_layers ({self.num_layers})"
        _require(self.loop_start <= self.loop_stop <= self.num_layers, rule, span)
        rule = f"a span of at least one layer must be looped when num_visits is {self.num_visits}"
        _require(self.num_visits == 1 or self.loop_start < self.loop_stop, rule, span)
        rule = f"layers times visits must be at most {MOST_STEPS} steps"
        _require(self.num_steps <= MOST_STEPS, rule, self.num_steps)
        for name, size in (
            ("num_experts x 2 x expert_width x width", 2 * self.num_experts * self.expert_width * self.width),
            ("num_heads x head_width x width", self.num_heads * self.head_width * self.width),
            ("vocab_size x width", self.vocab_size * self.width),
        ):
            _require(size <= MOST_WEIGHTS, f"{name} must be at most {MOST_WEIGHTS}", size)
        rotary = self.rope_base is not None
        rule = "head_width must be even with a rotary embedding"
        _require(not rotary or self.head_width % 2 == 0, rule, self.head_width)

    @property
    def qk_gains(self) -> tuple[int, int]:
        """Gains of the norm of queries and of that of keys in one layer; none without such norms."""
        if not self.qk_norm:
            return 0, 0
        together = self.qk_norm_over == "all heads"
        heads, kv_heads = (self.num_heads, self.num_kv_heads) if together else (1, 1)
        return heads * self.head_width, kv_heads * self.head_width

    @property
    def num_steps(self) -> int:
        """Executed depth, the length of the plan."""
        return self.num_layers + (self.loop_stop - self.loop_start) * (self.num_visits - 1)

    def architecture(self) -> Architecture:
        """What readers of the network need to know; its plan is `plan(config)`."""
        steps = plan(self)
        return Architecture(
            family="smelt",
            steps=steps,
            loop_factors=tuple(step_scale(self, step) for step in steps),
            sites=tuple(SITES),
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_width=self.head_width,
            num_experts=self.num_experts,
            top_k=self.top_k,
            router=self.router,
            vocab_size=self.vocab_size,
            context=self.context,
        )

    def to_json(self) -> dict[str, object]:
        """A dictionary of plain values, one entry a field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, values: dict[str, object]) -> Self:
        """The config with exactly these values; unknown or missing keys raise `UserError`."""
        return cls(**values)  # type: ignore[arg-type]  # every type is checked

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON file. Raises `UserError` for a file that is absent, not JSON, or outside the rules."""
        try:
            values = json.loads(read_input(path, "a config file", MOST_BYTES))
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} must hold JSON; {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold one JSON object; got {type(values).__name__}")
        try:
            return cls.from_json(values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise UserError(f"{rule}; got {value}")
