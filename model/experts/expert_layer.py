"""The expert layer: one function that sends tokens through their experts, the same on every backend.

out[n] = sum over k of weight[n, k] * expert(index[n, k])(x[n]), the K terms added in order of k; an expert is SwiGLU,
w_out (silu(gate x) * up x), or two matrices with SiLU between. Backends:

    reference   a loop over experts in ordinary operations: any derivative of any order, slow
    torch       any device: slots sorted once, a product per expert, a backward written by hand, forward-mode too
    triton      NVIDIA GPUs: fused kernels

`auto` is `triton` for CUDA tensors and `torch` for all others; nothing else decides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.experts import autograd, reference
from model.experts.call import ExpertCall, Kept


class ExpertTrace(NamedTuple):
    """One pass with what it computed on the way; gradients flow through `out_ND` and `slot_NKD`, not the rest.

    Rows R are the N K slots in expert order: row r is slot order_R[r] = n K + k.
    """

    out_ND: Tensor
    slot_NKD: Tensor
    """Each slot's weighted output; `sum_slots` of it is `out_ND` to the bit where x has the arithmetic's type."""
    pre_activation_RG: Tensor
    """Gate then up, G = 2F; ungated G = F."""
    activation_RF: Tensor
    """Between the two products, before the slot's weight."""
    order_R: Tensor
    counts_E: Tensor
    """Slots of each expert."""


def experts(call: ExpertCall) -> Tensor:
    """Send each token through its experts. -> N D in x's type

    Raises `UserError` for shapes, types or devices that disagree, for an index outside 0..E-1, and for a backend that
    does not run here.
    """
    result_ND, _ = _run(call, summed=True)
    return result_ND.to(call.x_ND.dtype)


def experts_traced(call: ExpertCall) -> ExpertTrace:
    """The same pass as `experts`, to the bit, with its intermediate values."""
    slot_NKD, kept = _run(call, summed=False)
    dtype = call.x_ND.dtype
    activation_RF = reference.activation(kept.pre_RG, gated=call.gated)
    return ExpertTrace(sum_slots(slot_NKD).to(dtype), slot_NKD.to(dtype), kept.pre_RG, activation_RF, *kept[1:])


def sum_slots(slot_NKD: Tensor) -> Tensor:
    """The sum over a token's K slots, in order of k: the arithmetic by which `experts` combines them. -> N D

    In float32 at least, rounded once. Never a view of the slots, even of a single one.
    """
    total_ND, *rest = slot_NKD.to(torch.promote_types(slot_NKD.dtype, torch.float32)).unbind(1)
    for slot_ND in rest:
        total_ND = total_ND + slot_ND
    return total_ND.to(slot_NKD.dtype, copy=not rest)


def _run(call: ExpertCall, *, summed: bool) -> tuple[Tensor, Kept]:
    """N D with the slots summed, else N K D with everything that a trace shows."""
    call = call.prepared()
    if call.backend != "reference":
        return autograd.run(call, summed=summed)
    slot_NKD, kept = reference.forward(call)
    return sum_slots(slot_NKD) if summed else slot_NKD, kept
