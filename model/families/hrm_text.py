"""HRM-Text: two stacks nested. A high cycle runs the low stack some times, then the high stack once.

Layers of the low stack are numbered first. Each run of a stack starts from the sum of both states.
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """LL..LH once a high cycle, each letter a stack."""
    low = [*range(config.num_layers_per_stack)]
    high = [config.num_layers_per_stack + layer for layer in low]
    return in_order([*low * config.L_cycles, *high] * config.H_cycles)


HRM_TEXT = Family(
    layers=("model.L_module.layers.*", "model.H_module.layers.*"), plan=plan, final_norm="model.H_module.final_norm"
)
