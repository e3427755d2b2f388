"""Derivatives of the expert layer: one autograd function around a backend's arithmetic, and its form for compilers.

Eager calls go through `ExpertLayer` (reverse and forward mode); under `torch.compile` the same arithmetic is the
custom operator `smelt::experts`, which a compiler keeps as one node of its graph.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from model.experts import torch_backend
from model.experts.call import Backend, ExpertCall, ExpertWeights, Gradients, KeptValues, Needs
from smelt_interp.errors import UserError

VMAP_ERROR = "vmap and jacrev must use the reference backend; got another; pass backend='reference'"

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, Backend, bool, bool]
"""A prepared call as autograd wants it, tensors side by side: x, expert weights, w_in, w_out and indices, then gated,
backend, summed (the K slots) and keep (what a backward or a trace needs)."""
_SCHEMA = "Tensor x, Tensor expert_weights, Tensor w_in, Tensor w_out, Tensor indices, bool gated, str backend"


class _Context(Protocol):
    """The part of autograd's context that is used here."""

    options: tuple[bool, Backend, bool]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def save_for_forward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def run(call: ExpertCall, *, summed: bool) -> tuple[Tensor, KeptValues]:
    """One differentiable pass of a prepared call: N D, or N K D if not `summed`; gradients flow through it alone."""
    tensors = (call.x_ND, call.expert_weights_NK, *call.weights)
    keep = not summed or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    arguments = (*tensors, call.expert_indices_NK, call.gated, call.backend, summed, keep)
    if torch.compiler.is_compiling():
        result, *kept = torch.ops.smelt.experts(*arguments)
    elif keep or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        result, *kept = ExpertLayer.apply(*arguments)
    else:  # no derivative of either kind: save autograd's 50 us
        plain: tuple[Tensor, KeptValues] = _backend(call.backend).forward(call, summed=summed, keep=False)
        return plain
    return result, KeptValues(*kept)


class ExpertLayer(torch.autograd.Function):
    """`Arguments` -> the result and the fields of `KeptValues`."""

    @staticmethod
    def forward(*arguments: *Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # one starred parameter, because `apply` binds the signature on every call: 60 us with six
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: _Context, inputs: Arguments, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*inputs[:5])
        _save(ctx, inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, d_result: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if d_result is None:
            return (None,) * 9
        if torch._C._functorch.is_batchedtensor(d_result):
            raise UserError(VMAP_ERROR)
        needs = Needs(*ctx.needs_input_grad[:4])
        return *_backward(d_result, ctx.saved_tensors, *ctx.options, needs), *(None,) * 5

    @staticmethod
    def jvp(ctx: _Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        gated, backend, summed = ctx.options
        if backend != "torch":
            raise UserError("forward-mode derivatives must use the torch backend; got triton; pass backend='torch'")
        call = _call(ctx.saved_tensors, gated, backend)
        known = [
            torch.zeros_like(value) if tangent is None else tangent
            for value, tangent in zip(ctx.saved_tensors[:4], tangents[:4], strict=True)
        ]
        with torch.autocast(call.x_ND.device.type, enabled=False):
            return torch_backend.tangent(call, known, summed=summed), None, None, None

    @staticmethod
    def vmap(*_: object) -> NoReturn:
        raise UserError(VMAP_ERROR)


def _call(tensors: Sequence[Tensor], gated: bool, backend: Backend) -> ExpertCall:
    x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK = tensors[:5]
    return ExpertCall(x_ND, expert_indices_NK, expert_weights_NK, ExpertWeights(w_in, w_out), gated, backend)


def _forward(*arguments: *Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, gated, backend, summed, keep = arguments
    result, kept = _backend(backend).forward(_call(tensors, gated, backend), summed=summed, keep=keep)
    return result, *kept


def _backward(
    d_result: Tensor, saved: Sequence[Tensor], gated: bool, backend: Backend, summed: bool, needs: Needs
) -> Gradients:
    """`saved`: the five tensors of the call, then what its forward kept."""
    call, kept = _call(saved, gated, backend), KeptValues(*saved[5:])
    gradients: Gradients = _backend(backend).backward(d_result, call, kept, summed=summed, needs=needs)
    return gradients


def _backend(name: Backend) -> ModuleType:
    """The module with `forward` and `backward`; Triton exists for Linux only, so it is imported when it is used."""
    if name == "torch":
        return torch_backend
    try:
        from model.experts import triton_backend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError("the triton backend must have the triton package; got none; pass backend='torch'") from None
    return triton_backend


# The same for compilers

_operator = torch.library.custom_op(
    "smelt::experts",
    _forward,
    mutates_args=(),
    schema=f"({_SCHEMA}, bool summed, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_operator.register_fake
def _operator_shapes(*arguments: *Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, gated, backend, summed, keep = arguments
    call = _call(tensors, gated, backend)
    num_tokens, num_rows = len(call.x_ND), call.num_slots if keep else 0
    return (
        call.x_ND.new_empty((num_tokens, call.width) if summed else (num_tokens, call.top_k, call.width)),
        call.x_ND.new_empty(num_rows, call.pre_width),
        call.expert_indices_NK.new_empty(num_rows, dtype=torch.int64),
        call.expert_indices_NK.new_empty(call.num_experts if keep else 0, dtype=torch.int64),
    )


@torch.library.custom_op("smelt::experts_backward", mutates_args=())
def _backward_operator(
    d_result: Tensor, saved: list[Tensor], gated: bool, backend: str, summed: bool, needs: list[bool]
) -> list[Tensor]:
    """The gradients that `needs` asks for, in order, without the others."""
    name: Backend = "triton" if backend == "triton" else "torch"
    gradients = _backward(d_result, saved, gated, name, summed, Needs(*needs))
    return [gradient for gradient in gradients if gradient is not None]


@_backward_operator.register_fake
def _backward_shapes(
    d_result: Tensor, saved: list[Tensor], gated: bool, backend: str, summed: bool, needs: list[bool]
) -> list[Tensor]:
    # the inputs' gradients are contiguous, the weights' lie in memory as the weights do
    shapes = (*(value.new_empty(value.shape) for value in saved[:2]), *map(torch.empty_like, saved[2:4]))
    return [value for value, need in zip(shapes, needs, strict=True) if need]


def _save(ctx: _Context, inputs: Arguments, output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[5:8]
    ctx.save_for_backward(*inputs[:5], *output[1:])


def _differentiate_operator(ctx: _Context, d_result: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:4])
    gradients = iter(torch.ops.smelt.experts_backward(d_result, list(ctx.saved_tensors), *ctx.options, needs))
    return *(next(gradients) if need else None for need in needs), *(None,) * 5


_operator.register_autograd(_differentiate_operator, setup_context=_save)
