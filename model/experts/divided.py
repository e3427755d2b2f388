"""Experts that are divided over ranks: each slot travels to the rank that holds its expert, and back.

The two matrices are DTensors, split along the experts over the ranks of a mesh of one dimension. R counts this rank's
slots in expert order, M those that arrive here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor

from model.experts.call import ExpertCall, ExpertWeights, raise_outside_experts, sum_slots


def run(call: ExpertCall, experts: Callable[[ExpertCall], Tensor]) -> Tensor:
    """What `experts` gives for the whole matrices. -> N D; every rank of the mesh must call.

    Raises `UserError` for an expert id outside 0..E-1.
    """
    w_in, w_out = (cast("DTensor", matrix) for matrix in call.weights)
    mesh = w_in.device_mesh
    num_own = call.num_experts // mesh.size()
    # Which slots go where, and how many come.
    experts_R, order_R = call.expert_indices_NK.flatten().sort(stable=True)
    if len(experts_R):
        raise_outside_experts(int(experts_R[0]), int(experts_R[-1]), call.num_experts)
    sent_P = torch.bincount(experts_R // num_own, minlength=mesh.size())
    sent: list[int] = sent_P.tolist()
    received: list[int] = all_to_all_single_autograd(sent_P, None, None, mesh).tolist()
    # There: one slot a token, its weight left for later.
    arrived_MD = all_to_all_single_autograd(call.x_ND[order_R // call.top_k], received, sent, mesh)
    expert_M = all_to_all_single_autograd(experts_R % num_own, received, sent, mesh)
    own_call = replace(
        call,
        x_ND=arrived_MD,
        expert_indices_NK=expert_M[:, None],
        expert_weights_NK=torch.ones_like(expert_M, dtype=call.expert_weights_NK.dtype)[:, None],
        weights=ExpertWeights(w_in.to_local(), w_out.to_local()),
    )
    # And back, in the order of the slots.
    rows_RD = all_to_all_single_autograd(experts(own_call), sent, received, mesh)
    slot_NKD = rows_RD[order_R.argsort()].unflatten(0, call.expert_indices_NK.shape)
    return sum_slots(slot_NKD * call.expert_weights_NK[..., None]).to(call.x_ND.dtype)
