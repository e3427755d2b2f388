"""Huginn, whose code comes with its checkpoint: prelude, a core run `mean_recurrence` times, coda.

Each pass over the core starts from a linear map of the state and the prelude's output. A norm follows each sum, so what
a sublayer adds has no site. The first state, which its code draws at random, is zero here: `init_scale`.
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """The prelude, the core again and again, the coda."""
    start = config.n_layers_in_prelude
    stop = start + config.n_layers_in_recurrent_block
    looped = [*range(start, stop)] * config.mean_recurrence
    return in_order([*range(start), *looped, *range(stop, stop + config.n_layers_in_coda)])


HUGINN = Family(
    layers=("transformer.prelude.*", "transformer.core_block.*", "transformer.coda.*"),
    plan=plan,
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    attention="attn",
    calls="fused",
    projections={},
    attn_out="",
    mlp_out="",
    first_norm="norm_1",
    second_norm="norm_3",
    takes_masks=False,
    options={"init_scale": 0.0},
    context="block_size",
)
