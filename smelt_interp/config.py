"""The shape of a looped Mixture-of-Experts transformer: one frozen record, its rules, and its JSON form."""

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal, Self, get_args

from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError
from smelt_interp.plan import plan, step_scale
from smelt_interp.sites import SITES

RouterKind = Literal["softmax", "sigmoid"]

LARGEST_COUNT = 10**12
MOST_STEPS = 10_000
"""A plan is a list of hooked steps; one this long is a slip of the keyboard."""
MOST_WEIGHTS = 10**12
"""In one matrix, or in one layer's experts together. Far below it, sizes in bytes fit 64 bits."""
MOST_BITS = 4_096
"""Of a number; longer ones cannot be shown in a message."""

_COUNTS = (
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "num_experts",
    "top_k",
    "expert_width",
    "vocab_size",
    "context",
    "num_visits",
)


def default_loop_scale(num_visits: int) -> float:
    """The factor 1/r on every residual update of the looped span when a network is first built (section 2.2)."""
    return 1.0 / num_visits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that fixes a network. A Baseline is a config with `num_visits=1`.

    Raises `UserError` naming the field, its rule and its value when a field is outside its rule.
    """

    num_layers: int
    """Physical layers, each with its own weights."""
    width: int
    """Width D of the residual stream."""
    num_heads: int
    """Query heads Q."""
    num_kv_heads: int
    """Key/value heads G; each serves num_heads / num_kv_heads query heads."""
    head_width: int
    """Width C of one head; num_heads * head_width need not equal width."""
    num_experts: int
    """Experts E in each layer."""
    top_k: int
    """Experts K that each token is sent to."""
    expert_width: int
    """Hidden width F of one expert."""
    vocab_size: int
    context: int
    """Longest sequence, in tokens."""
    loop_start: int
    """First looped layer."""
    loop_stop: int
    """One past the last looped layer; equal to loop_start when nothing is looped."""
    num_visits: int
    """How often the looped span runs."""
    loop_scale: float
    """Factor on each residual update inside the looped span. A stored number: it stays as trained when more or
    fewer visits are run. `default_loop_scale` gives the value for a new network."""
    norm_eps: float = 1e-6
    rope_base: float | None = 10_000.0
    """Base of the rotary position embedding; None is a network without one."""
    qk_norm: bool = False
    """RMSNorm with a learned gain on each head's query and key, before RoPE."""
    gated_experts: bool = True
    """SwiGLU experts; False is two matrices with SiLU between."""
    router: RouterKind = "softmax"
    """Scores over all experts from which the top k are taken."""
    renormalise_top_k: bool = True
    """Divide the chosen scores by their sum."""
    tied_unembedding: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            value = getattr(self, field.name)
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise UserError(f"{field.name} must be at most {MOST_BITS} bits long; got {value.bit_length()}")
            _check_type(field.name, value, kind)
        for name in _COUNTS:
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
            _require(
                getattr(self, name) <= LARGEST_COUNT, f"{name} must be at most {LARGEST_COUNT}", getattr(self, name)
            )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads must be a multiple of num_kv_heads ({self.num_kv_heads})",
            self.num_heads,
        )
        _require(self.top_k <= self.num_experts, f"top_k must be at most num_experts ({self.num_experts})", self.top_k)
        _require(
            0 <= self.loop_start <= self.loop_stop <= self.num_layers,
            f"the looped span must satisfy 0 <= loop_start <= loop_stop <= num_layers ({self.num_layers})",
            f"{self.loop_start}..{self.loop_stop}",
        )
        _require(
            self.num_visits == 1 or self.loop_start < self.loop_stop,
            f"a span of at least one layer must be looped when num_visits is {self.num_visits}",
            f"{self.loop_start}..{self.loop_stop}",
        )
        steps = self.num_layers + (self.loop_stop - self.loop_start) * (self.num_visits - 1)
        _require(steps <= MOST_STEPS, f"layers times visits must be at most {MOST_STEPS} steps", steps)
        sizes = {
            "num_experts x 2 x expert_width x width": 2 * self.num_experts * self.expert_width * self.width,
            "num_heads x head_width x width": self.num_heads * self.head_width * self.width,
            "vocab_size x width": self.vocab_size * self.width,
        }
        for name, size in sizes.items():
            _require(size <= MOST_WEIGHTS, f"{name} must be at most {MOST_WEIGHTS}", size)
        _require(0 < self.loop_scale <= 1, "loop_scale must be in (0, 1]", self.loop_scale)
        _require(0 < self.norm_eps <= 1, "norm_eps must be above 0 and at most 1", self.norm_eps)
        _require(self.router in get_args(RouterKind), f"router must be one of {get_args(RouterKind)}", self.router)
        if self.rope_base is not None:
            rule = f"rope_base must be above 1 and at most {LARGEST_COUNT}, or null for no rotary embedding"
            _require(1 < self.rope_base <= LARGEST_COUNT, rule, self.rope_base)
            _require(self.head_width % 2 == 0, "head_width must be even with a rotary embedding", self.head_width)

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
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if unknown := sorted(set(values) - known):
            raise UserError(f"config keys must be fields of ModelConfig; got {', '.join(unknown)}")
        if missing := sorted(required - set(values)):
            raise UserError(f"a config must give every required field; missing {', '.join(missing)}")
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every type

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON file. Raises `UserError` for a file that is absent, not JSON, or outside the rules."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"a config file must exist; got {path}") from None
        except OSError as error:
            raise UserError(f"a config file must be readable; got {path}: {error.strerror}") from None
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


def _check_type(name: str, value: object, annotation: str) -> None:
    if "bool" in annotation:
        holds = isinstance(value, bool)
    elif "int" in annotation:
        holds = isinstance(value, int) and not isinstance(value, bool)
    elif "float" in annotation:
        holds = (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
            "None" in annotation and value is None
        )
    else:
        holds = isinstance(value, str)
    _require(holds, f"{name} must be of type {annotation}", repr(value))
