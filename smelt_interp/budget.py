"""What a network costs: parameters, FLOPs and KV cache, counted by formula from its config.

Parameters are paid once a layer; FLOPs and KV cache once a step (section 3.2, "Matched budgets"):

    forward FLOPs a token = steps * (2 D (2 Q C + 2 G C) + 4 Q C n + 2 D E + 6 K D F)    n = mean attended tokens
    training FLOPs a token = 3 * forward
    KV entries a token = 2 * steps * G * C

Ungated experts have two matrices and cost 4 K D F. Non-embedding parameters hold everything but the embedding and the
unembedding: the router and the norm gains are inside. The paper's printed totals demand the router; they fit with and
without the norm gains, which are less than half of the last printed digit, so `norm_gains` is kept apart as well.
"""

from dataclasses import dataclass
from typing import Literal

from smelt_interp import printed
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from smelt_interp.presets import causal_mean

BYTES_PER_ENTRY = 2
"""bfloat16."""

TRAINING_OVER_FORWARD = 3
"""One forward and a backward of twice its cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters by part, over all physical layers."""

    projections: int
    """W_Q, W_K, W_V, W_O."""
    router: int
    experts: int
    """All experts."""
    chosen_experts: int
    """The top k that one token uses."""
    norm_gains: int
    """Gains of ln1, ln2, the final norm, and of queries and keys where they are normalised."""
    embedding: int
    unembedding: int
    """0 when it is the embedding again."""

    @property
    def active(self) -> int:
        """Non-embedding parameters that one token uses, each counted once however often it is visited."""
        return self.projections + self.router + self.chosen_experts + self.norm_gains

    @property
    def total(self) -> int:
        """Non-embedding parameters."""
        return self.projections + self.router + self.experts + self.norm_gains

    @property
    def stored(self) -> int:
        """Every parameter of the network, `numel` summed."""
        return self.total + self.embedding + self.unembedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of one token's forward pass, without embedding and unembedding, over all steps."""

    projections: float
    scores: float
    """Queries with keys, and the pattern with values."""
    router: float
    experts: float

    @property
    def forward(self) -> float:
        """All parts of the forward pass."""
        return self.projections + self.scores + self.router + self.experts

    @property
    def training(self) -> float:
        """Forward and backward."""
        return TRAINING_OVER_FORWARD * self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budgets of one network."""

    parameters: Parameters
    flops: Flops
    """FLOPs a token."""
    attended_tokens: float
    """Mean number of positions that a query attends to."""
    kv_bytes: int
    """Bytes of keys and values that one token leaves in the cache, at two bytes an entry."""
    executed_depth: int
    """Steps of one forward pass."""


def budget(config: ModelConfig, attended_tokens: float | Literal["causal"] = "causal") -> Budget:
    """Every budget of a config.

    `attended_tokens` is the mean number of positions that a query attends to; "causal" is that of one full sequence,
    (context + 1) / 2. Packed documents that cannot see each other give less: the paper's grid has about 390 at a
    context of 4096. Raises `UserError` when it is negative.
    """
    attended = causal_mean(config.context) if attended_tokens == "causal" else attended_tokens
    if not 0 <= attended < float("inf"):
        raise UserError(f"attended_tokens must be 0 or more; got {attended}")
    steps = len(plan(config))
    query_width = config.num_heads * config.head_width
    kv_width = config.num_kv_heads * config.head_width
    projections = config.width * (2 * query_width + 2 * kv_width)
    router = config.width * config.num_experts
    expert = (3 if config.gated_experts else 2) * config.width * config.expert_width
    gains = 2 * config.width + (2 * config.head_width if config.qk_norm else 0)
    embedding = config.vocab_size * config.width
    return Budget(
        parameters=Parameters(
            projections=config.num_layers * projections,
            router=config.num_layers * router,
            experts=config.num_layers * config.num_experts * expert,
            chosen_experts=config.num_layers * config.top_k * expert,
            norm_gains=config.num_layers * gains + config.width,
            embedding=embedding,
            unembedding=0 if config.tied_unembedding else embedding,
        ),
        flops=Flops(
            projections=steps * 2 * projections,
            scores=steps * 4 * query_width * attended,
            router=steps * 2 * router,
            experts=steps * 2 * config.top_k * expert,
        ),
        attended_tokens=attended,
        kv_bytes=2 * steps * kv_width * BYTES_PER_ENTRY,
        executed_depth=steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far a network is from the one it is matched to, as signed fractions of that one's budgets."""

    flops: float
    total_parameters: float
    kv_bytes: float

    @property
    def largest(self) -> float:
        """The largest of the three, without sign."""
        return max(abs(self.flops), abs(self.total_parameters), abs(self.kv_bytes))

    def within(self, tolerance: "Mismatch") -> bool:
        """Whether each of the three is at most the tolerance's."""
        return (
            abs(self.flops) <= tolerance.flops
            and abs(self.total_parameters) <= tolerance.total_parameters
            and abs(self.kv_bytes) <= tolerance.kv_bytes
        )


PAPER_TOLERANCE = Mismatch(
    flops=printed.number("grid", "max_mismatch_printed", "flops"),
    total_parameters=printed.number("grid", "max_mismatch_printed", "total_params"),
    kv_bytes=printed.number("grid", "max_mismatch_printed", "kv_cache"),
)
"""The largest mismatches that the paper states for its grid."""


def mismatch(matched: Budget, reference: Budget) -> Mismatch:
    """The three mismatches of a network against the one that it is matched to."""
    return Mismatch(
        flops=matched.flops.training / reference.flops.training - 1,
        total_parameters=matched.parameters.total / reference.parameters.total - 1,
        kv_bytes=matched.kv_bytes / reference.kv_bytes - 1,
    )
