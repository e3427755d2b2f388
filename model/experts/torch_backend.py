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

from model.experts.layout import InputGradients, LayerOutput, WeightGradients, raise_outside_experts

GROUP_ROWS = 512
"""A group of experts closes when it has so many rows; 512 rows of inputs and activations fit a second-level cache."""
INVARIANT_ROWS = 64
"""Rows of every product in the batch-invariant mode: fewer repeat the weights' traffic, more compute zeros."""
FEW_SLOTS = 64
"""Up to so many slots are sorted in Python."""


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

    With `batch_invariant` each product has exactly `INVARIANT_ROWS` rows, so that nothing about a row's arithmetic
    depends on how many others there are.
    """
    order_R, row_NK, counts = _sort(expert_indices_NK, w_in.shape[0])
    num_rows, pre_width = order_R.numel(), w_in.shape[1]
    rows_RD = x_ND.new_empty(num_rows, x_ND.shape[1])
    pre_RG = x_ND.new_empty(num_rows if keep else 0, pre_width)
    token_R = order_R // expert_weights_NK.shape[1]
    weight_R1 = expert_weights_NK.reshape(-1, 1).index_select(0, order_R).to(x_ND.dtype)
    run, groups = (_run_padded, _invariant_blocks) if batch_invariant else (_run, _groups)
    for group in groups(counts):
        rows = slice(group.start, group.stop)
        group_pre_RG = pre_RG[rows] if keep else x_ND.new_empty(group.stop - group.start, pre_width)
        inputs_RD = x_ND.index_select(0, token_R[rows])
        run(inputs_RD, weight_R1[rows], w_in, w_out, group_pre_RG, rows_RD[rows], group, gated)
    result = sum_rows(rows_RD, row_NK) if summed else rows_RD[row_NK]
    kept = (order_R, order_R.new_tensor(counts)) if keep else (order_R.new_empty(0), order_R.new_empty(0))
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
    token_R = order_R // expert_weights_NK.shape[1]
    d_out_row_R = token_R if summed else order_R
    weight_R1 = expert_weights_NK.reshape(-1, 1).index_select(0, order_R).to(x_ND.dtype)
    d_w_in, d_w_out, accumulate = destination
    counts: list[int] = counts_E.tolist()
    d_x_RD = x_ND.new_empty(len(token_R), x_ND.shape[1]) if needs_x else None
    d_weight_R = x_ND.new_empty(len(token_R))

    for group in _groups(counts):
        rows = slice(group.start, group.stop)
        d_out_RD, group_pre_RG, weights_R1 = (
            d_out_MD.index_select(0, d_out_row_R[rows]),
            pre_RG[rows],
            weight_R1[rows],
        )
        gate_RF, up_RF = group_pre_RG.chunk(2, dim=1) if gated else (group_pre_RG, None)
        d_act_RF = x_ND.new_empty(gate_RF.shape)
        _multiply(d_out_RD, w_out, d_act_RF, group)
        silu_RF = silu(gate_RF)
        act_RF = silu_RF if up_RF is None else silu_RF * up_RF
        if needs_expert_weights:
            torch.sum(d_act_RF * act_RF, dim=1, out=d_weight_R[rows])
        if d_w_out is not None:
            _add_weight_gradients(d_out_RD, act_RF * weights_R1, d_w_out, group, accumulate)
        if d_x_RD is None and d_w_in is None:
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
            _multiply(d_pre_RG, w_in, d_x_RD[rows], group)
        if d_w_in is not None:
            _add_weight_gradients(d_pre_RG, x_ND.index_select(0, token_R[rows]), d_w_in, group, accumulate)

    if not accumulate:
        for start, stop in _idle(counts):
            for d_matrix in (d_w_in, d_w_out):
                if d_matrix is not None:
                    d_matrix[start:stop].zero_()
    row_NK = _inverse(order_R).view(expert_weights_NK.shape)
    return InputGradients(
        None if d_x_RD is None else sum_rows(d_x_RD, row_NK),
        d_weight_R[row_NK].to(expert_weights_NK.dtype) if needs_expert_weights else None,
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
    order_R, row_NK, counts = _sort(expert_indices_NK, w_in.shape[0])
    t_x_ND, t_weights_NK, t_w_in, t_w_out = tangents
    token_R = order_R // expert_weights_NK.shape[1]
    weight_R1 = expert_weights_NK.reshape(-1, 1).index_select(0, order_R).to(x_ND.dtype)
    t_weight_R1 = t_weights_NK.reshape(-1, 1).index_select(0, order_R).to(x_ND.dtype)
    t_rows = [t_x_ND[:0]]  # joined at the end: a write into one buffer would refuse the tangents that jacfwd batches
    for group in _groups(counts):
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
            t_rows.append(t_weighted_RF @ w_out_FD + (act_RF * weight_R1[rows]) @ t_w_out_FD)
            start += size
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


def _run(
    inputs_RD: Tensor,
    weights_R1: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pre_RG: Tensor,
    out_RD: Tensor,
    group: Group,
    gated: bool,
) -> None:
    """One group's rows through their experts, into the buffers `pre_RG` and `out_RD`."""
    _multiply(inputs_RD, w_in.transpose(1, 2), pre_RG, group)
    act_RF = activation(pre_RG, gated=gated).mul_(weights_R1)
    _multiply(act_RF, w_out.transpose(1, 2), out_RD, group)


def _run_padded(
    inputs_RD: Tensor,
    weights_R1: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pre_RG: Tensor,
    out_RD: Tensor,
    group: Group,
    gated: bool,
) -> None:
    """The same for one expert's rows, in buffers of `INVARIANT_ROWS` rows with zeros below the real ones."""
    num_rows = len(inputs_RD)
    padding = (0, 0, 0, INVARIANT_ROWS - num_rows)
    padded_pre_RG = pre_RG.new_empty(INVARIANT_ROWS, pre_RG.shape[1])
    padded_out_RD = out_RD.new_empty(INVARIANT_ROWS, out_RD.shape[1])
    block = group._replace(sizes=[INVARIANT_ROWS])
    _run(pad(inputs_RD, padding), pad(weights_R1, padding), w_in, w_out, padded_pre_RG, padded_out_RD, block, gated)
    pre_RG.copy_(padded_pre_RG[:num_rows])
    out_RD.copy_(padded_out_RD[:num_rows])


def _sort(expert_indices_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Slots in expert order, the row of each slot, and how many slots each expert has.

    Raises `UserError` for an id outside 0..E-1.
    """
    experts_R = expert_indices_NK.reshape(-1)
    num_slots, device = experts_R.numel(), experts_R.device
    if num_slots <= FEW_SLOTS:  # in Python this costs less than the handful of tensor operations below
        experts: list[int] = experts_R.tolist()
        if experts:
            raise_outside_experts(min(experts), max(experts), num_experts)
        counts, row = [0] * num_experts, [0] * num_slots
        order = sorted(range(num_slots), key=experts.__getitem__)
        for index, slot in enumerate(order):
            counts[experts[slot]] += 1
            row[slot] = index
        both = torch.tensor([order, row], dtype=torch.int64, device=device)
        return both[0], both[1].view(expert_indices_NK.shape), counts
    sorted_R, order_R = experts_R.sort(stable=True)
    raise_outside_experts(int(sorted_R[0]), int(sorted_R[-1]), num_experts)
    row_NK = _inverse(order_R).view(expert_indices_NK.shape)
    return order_R, row_NK, torch.bincount(sorted_R, minlength=num_experts).tolist()


def _inverse(order_R: Tensor) -> Tensor:
    """Row of each slot."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def _groups(counts: Sequence[int]) -> Iterator[Group]:
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
            yield Group(start, stop, experts, sizes)
            experts, sizes, start = [], [], stop
    if experts:
        yield Group(start, stop, experts, sizes)


def _idle(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive experts without rows."""
    start = 0
    for expert, count in enumerate((*counts, 1)):
        if count:
            if start < expert:
                yield start, expert
            start = expert + 1


def _invariant_blocks(counts: Sequence[int]) -> Iterator[Group]:
    """Each expert's rows in pieces of at most `INVARIANT_ROWS`."""
    for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        for start in range(end - count, end, INVARIANT_ROWS):
            stop = min(start + INVARIANT_ROWS, end)
            yield Group(start, stop, [expert], [stop - start])


def _multiply(left: Tensor, matrices: Tensor, out: Tensor, group: Group) -> None:
    """out = left @ matrices[expert] on each segment of a group."""
    convert = matrices.dtype != left.dtype
    left_parts, out_parts = left.split_with_sizes(group.sizes), out.split_with_sizes(group.sizes)
    for expert, left_part, out_part in zip(group.experts, left_parts, out_parts, strict=True):
        matrix = matrices.select(0, expert)
        torch.mm(left_part, matrix.to(left.dtype) if convert else matrix, out=out_part)


def _add_weight_gradients(left: Tensor, right: Tensor, gradients: Tensor, group: Group, accumulate: bool) -> None:
    """gradients[expert] = left.T @ right on each segment of a group, added to what is there with `accumulate`."""
    left_parts, right_parts = left.split_with_sizes(group.sizes), right.split_with_sizes(group.sizes)
    for expert, left_part, right_part in zip(group.experts, left_parts, right_parts, strict=True):
        target = gradients.select(0, expert)
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
