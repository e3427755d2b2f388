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
from torch.nn.functional import embedding_bag, pad, silu

from model.experts_layout import InputGradients, LayerOutput, WeightGradients, raise_outside_experts

GROUP_ROWS = 512
INVARIANT_ROWS = 64


class Group(NamedTuple):
    """Consecutive segments: the rows start..stop belong to `experts`, `sizes` rows each."""

    start: int
    stop: int
    experts: Sequence[int]
    sizes: Sequence[int]


def forward(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    *,
    gated: bool,
    summed: bool,
    batch_invariant: bool,
    keep: bool,
) -> LayerOutput:
    """See `LayerOutput`. Raises `UserError` for an expert id outside 0..E-1.

    With `batch_invariant` each product has exactly `INVARIANT_ROWS` rows, zeros below the real ones, so that nothing
    about a row's arithmetic depends on how many others there are.
    """
    order_R, counts_E = _sort(expert_indices_NK, w_in.shape[0])
    num_rows, width = order_R.numel(), x_ND.shape[1]
    rows_RD = x_ND.new_empty(num_rows, width)
    pre_RG = x_ND.new_empty(num_rows if keep else 0, w_in.shape[1])
    token_R = order_R // expert_weights_NK.shape[1]
    weight_R1 = expert_weights_NK.reshape(-1, 1).index_select(0, order_R)
    w_in_E, w_out_E = w_in.transpose(1, 2).unbind(0), w_out.transpose(1, 2).unbind(0)

    for group in _invariant_blocks(counts_E) if batch_invariant else _groups(counts_E):
        rows = slice(group.start, group.stop)
        inputs_RD, weights_R1 = x_ND.index_select(0, token_R[rows]), weight_R1[rows]
        if batch_invariant:
            padding = (0, 0, 0, INVARIANT_ROWS - len(inputs_RD))
            inputs_RD, weights_R1 = pad(inputs_RD, padding), pad(weights_R1, padding)
            group = group._replace(sizes=[INVARIANT_ROWS])
        group_pre_RG = inputs_RD.new_empty(len(inputs_RD), w_in.shape[1])
        _multiply(inputs_RD, w_in_E, group_pre_RG, group)
        act_RF = activation(group_pre_RG, gated=gated).mul_(weights_R1)
        out_RD = torch.empty_like(inputs_RD) if batch_invariant else rows_RD[rows]
        _multiply(act_RF, w_out_E, out_RD, group)
        if batch_invariant:
            rows_RD[rows] = out_RD[: group.stop - group.start]
        if keep:
            pre_RG[rows] = group_pre_RG[: group.stop - group.start]
    row_NK = _inverse(order_R).view(expert_indices_NK.shape)
    result = sum_rows(rows_RD, row_NK) if summed else rows_RD[row_NK]
    kept = (order_R, counts_E) if keep else (order_R.new_empty(0), counts_E.new_empty(0))
    return LayerOutput(result, pre_RG, *kept)


def backward(
    d_result: Tensor,
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pre_RG: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    destination: WeightGradients,
    *,
    gated: bool,
    summed: bool,
    needs_x: bool,
    needs_expert_weights: bool,
) -> InputGradients:
    """Gradients of x and of the expert weights; those of w_in and w_out are written to `destination`.

    With A the activation and dA = d_out @ w_out, the gradient of a slot's weight is <dA, A>, so that the slot's
    output need not be kept.
    """
    d_out_MD = d_result.reshape(-1, x_ND.shape[1])
    d_out_row_R = order_R // expert_weights_NK.shape[1] if summed else order_R
    token_R = order_R // expert_weights_NK.shape[1]
    weight_R1 = expert_weights_NK.reshape(-1, 1).index_select(0, order_R)
    w_in_E, w_out_E = w_in.unbind(0), w_out.unbind(0)
    d_w_in_E = () if destination.w_in is None else destination.w_in.unbind(0)
    d_w_out_E = () if destination.w_out is None else destination.w_out.unbind(0)
    d_x_RD = x_ND.new_empty(len(token_R), x_ND.shape[1]) if needs_x else None
    d_weight_R = x_ND.new_empty(len(token_R))

    for group in _groups(counts_E):
        rows = slice(group.start, group.stop)
        d_out_RD, group_pre_RG, weights_R1 = (
            d_out_MD.index_select(0, d_out_row_R[rows]),
            pre_RG[rows],
            weight_R1[rows],
        )
        gate_RF, up_RF = group_pre_RG.chunk(2, dim=1) if gated else (group_pre_RG, None)
        d_act_RF = x_ND.new_empty(gate_RF.shape)
        _multiply(d_out_RD, w_out_E, d_act_RF, group)
        silu_RF = silu(gate_RF)
        act_RF = silu_RF if up_RF is None else silu_RF * up_RF
        if needs_expert_weights:
            torch.sum(d_act_RF * act_RF, dim=1, out=d_weight_R[rows])
        if d_w_out_E:
            _add_weight_gradients(d_out_RD, act_RF * weights_R1, d_w_out_E, group, destination.accumulate)
        if d_x_RD is None and not d_w_in_E:
            continue
        d_act_RF.mul_(weights_R1)
        d_pre_RG = torch.empty_like(group_pre_RG)
        if up_RF is None:
            torch.ops.aten.silu_backward.grad_input(d_act_RF, gate_RF, grad_input=d_pre_RG)
        else:
            d_gate_RF, d_up_RF = d_pre_RG.chunk(2, dim=1)
            torch.mul(d_act_RF, silu_RF, out=d_up_RF)
            torch.ops.aten.silu_backward.grad_input(d_act_RF.mul_(up_RF), gate_RF, grad_input=d_gate_RF)
        if d_x_RD is not None:
            _multiply(d_pre_RG, w_in_E, d_x_RD[rows], group)
        if d_w_in_E:
            inputs_RD = x_ND.index_select(0, token_R[rows])
            _add_weight_gradients(d_pre_RG, inputs_RD, d_w_in_E, group, destination.accumulate)

    if not destination.accumulate:
        for idle in (counts_E == 0).nonzero().flatten().tolist():
            for d_matrix_E in (d_w_in_E, d_w_out_E):
                if d_matrix_E:
                    d_matrix_E[idle].zero_()
    row_NK = _inverse(order_R).view(expert_weights_NK.shape)
    return InputGradients(
        None if d_x_RD is None else sum_rows(d_x_RD, row_NK), d_weight_R[row_NK] if needs_expert_weights else None
    )


def tangent(
    x_ND: Tensor,
    expert_weights_NK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_indices_NK: Tensor,
    tangents: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    gated: bool,
    summed: bool,
) -> Tensor:
    """The directional derivative of `LayerOutput.result` for tangents of the four inputs."""
    order_R, counts_E = _sort(expert_indices_NK, w_in.shape[0])
    t_x_ND, t_weights_NK, t_w_in, t_w_out = tangents
    token_R = order_R // expert_weights_NK.shape[1]
    weight_R1 = expert_weights_NK.reshape(-1, 1).index_select(0, order_R)
    t_weight_R1 = t_weights_NK.reshape(-1, 1).index_select(0, order_R)
    t_rows_RD = x_ND.new_empty(len(token_R), x_ND.shape[1])
    for group in _groups(counts_E):
        start = group.start
        for expert, size in zip(group.experts, group.sizes, strict=True):
            rows = slice(start, start + size)
            w_in_DG, w_out_FD = w_in[expert].to(x_ND.dtype).t(), w_out[expert].to(x_ND.dtype).t()
            inputs_RD = x_ND[token_R[rows]]
            pre_RG = inputs_RD @ w_in_DG
            t_pre_RG = t_x_ND[token_R[rows]] @ w_in_DG + inputs_RD @ t_w_in[expert].to(x_ND.dtype).t()
            act_RF = activation(pre_RG, gated=gated)
            t_act_RF = _activation_tangent(pre_RG, t_pre_RG, gated=gated)
            t_weighted_RF = t_act_RF * weight_R1[rows] + act_RF * t_weight_R1[rows]
            t_w_out_FD = t_w_out[expert].to(x_ND.dtype).t()
            t_rows_RD[rows] = t_weighted_RF @ w_out_FD + (act_RF * weight_R1[rows]) @ t_w_out_FD
            start += size
    row_NK = _inverse(order_R).view(expert_weights_NK.shape)
    return sum_rows(t_rows_RD, row_NK) if summed else t_rows_RD[row_NK]


def activation(pre_RG: Tensor, *, gated: bool) -> Tensor:
    """silu(gate) * up, or silu of the whole. -> R F, a new tensor"""
    if not gated:
        return silu(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=1)
    return silu(gate_RF).mul_(up_RF)


def sum_rows(rows_RD: Tensor, row_NK: Tensor) -> Tensor:
    """The sum of each token's K rows, in the order of its choices. -> N D"""
    if row_NK.numel() == 0:
        return rows_RD.new_zeros(row_NK.shape[0], rows_RD.shape[1])
    if rows_RD.device.type == "cpu":  # one fused gather-and-add, ten times as fast as the loop below
        return embedding_bag(row_NK, rows_RD, mode="sum")
    total_ND = rows_RD[row_NK[:, 0]]
    for row_N in row_NK.unbind(1)[1:]:
        total_ND += rows_RD[row_N]
    return total_ND


def _sort(expert_indices_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in expert order, and how many each expert has."""
    experts_R, order_R = expert_indices_NK.reshape(-1).sort(stable=True)
    if len(experts_R):
        raise_outside_experts(int(experts_R[0]), int(experts_R[-1]), num_experts)
    return order_R, torch.bincount(experts_R, minlength=num_experts)


def _inverse(order_R: Tensor) -> Tensor:
    """Row of each slot."""
    row_R = torch.empty_like(order_R)
    row_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return row_R


def _groups(counts_E: Tensor) -> Iterator[Group]:
    """The experts that have rows, in groups that close as soon as they hold `GROUP_ROWS` rows."""
    experts: list[int] = []
    sizes: list[int] = []
    start = stop = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            experts.append(expert)
            sizes.append(count)
            stop += count
        if stop - start >= GROUP_ROWS:
            yield Group(start, stop, experts, sizes)
            experts, sizes, start = [], [], stop
    if experts:
        yield Group(start, stop, experts, sizes)


def _invariant_blocks(counts_E: Tensor) -> Iterator[Group]:
    """Each expert's rows in pieces of at most `INVARIANT_ROWS`."""
    counts: list[int] = counts_E.tolist()
    for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        for start in range(end - count, end, INVARIANT_ROWS):
            stop = min(start + INVARIANT_ROWS, end)
            yield Group(start, stop, [expert], [stop - start])


def _multiply(left: Tensor, matrices: Sequence[Tensor], out: Tensor, group: Group) -> None:
    """out = left @ matrices[expert] on each segment of a group."""
    for expert, left_part, out_part in zip(group.experts, left.split(group.sizes), out.split(group.sizes), strict=True):
        torch.mm(left_part, matrices[expert].to(left.dtype), out=out_part)


def _add_weight_gradients(
    left: Tensor, right: Tensor, gradients: Sequence[Tensor], group: Group, accumulate: bool
) -> None:
    """gradients[expert] = left.T @ right on each segment of a group, added to what is there with `accumulate`."""
    left_parts, right_parts = left.split(group.sizes), right.split(group.sizes)
    for expert, left_part, right_part in zip(group.experts, left_parts, right_parts, strict=True):
        target = gradients[expert]
        if target.dtype != left.dtype:  # weights stored in another type than that of the arithmetic
            product = torch.mm(left_part.t(), right_part, out=left.new_empty(target.shape))
            target.copy_(target + product if accumulate else product)
        elif accumulate:
            target.addmm_(left_part.t(), right_part)
        else:
            torch.mm(left_part.t(), right_part, out=target)


def _activation_tangent(pre_RG: Tensor, t_pre_RG: Tensor, *, gated: bool) -> Tensor:
    if not gated:
        return t_pre_RG * _silu_slope(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=1)
    t_gate_RF, t_up_RF = t_pre_RG.chunk(2, dim=1)
    return t_gate_RF * _silu_slope(gate_RF) * up_RF + silu(gate_RF) * t_up_RF


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = x.sigmoid()
    return sigmoid * (1 + x * (1 - sigmoid))
