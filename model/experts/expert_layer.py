"""The expert layer: one function that sends tokens through their experts, the same on every backend.

out[n] = sum over k of weight[n, k] * expert(index[n, k])(x[n]), the K terms added in order of k; an expert is SwiGLU,
w_out (silu(gate x) * up x), or two matrices with SiLU between. Backends:

    reference   a loop over experts in ordinary operations: any derivative of any order, slow
    small       CPU, float32, few slots: torch's grouped_mm
    torch       any device: slots sorted once, a product per expert, a backward written by hand, forward-mode too
    triton      NVIDIA GPUs: fused kernels

`auto` is `triton` for CUDA tensors; for others `small` where that suits, else `torch`. Matrices that are DTensors are
those of experts divided over ranks (`model.experts.divided`).
"""

from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.experts import autograd, divided, reference, small_calls
from model.experts.call import Backend, ExpertCall, KeptValues, sum_slots
from smelt_interp.errors import UserError


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
    if isinstance(call.weights.w_in, DTensor):
        return divided.run(call, experts)
    result_ND, _ = _run(call, summed=True)
    return result_ND if result_ND.dtype == call.x_ND.dtype else result_ND.to(call.x_ND.dtype)


def experts_traced(call: ExpertCall) -> ExpertTrace:
    """The same pass as `experts`, to the bit, with its intermediate values. Raises `UserError` for divided experts."""
    if isinstance(call.weights.w_in, DTensor):
        raise UserError("a trace of experts must be asked where they all are; got experts divided over ranks")
    slot_NKD, kept = _run(call, summed=False)
    dtype = call.x_ND.dtype
    activation_RF = reference.activation(kept.pre_RG, gated=call.gated)
    return ExpertTrace(sum_slots(slot_NKD).to(dtype), slot_NKD.to(dtype), kept.pre_RG, activation_RF, *kept[1:])


def backend_for(device: torch.device) -> Backend:
    """The backend that `auto` is on a device, small calls apart."""
    return "triton" if device.type == "cuda" else "torch"


def _run(call: ExpertCall, *, summed: bool) -> tuple[Tensor, KeptValues]:
    """N D with the slots summed, else N K D with everything that a trace shows."""
    if call.backend in ("auto", "small") and small_calls.suits(call):
        return small_calls.forward(call, summed=summed)
    call.check()
    backend = call.backend
    if backend not in get_args(Backend):
        raise UserError(f"backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    if backend == "small":
        raise UserError(
            f"the small backend must have 1 to {small_calls.MOST_SLOTS} slots in float32 on a CPU, widths a multiple "
            "of 4, contiguous weights and no transform; got another call; use torch"
        )
    if backend == "auto":
        backend = backend_for(call.x_ND.device)
    call = call.prepared(backend)
    if backend != "reference":
        return autograd.run(call, summed=summed)
    slot_NKD, kept = reference.forward(call)
    return sum_slots(slot_NKD) if summed else slot_NKD, kept
