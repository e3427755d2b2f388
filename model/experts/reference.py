"""The expert layer as a loop that can be read at a glance: the oracle of the other backends.

Ordinary differentiable operations in any floating type; every order of derivative, forward or backward, is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.experts.layout import raise_outside_experts


class ReferenceSlots(NamedTuple):
    """What the loop computes for each slot (token n, choice k)."""

    weighted_NKD: Tensor
    pre_NKG: Tensor


def forward(
    x_ND: Tensor, expert_indices_NK: Tensor, expert_weights_NK: Tensor, w_in: Tensor, w_out: Tensor, *, gated: bool
) -> ReferenceSlots:
    """For each expert: pick its slots, two products with SwiGLU (or SiLU) between, times the slot's weight.

    Autocast changes nothing: the arithmetic follows the tensors' type. Raises `UserError` for an expert id outside
    0..E-1.
    """
    if expert_indices_NK.numel():
        low, high = expert_indices_NK.aminmax()
        raise_outside_experts(int(low), int(high), len(w_in))
    with torch.autocast(x_ND.device.type, enabled=False):
        return _loop(x_ND, expert_indices_NK, expert_weights_NK, w_in, w_out, gated=gated)


def activation(pre_RG: Tensor, *, gated: bool) -> Tensor:
    """silu(gate) * up, or silu of the whole; any leading axes, the last one shrinks from G to F."""
    if not gated:
        return torch.nn.functional.silu(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_RF) * up_RF


def _loop(
    x_ND: Tensor, expert_indices_NK: Tensor, expert_weights_NK: Tensor, w_in: Tensor, w_out: Tensor, *, gated: bool
) -> ReferenceSlots:
    num_tokens, top_k = expert_indices_NK.shape
    weighted_NKD = x_ND.new_zeros(num_tokens, top_k, x_ND.shape[1])
    pre_NKG = x_ND.new_zeros(num_tokens, top_k, w_in.shape[1])
    for expert, (w_in_GD, w_out_DF) in enumerate(zip(w_in.unbind(0), w_out.unbind(0), strict=True)):
        token, choice = torch.where(expert_indices_NK == expert)
        pre_RG = x_ND[token] @ w_in_GD.to(x_ND.dtype).T
        out_RD = activation(pre_RG, gated=gated) @ w_out_DF.to(x_ND.dtype).T
        weighted_NKD = weighted_NKD.index_put((token, choice), out_RD * expert_weights_NK[token, choice, None])
        pre_NKG = pre_NKG.index_put((token, choice), pre_RG)
    return ReferenceSlots(weighted_NKD, pre_NKG)
