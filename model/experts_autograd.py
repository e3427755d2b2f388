"""Derivatives of the expert layer: one autograd function around a backend's arithmetic, and its form for compilers.

Eager calls go through `ExpertLayer` (reverse and forward mode); under `torch.compile` the same arithmetic is the
custom operator `smelt::experts`, which a compiler keeps as one node of its graph.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model import experts_torch
from model.experts_torch import InputGradients, SortedSlots, WeightGradients


class LayerOutput(NamedTuple):
    """What one pass yields."""

    result: Tensor
    """N D with the K slots summed, else N K D."""
    pre_RG: Tensor
    """Pre-activations in expert order; no rows unless they were to be kept."""
    order_R: Tensor
    row_NK: Tensor
    counts_E: Tensor


class Options(NamedTuple):
    """How one pass is to run."""

    gated: bool
    summed: bool
    batch_invariant: bool
    keep_pre_activation: bool
    accumulate_into_grad: bool


class _Context(Protocol):
    """The part of autograd's context that `ExpertLayer` uses."""

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
    if torch.compiler.is_compiling():
        gated, summed, batch_invariant, keep, _ = options
        return LayerOutput(
            *torch.ops.smelt.experts(
                x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, gated, summed, batch_invariant, keep
            )
        )
    return LayerOutput(*ExpertLayer.apply(x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, options))


class ExpertLayer(torch.autograd.Function):
    """(x, expert weights, w_in, w_out, indices, options) -> the fields of `LayerOutput`."""

    @staticmethod
    def forward(
        x_ND: Tensor,
        expert_weights_NK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        expert_indices_NK: Tensor,
        options: Options,
    ) -> tuple[Tensor, ...]:
        return _forward(x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, *options[:4])

    @staticmethod
    def setup_context(
        ctx: _Context,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Options],
        output: tuple[Tensor, ...],
    ) -> None:
        *tensors, _, ctx.options = inputs
        ctx.weights = (tensors[2], tensors[3])  # as they came: their .grad is where gradients may accumulate
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, d_result: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if d_result is None:
            return (None,) * 6
        needs = ctx.needs_input_grad[:4]
        w_in, w_out = ctx.weights
        if ctx.options.accumulate_into_grad:
            destination = WeightGradients(
                _grad_of(w_in) if needs[2] else None, _grad_of(w_out) if needs[3] else None, accumulate=True
            )
        else:
            destination = _fresh_gradients(w_in, w_out, needs)
        d_inputs = _backward(d_result, ctx.saved_tensors, ctx.options.gated, ctx.options.summed, needs, destination)
        d_weights = (None, None) if destination.accumulate else destination[:2]
        return *d_inputs, *d_weights, None, None

    @staticmethod
    def jvp(ctx: _Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, expert_weights_NK, w_in, w_out, _, *slots = ctx.saved_tensors
        inputs = (x_ND, expert_weights_NK, w_in, w_out)
        t_x, t_expert_weights, t_w_in, t_w_out = (
            torch.zeros_like(value) if tangent is None else tangent
            for value, tangent in zip(inputs, tangents[:4], strict=True)
        )
        sorted_slots = SortedSlots(*slots)
        t_rows_RD = experts_torch.tangent(
            *inputs, (t_x, t_expert_weights, t_w_in, t_w_out), sorted_slots, gated=ctx.options.gated
        )
        return _in_token_order(t_rows_RD, sorted_slots.row_NK, ctx.options.summed), None, None, None, None


def _forward(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    gated: bool,
    summed: bool,
    batch_invariant: bool,
    keep_pre_activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = experts_torch.sort_slots(expert_indices_NK, w_in.shape[0])
    rows_RD, pre_RG = experts_torch.forward(
        x_ND, expert_weights_NK, w_in, w_out, slots,
        gated=gated, batch_invariant=batch_invariant, keep_pre_activation=keep_pre_activation,
    )  # fmt: skip
    return _in_token_order(rows_RD, slots.row_NK, summed), pre_RG, *slots


def _backward(
    d_result: Tensor,
    saved: Sequence[Tensor],
    gated: bool,
    summed: bool,
    needs: Sequence[bool],
    destination: WeightGradients,
) -> InputGradients:
    x_ND, expert_weights_NK, w_in, w_out, pre_RG, order_R, row_NK, counts_E = saved
    top_k = expert_weights_NK.shape[1]
    return experts_torch.backward(
        d_result.reshape(-1, x_ND.shape[1]), order_R // top_k if summed else order_R,
        x_ND, expert_weights_NK, w_in, w_out, pre_RG, SortedSlots(order_R, row_NK, counts_E), destination,
        gated=gated, needs_x=needs[0], needs_expert_weights=needs[1],
    )  # fmt: skip


def _in_token_order(rows_RD: Tensor, row_NK: Tensor, summed: bool) -> Tensor:
    return experts_torch.sum_rows(rows_RD, row_NK) if summed else rows_RD[row_NK]


def _fresh_gradients(w_in: Tensor, w_out: Tensor, needs: Sequence[bool]) -> WeightGradients:
    return WeightGradients(
        torch.empty_like(w_in) if needs[2] else None, torch.empty_like(w_out) if needs[3] else None, accumulate=False
    )


def _grad_of(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


@torch.library.custom_op("smelt::experts", mutates_args=())
def _experts_operator(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    gated: bool,
    summed: bool,
    batch_invariant: bool,
    keep_pre_activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _forward(
        x_ND, expert_weights_NK, w_in, w_out, expert_indices_NK, gated, summed, batch_invariant, keep_pre_activation
    )


@_experts_operator.register_fake
def _experts_shapes(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    gated: bool,
    summed: bool,
    batch_invariant: bool,
    keep_pre_activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (num_tokens, top_k), width = expert_indices_NK.shape, x_ND.shape[1]
    num_rows = num_tokens * top_k
    return (
        x_ND.new_empty((num_tokens, width) if summed else (num_tokens, top_k, width)),
        x_ND.new_empty(num_rows if keep_pre_activation else 0, w_in.shape[1]),
        expert_indices_NK.new_empty(num_rows, dtype=torch.int64),
        expert_indices_NK.new_empty(num_tokens, top_k, dtype=torch.int64),
        expert_indices_NK.new_empty(w_in.shape[0], dtype=torch.int64),
    )


@torch.library.custom_op("smelt::experts_backward", mutates_args=())
def _backward_operator(
    d_result: Tensor, saved: Sequence[Tensor], gated: bool, summed: bool, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients that `needs` asks for, in order, without the others."""
    destination = _fresh_gradients(saved[2], saved[3], needs)
    d_inputs = _backward(d_result, saved, gated, summed, needs, destination)
    return [gradient for gradient in (*d_inputs, *destination[:2]) if gradient is not None]


@_backward_operator.register_fake
def _backward_shapes(
    d_result: Tensor, saved: Sequence[Tensor], gated: bool, summed: bool, needs: Sequence[bool]
) -> list[Tensor]:
    return [torch.empty_like(value) for value, need in zip(saved[:4], needs, strict=True) if need]


def _save_for_operator(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool, bool, bool],
    output: tuple[Tensor, ...],
) -> None:
    x_ND, expert_weights_NK, w_in, w_out, _, gated, summed, batch_invariant, keep = inputs
    ctx.options = Options(gated, summed, batch_invariant, keep, accumulate_into_grad=False)
    ctx.save_for_backward(x_ND, expert_weights_NK, w_in, w_out, *output[1:])


def _differentiate_operator(ctx: _Context, d_result: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:4])
    gradients = iter(
        torch.ops.smelt.experts_backward(
            d_result, list(ctx.saved_tensors), ctx.options.gated, ctx.options.summed, needs
        )
    )
    return *(next(gradients) if need else None for need in needs), None, None, None, None, None


_experts_operator.register_autograd(_differentiate_operator, setup_context=_save_for_operator)
