"""The expert layer: one function that sends tokens through their experts, the same on every backend.

out[n] = sum over k of weight[n, k] * expert(index[n, k])(x[n]), the K terms added in order of k; an expert is SwiGLU,
w_out (silu(gate x) * up x), or two matrices with SiLU between. Backends:

    reference   a loop over experts in ordinary operations: any derivative of any order, slow
    torch       any device: slots sorted once, one product per expert, a backward written by hand, forward-mode too
    triton      NVIDIA GPUs: fused kernels

`auto` is `triton` for CUDA tensors and `torch` for all others; nothing else decides.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from model.experts import reference as experts_reference
from model.experts.autograd import Options, run
from smelt_interp.errors import UserError

Backend = Literal["auto", "reference", "torch", "triton"]

FLOATING_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class ExpertWeights(NamedTuple):
    """The two matrices of every expert."""

    w_in: Tensor
    """E 2F D gated (gate rows first, then up rows), E F D ungated."""
    w_out: Tensor
    """E D F."""


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


def experts(
    x_ND: Tensor,
    expert_indices_NK: Tensor,
    expert_weights_NK: Tensor,
    weights: ExpertWeights,
    *,
    gated: bool = True,
    backend: Backend = "auto",
    batch_invariant: bool = False,
    accumulate_into_grad: bool = False,
) -> Tensor:
    """Send each token through its experts. -> N D in x's type

    `batch_invariant`: a row's result does not depend, to the bit, on which other rows are in the call.
    `accumulate_into_grad`: the backward adds the weights' gradients to their `.grad` in place and hands autograd
    none, which saves a full-size gradient for each of several visits. The weights must then be leaves;
    `torch.autograd.grad`, gradient hooks and sharded training do not see those gradients.

    Raises `UserError` for shapes, types or devices that disagree, for an index outside 0..E-1, and for an option that
    the backend lacks.
    """
    chosen = backend_for(x_ND.device, backend)
    _check(x_ND, expert_indices_NK, expert_weights_NK, weights, gated)
    _check_options(chosen, weights, batch_invariant, accumulate_into_grad)
    x_compute_ND, weights_NK = _in_arithmetic_dtype(x_ND, expert_weights_NK, weights, chosen)
    if chosen == "reference":
        slot_NKD, _ = experts_reference.forward(x_compute_ND, expert_indices_NK, weights_NK, *weights, gated=gated)
        return sum_slots(slot_NKD).to(x_ND.dtype)
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x_ND, expert_weights_NK, *weights)
    )
    options = Options(
        arithmetic=chosen,
        gated=gated,
        summed=True,
        batch_invariant=batch_invariant,
        keep=needs_gradient,
        accumulate_into_grad=accumulate_into_grad,
    )
    return run(x_compute_ND, weights_NK, *weights, expert_indices_NK, options).result.to(x_ND.dtype)


def experts_traced(
    x_ND: Tensor,
    expert_indices_NK: Tensor,
    expert_weights_NK: Tensor,
    weights: ExpertWeights,
    *,
    gated: bool = True,
    backend: Backend = "auto",
    batch_invariant: bool = False,
    accumulate_into_grad: bool = False,
) -> ExpertTrace:
    """The same pass as `experts`, to the bit, with its intermediate values."""
    chosen = backend_for(x_ND.device, backend)
    _check(x_ND, expert_indices_NK, expert_weights_NK, weights, gated)
    _check_options(chosen, weights, batch_invariant, accumulate_into_grad)
    x_compute_ND, weights_NK = _in_arithmetic_dtype(x_ND, expert_weights_NK, weights, chosen)
    if chosen == "reference":
        slot_NKD, pre_NKG = experts_reference.forward(
            x_compute_ND, expert_indices_NK, weights_NK, *weights, gated=gated
        )
        flat = expert_indices_NK.reshape(-1)
        order_R = flat.argsort(stable=True)
        pre_RG = pre_NKG.detach().flatten(0, 1)[order_R]
        counts_E = torch.bincount(flat, minlength=weights.w_in.shape[0])
    else:
        options = Options(
            arithmetic=chosen,
            gated=gated,
            summed=False,
            batch_invariant=batch_invariant,
            keep=True,
            accumulate_into_grad=accumulate_into_grad,
        )
        slot_NKD, pre_RG, order_R, counts_E = run(x_compute_ND, weights_NK, *weights, expert_indices_NK, options)
    activation_RF = experts_reference.activation(pre_RG, gated=gated)
    return ExpertTrace(
        sum_slots(slot_NKD).to(x_ND.dtype), slot_NKD.to(x_ND.dtype), pre_RG, activation_RF, order_R, counts_E
    )


def sum_slots(slot_NKD: Tensor) -> Tensor:
    """The sum over a token's K slots, in order of k: the arithmetic by which `experts` combines them. -> N D

    In float32 at least, rounded once. Never a view of the slots, even of a single one.
    """
    total_ND, *rest = slot_NKD.to(torch.promote_types(slot_NKD.dtype, torch.float32)).unbind(1)
    for slot_ND in rest:
        total_ND = total_ND + slot_ND
    return total_ND.to(slot_NKD.dtype, copy=not rest)


def backend_for(device: torch.device, backend: Backend) -> Literal["reference", "torch", "triton"]:
    """The backend that runs on a device: `auto` is triton on CUDA and torch elsewhere. Raises `UserError` otherwise."""
    if backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if backend not in get_args(Backend):
        raise UserError(f"backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    return backend


def _in_arithmetic_dtype(
    x: Tensor, expert_weights: Tensor, weights: ExpertWeights, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Both in float64 when any input has it; otherwise x in float32 for the reference, and on a CPU, where products of
    half-precision numbers are about 50 times slower without AMX, and in the promoted type of x and weights elsewhere.
    The expert weights are float32 at least."""
    promoted = torch.promote_types(torch.promote_types(x.dtype, weights.w_in.dtype), weights.w_out.dtype)
    if torch.float64 in (promoted, expert_weights.dtype):
        promoted = torch.float64
    elif backend == "reference" or x.device.type == "cpu":
        promoted = torch.float32
    return x.to(promoted), expert_weights.to(torch.promote_types(promoted, torch.float32))


def _check(x: Tensor, expert_indices: Tensor, expert_weights: Tensor, weights: ExpertWeights, gated: bool) -> None:
    w_in, w_out = weights
    if x.ndim != 2:
        raise UserError(f"x must have the axes tokens, width; got {tuple(x.shape)}")
    for name, tensor in (("x", x), ("expert weights", expert_weights), ("w_in", w_in), ("w_out", w_out)):
        if tensor.dtype not in FLOATING_TYPES:
            raise UserError(f"{name} must hold float16, bfloat16, float32 or float64 numbers; got {tensor.dtype}")
        if tensor.device != x.device:
            raise UserError(f"{name} must be on the device of x, {x.device}; got {tensor.device}")
    if expert_indices.device != x.device:
        raise UserError(f"expert indices must be on the device of x, {x.device}; got {expert_indices.device}")
    if w_in.ndim != 3 or w_out.ndim != 3:
        raise UserError(
            f"w_in and w_out must have three axes, experts first; got {tuple(w_in.shape)}, {tuple(w_out.shape)}"
        )
    num_experts, width, expert_width = w_out.shape
    wanted = (num_experts, (2 if gated else 1) * expert_width, width)
    if tuple(w_in.shape) != wanted:
        raise UserError(
            f"w_in must be {wanted} beside w_out {tuple(w_out.shape)} and gated={gated}; got {tuple(w_in.shape)}"
        )
    if x.shape[1] != width:
        raise UserError(f"x must have the experts' width {width}; got {x.shape[1]}")
    if expert_indices.ndim != 2 or expert_indices.shape[0] != x.shape[0] or expert_indices.shape[1] < 1:
        raise UserError(f"expert indices must be ({x.shape[0]}, K), K at least 1; got {tuple(expert_indices.shape)}")
    if expert_indices.dtype not in (torch.int64, torch.int32):
        raise UserError(f"expert indices must be int64 or int32; got {expert_indices.dtype}")
    if expert_weights.shape != expert_indices.shape:
        raise UserError(
            f"expert weights must have the shape of the indices {tuple(expert_indices.shape)}; "
            f"got {tuple(expert_weights.shape)}"
        )


def _check_options(backend: Backend, weights: ExpertWeights, batch_invariant: bool, accumulate_into_grad: bool) -> None:
    if backend == "reference" and (batch_invariant or accumulate_into_grad):
        raise UserError("batch_invariant and accumulate_into_grad must be off on the reference backend; use torch")
    if not accumulate_into_grad:
        return
    if torch.compiler.is_compiling():
        raise UserError("accumulate_into_grad must be off under torch.compile; run the layer eagerly")
    if torch._C._are_functorch_transforms_active():
        raise UserError("accumulate_into_grad must be off under torch.func transforms; they would see no gradient")
    if any(weight.requires_grad and not weight.is_leaf for weight in weights):
        raise UserError("accumulate_into_grad must be given leaf weights, such as parameters; got computed ones")
