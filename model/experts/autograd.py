"""Derivatives of the expert layer: one autograd function around a backend's arithmetic, and its form for compilers.

Eager calls go through `ExpertLayer` (reverse and forward mode); under `torch.compile` the same arithmetic is the
custom operator `smelt::experts`, which a compiler keeps as one node of its graph.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from model.experts import torch_backend as experts_torch
from model.experts.layout import InputGradients, LayerOutput, WeightGradients
from smelt_interp.errors import UserError

Arithmetic = Literal["torch", "triton"]

VMAP_ERROR = "vmap and jacrev must use the reference backend; got another; pass backend='reference'"


class Options(NamedTuple):
    """How one pass is to run."""

    arithmetic: Arithmetic
    gated: bool
    summed: bool
    batch_invariant: bool
    keep: bool
    """Hand out what a backward or a trace needs."""
    accumulate_into_grad: bool


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Options]


class _Context(Protocol):
    """The part of autograd's context that is used here."""

    options: Options
    weights: tuple[Tensor, Tensor]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def save_for_forward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def run(
    x_ND: Tensor, expert_weights_NK: Tensor, w_in: Tensor, w_out: Tensor, expert_indices_NK: Tensor, options: Options
) -> LayerOutput:
    """One differentiable pass; gradients reach the first four tensors through `result`."""
    tensors = (x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK)
    if torch.compiler.is_compiling():
        return LayerOutput(*torch.ops.smelt.experts(*tensors, *options[:5]))
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if not options.keep and not transformed:  # no derivative of either kind: save autograd's 50 us
        return LayerOutput(*_forward(*tensors, *options[:5]))
    return LayerOutput(*ExpertLayer.apply(*tensors, options))


class ExpertLayer(torch.autograd.Function):
    """(x, expert weights, w_in, w_out, indices, options) -> the fields of `LayerOutput`."""

    @staticmethod
    def forward(*inputs: *Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # one starred parameter, because `apply` binds the signature on every call: 60 us with six
        x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, options = inputs
        return _forward(x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, *options[:5])

    @staticmethod
    def setup_context(ctx: _Context, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, ctx.options = inputs
        ctx.weights = (w_in, w_out)  # as they came: their .grad is where gradients may accumulate
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_ND, expert_weights_NK, w_in, w_out, *output[1:])
        ctx.save_for_forward(x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, d_result: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if d_result is None:
            return (None,) * 6
        if torch._C._functorch.is_batchedtensor(d_result):
            raise UserError(VMAP_ERROR)
        needs = ctx.needs_input_grad[:4]
        w_in, w_out = ctx.weights
        if ctx.options.accumulate_into_grad:
            destination = WeightGradients(
                _grad_of(w_in) if needs[2] else None, _grad_of(w_out) if needs[3] else None, accumulate=True
            )
        else:
            destination = _fresh_gradients(w_in, w_out, needs)
        d_inputs = _backward(d_result, ctx.saved_tensors, ctx.options, needs, destination)
        d_weights = (None, None) if destination.accumulate else destination[:2]
        return *d_inputs, *d_weights, None, None

    @staticmethod
    def jvp(ctx: _Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.options.arithmetic != "torch":
            raise UserError("forward-mode derivatives must use the torch backend; got triton; pass backend='torch'")
        x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK = ctx.saved_tensors
        inputs = (x_ND, expert_weights_NK, w_in, w_out)
        t_x, t_expert_weights, t_w_in, t_w_out = (
            torch.zeros_like(value) if tangent is None else tangent
            for value, tangent in zip(inputs, tangents[:4], strict=True)
        )
        with torch.autocast(x_ND.device.type, enabled=False):
            t_result = experts_torch.tangent(
                *inputs, expert_indices_NK, (t_x, t_expert_weights, t_w_in, t_w_out),
                gated=ctx.options.gated, summed=ctx.options.summed,
            )  # fmt: skip
        return t_result, None, None, None

    @staticmethod
    def vmap(*_: object) -> NoReturn:
        raise UserError(VMAP_ERROR)


def _forward(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    arithmetic: str,
    gated: bool,
    summed: bool,
    batch_invariant: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output: LayerOutput = _backend(arithmetic).forward(
        x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK,
        gated=gated, summed=summed, batch_invariant=batch_invariant, keep=keep,
    )  # fmt: skip
    return output


def _backward(
    d_result: Tensor, saved: Sequence[Tensor], options: Options, needs: Sequence[bool], destination: WeightGradients
) -> InputGradients:
    gradients: InputGradients = _backend(options.arithmetic).backward(
        d_result, *saved, destination,
        gated=options.gated, summed=options.summed, needs_x=needs[0], needs_expert_weights=needs[1],
    )  # fmt: skip
    return gradients


def _backend(arithmetic: str) -> ModuleType:
    """The module with `forward` and `backward`; Triton exists for Linux only, so it is imported when it is used."""
    if arithmetic == "torch":
        return experts_torch
    try:
        from model.experts import triton_backend as experts_triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError("the triton backend must have the triton package; got none; pass backend='torch'") from None
    return experts_triton


def _fresh_gradients(w_in: Tensor, w_out: Tensor, needs: Sequence[bool]) -> WeightGradients:
    return WeightGradients(
        torch.empty_like(w_in) if needs[2] else None, torch.empty_like(w_out) if needs[3] else None, accumulate=False
    )


def _grad_of(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


_operator = torch.library.custom_op("smelt::experts", _forward, mutates_args=())


@_operator.register_fake
def _operator_shapes(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    arithmetic: str,
    gated: bool,
    summed: bool,
    batch_invariant: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (num_tokens, top_k), width = expert_indices_NK.shape, x_ND.shape[1]
    num_rows = num_tokens * top_k
    return (
        x_ND.new_empty((num_tokens, width) if summed else (num_tokens, top_k, width)),
        x_ND.new_empty(num_rows if keep else 0, w_in.shape[1]),
        expert_indices_NK.new_empty(num_rows if keep else 0, dtype=torch.int64),
        expert_indices_NK.new_empty(w_in.shape[0] if keep else 0, dtype=torch.int64),
    )


@torch.library.custom_op("smelt::experts_backward", mutates_args=())
def _backward_operator(
    d_result: Tensor, saved: Sequence[Tensor], arithmetic: str, gated: bool, summed: bool, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients that `needs` asks for, in order, without the others."""
    destination = _fresh_gradients(saved[2], saved[3], needs)
    kind: Arithmetic = "triton" if arithmetic == "triton" else "torch"
    d_inputs = _backward(d_result, saved, Options(kind, gated, summed, False, True, False), needs, destination)
    return [gradient for gradient in (*d_inputs, *destination[:2]) if gradient is not None]


@_backward_operator.register_fake
def _backward_shapes(
    d_result: Tensor, saved: Sequence[Tensor], arithmetic: str, gated: bool, summed: bool, needs: Sequence[bool]
) -> list[Tensor]:
    # the inputs' gradients are contiguous, the weights' lie in memory as the weights do
    shapes = (*(value.new_empty(value.shape) for value in saved[:2]), *map(torch.empty_like, saved[2:4]))
    return [value for value, need in zip(shapes, needs, strict=True) if need]


def _save_for_operator(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Arithmetic, bool, bool, bool, bool],
    output: tuple[Tensor, ...],
) -> None:
    x_ND, expert_weights_NK, w_in, w_out, _, arithmetic, gated, summed, batch_invariant, keep = inputs
    ctx.options = Options(arithmetic, gated, summed, batch_invariant, keep, accumulate_into_grad=False)
    ctx.save_for_backward(x_ND, expert_weights_NK, w_in, w_out, *output[1:])


def _differentiate_operator(ctx: _Context, d_result: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs, options = list(ctx.needs_input_grad[:4]), ctx.options
    gradients = iter(
        torch.ops.smelt.experts_backward(
            d_result, list(ctx.saved_tensors), options.arithmetic, options.gated, options.summed, needs
        )
    )
    return *(next(gradients) if need else None for need in needs), *(None,) * 6


_operator.register_autograd(_differentiate_operator, setup_context=_save_for_operator)
