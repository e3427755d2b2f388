"""Ready configs: the eight rows of the paper's grid, and two pairs that train on two cores.

The head geometry that the paper prints for seven of its eight rows contradicts the figures printed beside it; the
rows here have one that reproduces every one of them (`python -m smelt_interp.costs.budget --pair 200M` shows both). It
is not the only one: ungated experts of 1.5 times the width have the same parameters and FLOPs as these SwiGLU ones,
and the paper's FLOP formula is the ungated one.
"""

from dataclasses import dataclass, replace

from smelt_interp.config import ModelConfig, default_loop_scale
from smelt_interp.costs.spans import middle_layers
from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from smelt_interp.sites import nearest

PAPER_VISITS = 2
PAPER_SPAN = 0.5
"""Every SMELT row of the grid visits its middle half twice."""

PAPER_VOCABULARY = 32_000
"""As in the paper's code; none of its figures counts the embedding, so none depends on this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A Baseline and the looped network matched to it."""

    baseline: ModelConfig
    smelt: ModelConfig
    attended_tokens: float
    """Mean number of positions that a query attends to, for the FLOPs of the scores."""


def _paper_row(index: int) -> ModelConfig:
    row = ("grid", "rows", index)
    num_layers = printed.integer(*row, "n_layers")
    num_heads, num_kv_heads, head_width = (int(value) for value in printed.numbers(*row, "derived", "heads"))
    num_visits = PAPER_VISITS if printed.text(*row, "arch") == "smelt" else 1
    looped = middle_layers(num_layers, PAPER_SPAN)
    return ModelConfig(
        num_layers=num_layers,
        width=printed.integer(*row, "d_model"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        num_experts=printed.integer(*row, "n_experts"),
        top_k=printed.integer("architecture", "top_k"),
        expert_width=printed.integer(*row, "derived", "d_ff"),
        vocab_size=PAPER_VOCABULARY,
        context=printed.integer("architecture", "train_context_tokens"),
        loop_start=looped.start,
        loop_stop=looped.stop,
        num_visits=num_visits,
        loop_scale=default_loop_scale(num_visits),
    )


PAPER_ATTENDED_TOKENS = printed.number("grid", "derived_mean_attended_tokens")
"""Mean attended length that reproduces the grid's FLOP ratios; any value of the file's range does."""

PAPER_ROWS: dict[tuple[str, str], ModelConfig] = {
    (printed.text("grid", "rows", index, "scale"), printed.text("grid", "rows", index, "arch")): _paper_row(index)
    for index in range(printed.length("grid", "rows"))
}
"""Every row of the grid by scale ("200M") and architecture ("baseline", "smelt")."""

PAPER_PAIRS: dict[str, Pair] = {
    scale: Pair(
        baseline=PAPER_ROWS[scale, "baseline"],
        smelt=PAPER_ROWS[scale, "smelt"],
        attended_tokens=PAPER_ATTENDED_TOKENS,
    )
    for scale, architecture in PAPER_ROWS
    if architecture == "smelt"
}

DEMO_SMELT = ModelConfig(
    num_layers=8,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    num_experts=16,
    top_k=2,
    expert_width=64,
    vocab_size=259,
    context=160,
    loop_start=2,
    loop_stop=6,
    num_visits=2,
    loop_scale=0.5,
)
DEMO_BASELINE = ModelConfig(
    num_layers=8,
    width=72,
    num_heads=4,
    num_kv_heads=2,
    head_width=24,
    num_experts=11,
    top_k=2,
    expert_width=80,
    vocab_size=259,
    context=160,
    loop_start=2,
    loop_stop=6,
    num_visits=1,
    loop_scale=1.0,
)


LONG_CONTEXT = 512
"""Holds a Dyck query after the paper's 32 demonstrations: 33 lines of at most 14 tokens, and BOS. The demo pair is what
the matcher finds at this context too."""


def causal_mean(context: int) -> float:
    """Mean positions that a query sees, itself among them, over one full sequence: (context + 1) / 2."""
    return (context + 1) / 2


PAIRS: dict[str, Pair] = {
    **PAPER_PAIRS,
    "demo": Pair(baseline=DEMO_BASELINE, smelt=DEMO_SMELT, attended_tokens=causal_mean(DEMO_SMELT.context)),
    "long-demo": Pair(
        baseline=replace(DEMO_BASELINE, context=LONG_CONTEXT),
        smelt=replace(DEMO_SMELT, context=LONG_CONTEXT),
        attended_tokens=causal_mean(LONG_CONTEXT),
    ),
}
"""Every matched pair by the name that commands take."""


def pair(name: str) -> Pair:
    """The pair of this name, or `UserError` with the nearest names."""
    if name not in PAIRS:
        raise UserError(f"a pair must be one of {', '.join(PAIRS)}; got {name!r}{nearest(name, PAIRS)}")
    return PAIRS[name]
