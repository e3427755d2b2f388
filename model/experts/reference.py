"""The expert layer as a loop that can be read at a glance: the oracle of the other backends.

Ordinary differentiable operations in any floating type; every order of derivative, forward or backward, is exact.
"""

import torch
from torch import Tensor

from model.experts.call import ExpertCall, KeptValues, raise_outside_experts


def forward(call: ExpertCall) -> tuple[Tensor, KeptValues]:
    """Each slot's weighted output N K D, and the rest of the pass, which carries no gradient.

    Autocast changes nothing: the arithmetic follows the tensors' type. Raises `UserError` for an expert id outside
    0..E-1.
    """
    indices_NK = call.expert_indices_NK
    if indices_NK.numel():
        low, high = indices_NK.aminmax()
        raise_outside_experts(int(low), int(high), call.num_experts)
    with torch.autocast(call.x_ND.device.type, enabled=False):
        weighted_NKD, pre_NKG = _loop(call)
    flat_R = indices_NK.reshape(-1)
    order_R = flat_R.argsort(stable=True)
    pre_RG = pre_NKG.detach().flatten(0, 1)[order_R]
    return weighted_NKD, KeptValues(pre_RG, order_R, torch.bincount(flat_R, minlength=call.num_experts))


def activation(pre_RG: Tensor, *, gated: bool) -> Tensor:
    """silu(gate) * up, or silu of the whole; any leading axes, the last one shrinks from G to F."""
    if not gated:
        return torch.nn.functional.silu(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_RF) * up_RF


def _loop(call: ExpertCall) -> tuple[Tensor, Tensor]:
    """For each expert: pick its slots, two products with SwiGLU (or SiLU) between, times the slot's weight."""
    x_ND, weights_NK = call.x_ND, call.expert_weights_NK
    weighted_NKD = x_ND.new_zeros(*weights_NK.shape, call.width)
    pre_NKG = x_ND.new_zeros(*weights_NK.shape, call.pre_width)
    for expert, (w_in_GD, w_out_DF) in enumerate(zip(*(matrix.unbind(0) for matrix in call.weights), strict=True)):
        token, choice = torch.where(call.expert_indices_NK == expert)
        pre_RG = x_ND[token] @ w_in_GD.to(x_ND.dtype).T
        out_RD = activation(pre_RG, gated=call.gated) @ w_out_DF.to(x_ND.dtype).T
        weighted_NKD = weighted_NKD.index_put((token, choice), out_RD * weights_NK[token, choice, None])
        pre_NKG = pre_NKG.index_put((token, choice), pre_RG)
    return weighted_NKD, pre_NKG
