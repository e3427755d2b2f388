"""The expert layer in plain torch operations: sort once, one matrix product per expert, a backward written by hand.

Slots (token n, choice k) are sorted by expert, so that each expert owns a contiguous segment of rows. Segments are
taken in groups of about `GROUP_ROWS` rows, which keeps the gathered inputs and the activations of a group in the
processor's cache between the products. An expert's weights are converted to the arithmetic type one expert at a time.

R counts rows (slots in expert order, R = N K); G is the width of the first product, 2F gated and F ungated.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, silu

from model.experts.call import ExpertCall, Gradients, KeptValues, Needs, raise_outside_experts

GROUP_ROWS = 512
"""A group of experts closes when it has so many rows; 512 rows of inputs and activations fit a second-level cache."""


class ExpertGroup(NamedTuple):
    """Consecutive segments: the rows start..stop belong to `experts`, `sizes` rows each."""

    start: int
    stop: int
    experts: Sequence[int]
    sizes: Sequence[int]


def forward(call: ExpertCall, *, summed: bool, keep: bool) -> tuple[Tensor, KeptValues]:
    """N D with the slots summed, else N K D. Raises `UserError` for an expert id outside 0..E-1."""
    order_R, row_NK, counts = _sort(call)
    token_R, weight_R1 = _tokens_and_weights(call, order_R)
    rows_RD = call.x_ND.new_empty(len(order_R), call.width)
    pre_RG = call.x_ND.new_empty(len(order_R) if keep else 0, call.pre_width)
    w_in_EDG, w_out_EFD = (matrix.transpose(1, 2) for matrix in call.weights)
    for group in _groups(counts):
        rows = slice(group.start, group.stop)
        group_pre_RG = pre_RG[rows] if keep else pre_RG.new_empty(group.stop - group.start, call.pre_width)
        _multiply(call.x_ND.index_select(0, token_R[rows]), w_in_EDG, group_pre_RG, group)
        act_RF = activation(group_pre_RG, gated=call.gated).mul_(weight_R1[rows])
        _multiply(act_RF, w_out_EFD, rows_RD[rows], group)
    result = sum_rows(rows_RD, row_NK) if summed else rows_RD[row_NK]
    if keep:
        return result, KeptValues(pre_RG, order_R, order_R.new_tensor(counts))
    return result, KeptValues(pre_RG, order_R.new_empty(0), order_R.new_empty(0))


def backward(d_result: Tensor, call: ExpertCall, kept: KeptValues, *, summed: bool, needs: Needs) -> Gradients:
    """The gradients that `needs` asks for.

    With A the activation and dA = d_out @ w_out, the gradient of a slot's weight is <dA, A>, so that the slot's
    output need not be kept.
    """
    (w_in, w_out), x_ND, order_R = call.weights, call.x_ND, kept.order_R
    d_out_MD = d_result.reshape(-1, call.width)
    token_R, weight_R1 = _tokens_and_weights(call, order_R)
    d_out_row_R = token_R if summed else order_R
    counts: list[int] = kept.counts_E.tolist()
    d_w_in = torch.empty_like(w_in) if needs.w_in else None
    d_w_out = torch.empty_like(w_out) if needs.w_out else None
    d_x_RD = x_ND.new_empty(len(order_R), call.width) if needs.x_ND else None
    d_weight_R = x_ND.new_empty(len(order_R))

    for group in _groups(counts):
        # back through the down product
        rows = slice(group.start, group.stop)
        d_out_RD, pre_RG = d_out_MD.index_select(0, d_out_row_R[rows]), kept.pre_RG[rows]
        gate_RF, up_RF = pre_RG.chunk(2, dim=1) if call.gated else (pre_RG, None)
        d_act_RF = x_ND.new_empty(gate_RF.shape)
        _multiply(d_out_RD, w_out, d_act_RF, group)
        silu_RF = silu(gate_RF)
        act_RF = silu_RF if up_RF is None else silu_RF * up_RF
        if needs.expert_weights_NK:
            torch.sum(d_act_RF * act_RF, dim=1, out=d_weight_R[rows])
        if d_w_out is not None:
            _weight_gradient(d_out_RD, act_RF * weight_R1[rows], d_w_out, group)
        if d_x_RD is None and d_w_in is None:
            continue
        # back through the activation, in place where a number is not read again
        d_act_RF.mul_(weight_R1[rows])
        d_pre_RG = torch.empty_like(pre_RG)
        if up_RF is None:
            torch.ops.aten.silu_backward.grad_input(d_act_RF, gate_RF, grad_input=d_pre_RG)
        else:
            d_gate_RF, d_up_RF = d_pre_RG.chunk(2, dim=1)
            torch.mul(d_act_RF, silu_RF, out=d_up_RF)
            torch.ops.aten.silu_backward.grad_input(d_act_RF.mul_(up_RF), gate_RF, grad_input=d_gate_RF)
        # back through the up product
        if d_x_RD is not None:
            _multiply(d_pre_RG, w_in, d_x_RD[rows], group)
        if d_w_in is not None:
            _weight_gradient(d_pre_RG, x_ND.index_select(0, token_R[rows]), d_w_in, group)

    for start, stop in _idle(counts):
        for d_matrix in (d_w_in, d_w_out):
            if d_matrix is not None:
                d_matrix[start:stop].zero_()
    row_NK = _inverse(order_R).view(call.expert_indices_NK.shape)
    return Gradients(
        None if d_x_RD is None else sum_rows(d_x_RD, row_NK),
        d_weight_R[row_NK].to(call.expert_weights_NK.dtype) if needs.expert_weights_NK else None,
        d_w_in,
        d_w_out,
    )


def tangent(call: ExpertCall, tangents: Sequence[Tensor], *, summed: bool) -> Tensor:
    """The directional derivative of the result for tangents of x, of the expert weights and of both matrices."""
    order_R, row_NK, counts = _sort(call)
    (w_in, w_out), x_ND = call.weights, call.x_ND
    t_x_ND, t_weights_NK, t_w_in, t_w_out = tangents
    token_R, weight_R1 = _tokens_and_weights(call, order_R)
    t_weight_R1 = t_weights_NK.reshape(-1, 1).index_select(0, order_R).to(x_ND.dtype)
    t_rows = [t_x_ND[:0]]  # joined at the end: a write into one buffer would refuse the tangents that jacfwd batches
    for expert, (stop, size) in enumerate(zip(accumulate(counts), counts, strict=True)):
        if size == 0:
            continue
        rows = slice(stop - size, stop)
        w_in_DG, w_out_FD = w_in[expert].to(x_ND.dtype).t(), w_out[expert].to(x_ND.dtype).t()
        inputs_RD = x_ND[token_R[rows]]
        pre_RG = inputs_RD @ w_in_DG
        t_pre_RG = t_x_ND[token_R[rows]] @ w_in_DG + inputs_RD @ t_w_in[expert].to(x_ND.dtype).t()
        act_RF = activation(pre_RG, gated=call.gated)
        t_act_RF = _activation_tangent(pre_RG, t_pre_RG, gated=call.gated)
        t_weighted_RF = t_act_RF * weight_R1[rows] + act_RF * t_weight_R1[rows]
        t_w_out_FD = t_w_out[expert].to(x_ND.dtype).t()
        t_rows.append(t_weighted_RF @ w_out_FD + (act_RF * weight_R1[rows]) @ t_w_out_FD)
    t_slot_NKD = torch.cat(t_rows)[row_NK]
    return t_slot_NKD.sum(1) if summed else t_slot_NKD


def activation(pre_RG: Tensor, *, gated: bool) -> Tensor:
    """silu(gate) * up, or silu of the whole. -> R F, a new tensor"""
    if not gated:
        return silu(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=1)
    return silu(gate_RF).mul_(up_RF)


def sum_rows(rows_RD: Tensor, row_NK: Tensor) -> Tensor:
    """The sum of each token's K rows, in the order of its choices, in float32 at least. -> N D"""
    if row_NK.numel() == 0:
        return rows_RD.new_zeros(row_NK.shape[0], rows_RD.shape[1])
    if rows_RD.device.type == "cpu" and rows_RD.dtype in (torch.float32, torch.float64):
        # one fused gather-and-add, ten times as fast as the loop below
        return embedding_bag(row_NK, rows_RD, mode="sum")
    total_ND = rows_RD[row_NK[:, 0]].to(torch.promote_types(rows_RD.dtype, torch.float32))
    for row_N in row_NK.unbind(1)[1:]:
        total_ND += rows_RD[row_N]
    return total_ND.to(rows_RD.dtype)


def _tokens_and_weights(call: ExpertCall, order_R: Tensor) -> tuple[Tensor, Tensor]:
    """The token of each row, and its weight in the arithmetic type."""
    weight_R1 = call.expert_weights_NK.reshape(-1, 1).index_select(0, order_R)
    return order_R // call.top_k, weight_R1.to(call.x_ND.dtype)


def _sort(call: ExpertCall) -> tuple[Tensor, Tensor, list[int]]:
    """Slots in expert order, the row of each slot, and how many slots each expert has.

    Raises `UserError` for an id outside 0..E-1.
    """
    sorted_R, order_R = call.expert_indices_NK.reshape(-1).sort(stable=True)
    if len(sorted_R):
        raise_outside_experts(int(sorted_R[0]), int(sorted_R[-1]), call.num_experts)
    row_NK = _inverse(order_R).view(call.expert_indices_NK.shape)
    return order_R, row_NK, torch.bincount(sorted_R, minlength=call.num_experts).tolist()


def _inverse(order_R: Tensor) -> Tensor:
    """Row of each slot."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def _groups(counts: Sequence[int]) -> Iterator[ExpertGroup]:
    """The experts that have rows, in groups that close as soon as they hold `GROUP_ROWS` rows."""
    experts: list[int] = []
    sizes: list[int] = []
    start = stop = 0
    for expert, count in enumerate(counts):
        if count:
            experts.append(expert)
            sizes.append(count)
            stop += count
        if stop - start >= GROUP_ROWS:
            yield ExpertGroup(start, stop, experts, sizes)
            experts, sizes, start = [], [], stop
    if experts:
        yield ExpertGroup(start, stop, experts, sizes)


def _idle(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive experts without rows."""
    start = 0
    for expert, count in enumerate((*counts, 1)):
        if count:
            if start < expert:
                yield start, expert
            start = expert + 1


def _multiply(left: Tensor, matrices: Tensor, out: Tensor, group: ExpertGroup) -> None:
    """out = left @ matrices[expert] on each segment of a group."""
    convert = matrices.dtype != left.dtype
    left_parts, out_parts = left.split_with_sizes(group.sizes), out.split_with_sizes(group.sizes)
    for expert, left_part, out_part in zip(group.experts, left_parts, out_parts, strict=True):
        matrix = matrices.select(0, expert)
        torch.mm(left_part, matrix.to(left.dtype) if convert else matrix, out=out_part)


def _weight_gradient(left: Tensor, right: Tensor, out: Tensor, group: ExpertGroup) -> None:
    """out[expert] = left.T @ right on each segment of a group."""
    left_parts, right_parts = left.split_with_sizes(group.sizes), right.split_with_sizes(group.sizes)
    for expert, left_part, right_part in zip(group.experts, left_parts, right_parts, strict=True):
        target = out.select(0, expert)
        if target.dtype == left.dtype:
            torch.mm(left_part.t(), right_part, out=target)
        else:  # weights stored in another type than that of the arithmetic
            target.copy_(torch.mm(left_part.t(), right_part))


def _activation_tangent(pre_RG: Tensor, t_pre_RG: Tensor, *, gated: bool) -> Tensor:
    if not gated:
        return t_pre_RG * _silu_slope(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=1)
    t_gate_RF, t_up_RF = t_pre_RG.chunk(2, dim=1)
    return t_gate_RF * _silu_slope(gate_RF) * up_RF + silu(gate_RF) * t_up_RF


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = x.sigmoid()
    return sigmoid * (1 + x * (1 - sigmoid))
