"""The expert layer as Triton kernels: what is launched, in which order, over which buffers.

Forward: sort the slots, list the tiles, `up`, `rows_to_slots`, `combine`. Backward: `activation_gradient`,
`rows_to_slots` and `combine` for x, `weight_gradient` for each matrix that is not frozen. Only the pre-activations are
kept between the two. Nothing waits for the device, so the layer can be recorded in a CUDA graph. A call with few slots
that needs no gradient skips the sort: each slot is a tile of its own.

On CPU tensors the kernels run in Triton's interpreter, when TRITON_INTERPRET=1 is set before this module is imported.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.experts import kernels
from model.experts.call import ExpertCall, Gradients, KeptValues, Needs, raise_outside_experts
from model.experts.tiles import COMBINE_COLUMNS, COMBINE_TOKENS, FP_FUSION, TABLE_TILES, Tile, choose
from smelt_interp.errors import UserError


class _Table(NamedTuple):
    """Where each tile of rows begins and whose it is."""

    order_R: Tensor
    expert_P: Tensor
    first_P: Tensor
    stop_P: Tensor


class _Factor(NamedTuple):
    """One side of a weight's gradient."""

    matrix: Tensor
    slots_per_row: int
    """Slot s reads row s // slots_per_row; 0: the matrix is in row order."""


class _ExpertRows(NamedTuple):
    """Which rows each expert has, and the tile that walks them."""

    order_R: Tensor
    start_E1: Tensor
    tile: Tile


def forward(call: ExpertCall, *, summed: bool, keep: bool) -> tuple[Tensor, KeptValues]:
    """N D with the slots summed, else N K D. Raises `UserError` without a GPU, unless interpreted."""
    if call.x_ND.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UserError(f"the triton backend must have tensors on a CUDA device; got {call.x_ND.device}; use torch")
    indices_NK, num_rows = call.expert_indices_NK, call.num_slots
    _check_ids(indices_NK, call.num_experts)
    tiles = choose(call.x_ND.dtype, num_rows, call.num_experts)
    nothing = indices_NK.new_empty(0, dtype=torch.int64)
    if num_rows * 4 <= call.num_experts and not keep:
        table, order_R, counts_E = _unsorted_table(indices_NK), nothing, nothing
    else:
        order_R, start_E1 = _sort(indices_NK, call.num_experts)
        table, counts_E = _tile_table(order_R, start_E1, tiles.up.rows), start_E1.diff()

    x_ND, weights_NK = _contiguous_rows(call.x_ND), call.expert_weights_NK.contiguous()
    act_RF = x_ND.new_empty(num_rows, call.expert_width)
    pre_RG = x_ND.new_empty(num_rows if keep else 0, call.pre_width)
    if num_rows:
        kernels.up[len(table.expert_P), triton.cdiv(call.expert_width, tiles.up.columns)](
            x_ND, call.weights.w_in, *table, act_RF, pre_RG, x_ND.stride(0), *call.weights.w_in.stride(),
            WIDTH=call.width, EXPERT_WIDTH=call.expert_width, TOP_K=call.top_k, GATED=call.gated, KEEP_PRE=keep,
            **_constants(tiles.up, x_ND),
        )  # fmt: skip
    slot_NKD = _rows_to_slots(act_RF, call.weights.w_out, weights_NK, table, tiles.rows_to_slots, transposed=False)
    kept = KeptValues(pre_RG, order_R, counts_E) if keep else KeptValues(pre_RG, nothing.clone(), nothing)
    return _combine(slot_NKD) if summed else slot_NKD, kept


def backward(d_result: Tensor, call: ExpertCall, kept: KeptValues, *, summed: bool, needs: Needs) -> Gradients:
    """The gradients that `needs` asks for."""
    num_rows, slots_per_row = call.num_slots, call.top_k if summed else 1
    (w_in, w_out), order_R = call.weights, kept.order_R
    tiles = choose(call.x_ND.dtype, num_rows, call.num_experts)
    start_E1 = torch.nn.functional.pad(kept.counts_E.cumsum(0), (1, 0))
    table = _tile_table(order_R, start_E1, tiles.activation_gradient.rows)

    # back through the down product and the activation
    x_ND, weights_NK = _contiguous_rows(call.x_ND), call.expert_weights_NK.contiguous()
    d_out_MD = _contiguous_rows(d_result.reshape(-1, call.width))
    d_pre_RG = torch.empty_like(kept.pre_RG)
    weighted_act_RF = x_ND.new_empty(num_rows if needs.w_out else 0, call.expert_width)
    num_blocks = triton.cdiv(call.expert_width, tiles.activation_gradient.columns)
    d_weight_NKC = x_ND.new_empty(*weights_NK.shape, num_blocks, dtype=_accumulator_dtype(x_ND))
    if num_rows:
        kernels.activation_gradient[len(table.expert_P), num_blocks](
            d_out_MD, w_out, kept.pre_RG, weights_NK, *table, d_pre_RG, weighted_act_RF, d_weight_NKC,
            d_out_MD.stride(0), *w_out.stride(),
            WIDTH=call.width, EXPERT_WIDTH=call.expert_width, SLOTS_PER_ROW=slots_per_row, GATED=call.gated,
            KEEP_ACT=needs.w_out, **_constants(tiles.activation_gradient, x_ND),
        )  # fmt: skip

    # the four gradients, each from what the kernel above left
    d_x_ND = d_w_in = d_w_out = None
    if needs.x_ND:
        d_x_ND = _combine(_rows_to_slots(d_pre_RG, w_in, weights_NK, table, tiles.rows_to_slots, transposed=True))
    rows = _ExpertRows(order_R, start_E1, tiles.weight_gradient)
    if needs.w_in:
        d_w_in = _weight_gradient(_Factor(d_pre_RG, 0), _Factor(x_ND, call.top_k), w_in, rows)
    if needs.w_out:
        d_w_out = _weight_gradient(_Factor(d_out_MD, slots_per_row), _Factor(weighted_act_RF, 0), w_out, rows)
    d_weights_NK = d_weight_NKC.sum(-1).to(call.expert_weights_NK.dtype) if needs.expert_weights_NK else None
    return Gradients(d_x_ND, d_weights_NK, d_w_in, d_w_out)


def _rows_to_slots(
    left_RC: Tensor, matrices: Tensor, weights_NK: Tensor, table: _Table, tile: Tile, *, transposed: bool
) -> Tensor:
    """The down product, weighted; `transposed`, the gradient of the gathered inputs, not weighted. -> N K D"""
    depth = left_RC.shape[1]
    stride_expert, stride_out, stride_in = matrices.stride()
    width = matrices.shape[2] if transposed else matrices.shape[1]
    strides = (stride_expert, stride_in, stride_out) if transposed else (stride_expert, stride_out, stride_in)
    slot_NKD = left_RC.new_empty(*weights_NK.shape, width)
    if len(left_RC):
        kernels.rows_to_slots[len(table.expert_P), triton.cdiv(width, tile.columns)](
            left_RC, matrices, weights_NK, *table, slot_NKD, *strides,
            DEPTH=depth, WIDTH=width, WEIGHTED=not transposed, **_constants(tile, left_RC),
        )  # fmt: skip
    return slot_NKD


def _combine(slot_NKD: Tensor) -> Tensor:
    num_tokens, top_k, width = slot_NKD.shape
    out_ND = slot_NKD.new_empty(num_tokens, width)
    if num_tokens:
        kernels.combine[triton.cdiv(num_tokens, COMBINE_TOKENS), triton.cdiv(width, COMBINE_COLUMNS)](
            slot_NKD, out_ND, num_tokens, WIDTH=width, TOP_K=top_k, ACCUMULATE=_accumulator(slot_NKD),
            BLOCK_TOKENS=COMBINE_TOKENS, BLOCK_COLUMNS=COMBINE_COLUMNS, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return out_ND


def _weight_gradient(left: _Factor, right: _Factor, weight: Tensor, rows: _ExpertRows) -> Tensor:
    """left.T @ right over each expert's rows, in memory as the weight lies."""
    num_experts, num_left, num_right = weight.shape
    tile, gradient_EMN = rows.tile, torch.empty_like(weight)
    target_EMN = gradient_EMN if gradient_EMN.is_contiguous() else gradient_EMN.contiguous()
    kernels.weight_gradient[num_experts, triton.cdiv(num_left, tile.rows), triton.cdiv(num_right, tile.columns)](
        left.matrix, right.matrix, rows.order_R, rows.start_E1, target_EMN,
        left.matrix.stride(0), right.matrix.stride(0), NUM_LEFT=num_left, NUM_RIGHT=num_right,
        SLOTS_PER_LEFT=left.slots_per_row, SLOTS_PER_RIGHT=right.slots_per_row, ACCUMULATE=_accumulator(left.matrix),
        BLOCK_LEFT=tile.rows, BLOCK_RIGHT=tile.columns, BLOCK_ROWS=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return gradient_EMN if target_EMN is gradient_EMN else gradient_EMN.copy_(target_EMN)


def _sort(expert_indices_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in expert order, and the first row of each expert followed by the number of rows."""
    experts_R, order_R = expert_indices_NK.reshape(-1).long().sort(stable=True)
    bounds_E1 = torch.arange(num_experts + 1, device=experts_R.device)
    return order_R, torch.searchsorted(experts_R, bounds_E1)


def _tile_table(order_R: Tensor, start_E1: Tensor, block_rows: int) -> _Table:
    """At most R / block_rows full tiles and one that is not full for each expert: a length that needs no count."""
    num_experts, num_rows = len(start_E1) - 1, len(order_R)
    num_tiles = num_rows // block_rows + min(num_experts, num_rows)
    expert_P, first_P, stop_P = order_R.new_empty(3, num_tiles).unbind(0)
    if num_tiles:
        kernels.tile_table[(triton.cdiv(num_tiles, TABLE_TILES),)](
            start_E1, expert_P, first_P, stop_P, num_tiles,
            NUM_EXPERTS=num_experts, BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
            BLOCK_ROWS=block_rows, BLOCK_TILES=TABLE_TILES, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return _Table(order_R, expert_P, first_P, stop_P)


def _unsorted_table(expert_indices_NK: Tensor) -> _Table:
    """One tile of one row for each slot, in the order of the slots."""
    experts_R = expert_indices_NK.reshape(-1).long()
    slots_R = torch.arange(len(experts_R), device=experts_R.device)
    return _Table(slots_R, experts_R, slots_R, slots_R + 1)


def _check_ids(expert_indices_NK: Tensor, num_experts: int) -> None:
    """Interpreted, an id outside the experts raises at once; on a GPU it is asserted before any kernel uses it."""
    if expert_indices_NK.numel() == 0:
        return
    low, high = expert_indices_NK.aminmax()
    if expert_indices_NK.device.type == "cuda":
        torch._assert_async((low >= 0) & (high < num_experts), f"expert indices must lie in 0..{num_experts - 1}")
    else:
        raise_outside_experts(int(low), int(high), num_experts)


def _contiguous_rows(x_ND: Tensor) -> Tensor:
    """Rows may have any stride, the numbers in a row none but 1."""
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def _constants(tile: Tile, x: Tensor) -> dict[str, object]:
    """What a tile and the type of the arithmetic fix of a kernel's code."""
    return {
        "ACCUMULATE": _accumulator(x),
        "BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns, "BLOCK_DEPTH": tile.depth,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": FP_FUSION,
    }  # fmt: skip


def _accumulator_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
