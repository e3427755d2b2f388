"""Inkling 2's looped text network: some passes over a span of layers, each from the stream before the span.

What one pass computed reaches the next as messages to queries, keys, values and MLP. The output of a sublayer goes
through a short convolution before it is added, and at the border of a block to nothing at all, so there is no site for
it; convolutions read earlier tokens. Its layers do not all have norms of their own.
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """Before the span, the span once a pass, after it."""
    start, stop = config.loop_layer_index_start, config.loop_layer_index_end
    looped = [*range(start, stop)] * config.loop_num_passes
    return in_order([*range(start), *looped, *range(stop, config.num_hidden_layers)])


INKLING2_LOOP = Family(
    plan=plan,
    reads_out=False,
    rotary=False,
    projections={},
    attn_out="",
    mlp_out="",
    first_norm="",
    second_norm="",
    router="mlp.gate",
    router_kind="sigmoid",
    num_experts="n_routed_experts",
    whole_rows=True,
)
"""Positions enter as a bias on the scores; a sink logit a query and head takes a share of each row."""
