"""What a network costs: parameters, FLOPs and KV cache, counted by formula from its config.

Parameters are paid once a layer; FLOPs and KV cache once a step (the paper's FLOP formula, arXiv:2609.01343):

    forward FLOPs a token = steps * (2 D (2 Q C + 2 G C) + 4 Q C n + 2 D E + 6 K D F)    n = mean attended tokens
    training FLOPs a token = 3 * forward
    KV entries a token = 2 * steps * G * C

Ungated experts have two matrices and cost 4 K D F. Non-embedding parameters hold everything but the embedding and the
unembedding: the router and the norm gains are inside. The paper's printed totals demand the router; they fit with and
without the norm gains, which are less than half of the last printed digit, so `norm_gains` is kept apart as well.
"""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import tyro

from smelt_interp.config import ModelConfig
from smelt_interp.costs.knobs import NO_CHANGES, Knobs, apply_knobs
from smelt_interp.costs.network_choice import AttendedTokens, NetworkChoice
from smelt_interp.costs.presets import PAPER_ATTENDED_TOKENS, PAPER_PAIRS, PAPER_ROWS, causal_mean
from smelt_interp.errors import UserError, run_command
from smelt_interp.paper import printed
from smelt_interp.paper.printed import Figure
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, percent, print_json, print_table
from smelt_interp.validation import validated

ROUNDING = 1e-12
"""Of a fraction: 0.9 - 1 is not beyond a tenth."""

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
    # One layer, one expert, one step; below they are multiplied.
    steps = config.num_steps
    query_width = config.num_heads * config.head_width
    kv_width = config.num_kv_heads * config.head_width
    projections = config.width * (2 * query_width + 2 * kv_width)
    router = config.width * config.num_experts
    expert = (3 if config.gated_experts else 2) * config.width * config.expert_width
    gains = 2 * config.width + sum(config.qk_gains)
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
        return all(check.within for check in checks(self, tolerance))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCheck:
    """One of the three mismatches against its tolerance."""

    name: str
    value: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether it is at most what is allowed."""
        return abs(self.value) <= self.allowed + ROUNDING


def checks(found: Mismatch, tolerance: Mismatch) -> tuple[BudgetCheck, BudgetCheck, BudgetCheck]:
    """The three mismatches, each against its tolerance."""
    return (
        BudgetCheck(name="training FLOPs", value=found.flops, allowed=tolerance.flops),
        BudgetCheck(name="total parameters", value=found.total_parameters, allowed=tolerance.total_parameters),
        BudgetCheck(name="KV cache", value=found.kv_bytes, allowed=tolerance.kv_bytes),
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


def figures(config: ModelConfig, counts: Budget) -> dict[str, float]:
    """A budget as flat named numbers, in the order in which they are shown."""
    parameters, flops = counts.parameters, counts.flops
    return {
        "active_parameters": parameters.active,
        "total_parameters": parameters.total,
        "projection_parameters": parameters.projections,
        "router_parameters": parameters.router,
        "expert_parameters": parameters.experts,
        "chosen_expert_parameters": parameters.chosen_experts,
        "norm_gain_parameters": parameters.norm_gains,
        "stored_parameters": parameters.stored,
        "projection_flops": flops.projections,
        "score_flops": flops.scores,
        "router_flops": flops.router,
        "expert_flops": flops.experts,
        "forward_flops": flops.forward,
        "training_flops": flops.training,
        "kv_bytes": counts.kv_bytes,
        "physical_depth": config.num_layers,
        "executed_depth": counts.executed_depth,
        "attended_tokens": counts.attended_tokens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedGeometry:
    """The heads printed for a row of the grid, held against the figures printed beside them."""

    architecture: str
    printed_heads: tuple[int, int, int]
    """Query heads, KV heads, head width."""
    derived_heads: tuple[int, int, int]
    contradictions: tuple[str, ...]
    """One sentence a printed figure that the printed heads do not give; empty where all agree."""


def printed_geometry(scale: str) -> tuple[PrintedGeometry, PrintedGeometry]:
    """Baseline and SMELT of one scale of the paper's grid: what the printed heads contradict.

    The expert width is not printed. It is not needed: printed active and total leave, between their last digits, an
    interval for the attention parameters whatever the expert width, and the printed heads have to lie in it.
    """
    baseline, smelt = (_with_printed_heads(scale, architecture) for architecture in ("baseline", "smelt"))
    reference = budget(baseline, PAPER_ATTENDED_TOKENS)
    return (
        _contradictions(scale, "baseline", baseline, reference),
        _contradictions(scale, "smelt", smelt, reference),
    )


def row_index(scale: str, architecture: str) -> int:
    """The position of a row in the file of printed figures."""
    return list(PAPER_ROWS).index((scale, architecture))


def _with_printed_heads(scale: str, architecture: str) -> ModelConfig:
    heads = printed.numbers("grid", "rows", row_index(scale, architecture), "printed", "heads")
    num_heads, num_kv_heads, head_width = (int(value) for value in heads)
    # One printed head width is odd, which the rotary embedding refuses; no count depends on the embedding.
    return replace(
        PAPER_ROWS[scale, architecture],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        rope_base=None,
    )


def _contradictions(scale: str, architecture: str, config: ModelConfig, reference: Budget) -> PrintedGeometry:
    row = ("grid", "rows", row_index(scale, architecture), "printed")
    counts = budget(config, PAPER_ATTENDED_TOKENS)
    found: list[str] = []
    low, high = attention_interval(config, printed.figure(*row, "active"), printed.figure(*row, "total"))
    if not low <= counts.parameters.projections <= high:
        found.append(
            f"the printed totals leave {low / 1e6:.2f}M to {high / 1e6:.2f}M parameters for attention, "
            f"the printed heads have {counts.parameters.projections / 1e6:.2f}M"
        )
    for name, ours in (
        ("flop_ratio", counts.flops.training / reference.flops.training),
        ("kv_ratio", counts.kv_bytes / reference.kv_bytes),
    ):
        figure = printed.figure(*row, name)
        if not figure.agrees(ours):
            found.append(f"{name} is printed {figure.shown()}, the printed heads give {ours:.3f}")
    derived = PAPER_ROWS[scale, architecture]
    return PrintedGeometry(
        architecture=architecture,
        printed_heads=(config.num_heads, config.num_kv_heads, config.head_width),
        derived_heads=(derived.num_heads, derived.num_kv_heads, derived.head_width),
        contradictions=tuple(found),
    )


def attention_interval(config: ModelConfig, active: Figure, total: Figure) -> tuple[float, float]:
    """Fewest and most attention parameters that printed active and total totals leave, for any expert width."""
    router = config.num_layers * config.width * config.num_experts
    gains = budget(config).parameters.norm_gains
    share = config.top_k / (config.num_experts - config.top_k)
    # active = attention + router (+ gains) + share * (total - active): rises with active, falls with total.
    low = active.bounds[0] * (1 + share) - share * total.bounds[1] - router - gains
    high = active.bounds[1] * (1 + share) - share * total.bounds[0] - router
    return low, high


@validated
class BudgetOptions(NetworkChoice):
    """Count what a network costs, alone or beside the one that it is matched to."""

    knobs: tyro.conf.OmitArgPrefixes[Knobs] = NO_CHANGES
    attended_tokens: AttendedTokens | Literal["own"] = "own"
    """Mean positions that a query attends to. own: 390 for the paper's grid, (context + 1) / 2 for any other."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The budgets of one network or two."""

    budgets: dict[str, dict[str, float]]
    """`figures` of each network by its name, the matched one before its reference."""
    mismatch: Mismatch | None
    """None of one network alone."""
    geometry: tuple[PrintedGeometry, ...]
    """Empty for networks that are not the paper's."""

    @property
    def sentence(self) -> str:
        """The three mismatches and whether they are within the paper's tolerances; empty for one network."""
        if self.mismatch is None:
            return ""
        flops, parameters, kv_cache = checks(self.mismatch, PAPER_TOLERANCE)
        within = "within" if self.mismatch.within(PAPER_TOLERANCE) else "NOT within"
        return (
            f"mismatch: FLOPs {percent(flops.value)}, total parameters {percent(parameters.value)}, KV cache "
            f"{percent(kv_cache.value)}; {within} the paper's tolerances of "
            f"{flops.allowed:.1%}, {parameters.allowed:.1%}, {kv_cache.allowed:.1%}"
        )

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        report: dict[str, object] = {"budgets": self.budgets}
        if self.mismatch is not None:
            within = self.mismatch.within(PAPER_TOLERANCE)
            report["mismatch"] = asdict(self.mismatch) | {
                "largest": self.mismatch.largest,
                "within_paper_tolerance": within,
            }
        if self.geometry:
            report["printed_geometry"] = [asdict(row) for row in self.geometry]
        return report

    def table(self) -> Table:
        """One line a figure, the ratio of two networks in the last column."""
        return Table.side_by_side("Budgets, a token", self.budgets, [self.sentence] if self.sentence else [])

    def geometry_notes(self) -> list[str]:
        """The printed heads beside those of the pair, and what the printed ones contradict."""
        notes: list[str] = []
        for heads in self.geometry:
            notes.append(
                f"{heads.architecture}: heads x KV heads x width printed {' x '.join(map(str, heads.printed_heads))}, "
                f"here {' x '.join(map(str, heads.derived_heads))}"
            )
            notes.extend(f"  contradiction: {sentence}" for sentence in heads.contradictions)
        return notes


def compare(options: BudgetOptions) -> Comparison:
    """What the command shows. Raises `UserError` for networks that are not there or outside their rules."""
    first, *others = options.networks(options.attended_tokens)
    networks = [first._replace(config=apply_knobs(first.config, options.knobs)), *others]
    counts = [budget(network.config, network.attended_tokens) for network in networks]
    return Comparison(
        budgets={network.name: figures(network.config, count) for network, count in zip(networks, counts, strict=True)},
        mismatch=mismatch(*counts) if len(counts) == 2 else None,
        geometry=printed_geometry(options.pair) if options.pair in PAPER_PAIRS else (),
    )


def main() -> None:
    """Print the budgets of one network or two, their mismatch, and for the paper's grid the printed geometry."""
    options = parse(BudgetOptions, prog="python -m smelt_interp.costs.budget", description=__doc__)
    found = compare(options)
    if options.json:
        print_json(found.to_json())
        return
    table = found.table()
    print_table(table._replace(notes=[*table.notes, *found.geometry_notes()]))


if __name__ == "__main__":
    run_command(main)
