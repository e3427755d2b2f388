"""ALBERT: one group of layers, or a few, run again and again over the whole depth; every token sees all others.

A norm follows each sum, so what a sublayer adds has no site of its own, and no norm stands before one.
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """The groups share the depth equally; a group's layers run one after the other."""
    inner, depth, groups = config.inner_group_num, config.num_hidden_layers, config.num_hidden_groups
    of_step = [int(step / (depth / groups)) for step in range(depth)]
    return in_order([inner * group + layer for group in of_step for layer in range(inner)])


ALBERT = Family(
    layers=("albert.encoder.albert_layer_groups.*.albert_layers.*",),
    plan=plan,
    final_norm="",
    attention="attention",
    reads_out=False,
    rotary=False,
    projections={},
    attn_out="",
    mlp_out="",
    first_norm="",
    second_norm="",
    norm="LN",
    gated_mlp=False,
    causal=False,
    masked=True,
)
