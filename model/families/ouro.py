"""Ouro, whose code comes with its checkpoint: the whole stack `total_ut_steps` times, a norm after each time.

What is added to the stream is normed first (`input_layernorm_2`, `post_attention_layernorm_2`). A gate reads the normed
stream after each time.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """Every layer, again and again."""
    return in_order([*range(config.num_hidden_layers)] * config.total_ut_steps)


def stops(gates_VBT1: Tensor) -> Tensor:
    """The chance (V, B, T) of stopping after each visit: the gate gives the logit of stopping where a token still runs,
    and the last visit has what is left (arXiv:2510.25741, section 3)."""
    stop_VBT = gates_VBT1.squeeze(-1).sigmoid()
    stop_VBT = torch.cat((stop_VBT[:-1], torch.ones_like(stop_VBT[-1:])))
    left_VBT = (1 - stop_VBT).cumprod(0)
    left_VBT = torch.cat((torch.ones_like(left_VBT[:1]), left_VBT[:-1]))
    return stop_VBT * left_VBT


OURO = Family(
    plan=plan,
    attn_out="input_layernorm_2",
    mlp_out="post_attention_layernorm_2",
    halting="model.early_exit_gate",
    stops=stops,
)
