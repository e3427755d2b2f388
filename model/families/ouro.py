"""Ouro, whose code comes with its checkpoint: the whole stack `total_ut_steps` times, a norm after each time.

What is added to the stream is normed first (`input_layernorm_2`, `post_attention_layernorm_2`).
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """Every layer, again and again."""
    return in_order([*range(config.num_hidden_layers)] * config.total_ut_steps)


OURO = Family(plan=plan, attn_out="input_layernorm_2", mlp_out="post_attention_layernorm_2")
