"""Dory: input layers, recurrent layers several times, output layers, on the unit sphere.

A layer moves the stream towards the normed output of a sublayer instead of adding it, so updates have no site. Each
loop starts from the last one's stream plus that of the input layers.
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """Input layers, the recurrent ones once a loop, output layers."""
    start, stop = config.n_input_layers, config.n_input_layers + config.n_recurrent_layers
    looped = [*range(start, stop)] * config.n_recurrent_loops
    return in_order([*range(start), *looped, *range(stop, config.num_hidden_layers)])


DORY = Family(plan=plan, attn_out="", mlp_out="", second_norm="pre_feedforward_layernorm", norm="L2")
