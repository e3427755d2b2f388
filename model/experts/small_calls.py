"""Small calls on a CPU: few slots one by one, more of them through torch's `grouped_mm`, in ordinary operations.

In a call of a millisecond what counts is how few operations there are, and autograd's own backward beats one written by
hand in Python. `auto` takes this backend wherever `suits` holds.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import grouped_mm, silu

from model.experts.call import ExpertCall, KeptValues, raise_outside_experts, sum_slots

MOST_SLOTS = 2048
"""With more of them, groups that stay in the processor's cache are faster (docs/kernels.md)."""
FEW_SLOTS = 16
"""Up to so many slots a product of matrix and vector each costs less than sorting."""
NOTHING = KeptValues(torch.empty(0, 0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def suits(call: ExpertCall) -> bool:
    """Whether the call is valid and small, and `grouped_mm` takes all its products: float32 on a CPU, contiguous
    matrices, rows and addresses a multiple of 16 bytes, at least one row, no derivative but the reverse one.

    Written for speed, since in a call of 0.2 ms each microsecond counts. What it refuses `ExpertCall.check` explains.
    """
    if torch.compiler.is_compiling() or call.x_ND.ndim != 2 or call.expert_indices_NK.ndim != 2:
        return False
    x_ND, indices_NK, weights_NK, (w_in, w_out) = (
        call.x_ND, call.expert_indices_NK, call.expert_weights_NK, call.weights,
    )  # fmt: skip
    (num_tokens, width), (_, top_k) = x_ND.shape, indices_NK.shape
    num_experts, expert_width = w_out.shape[0], w_out.shape[-1]
    return (
        x_ND.is_cpu and indices_NK.is_cpu and weights_NK.is_cpu and w_in.is_cpu and w_out.is_cpu
        and x_ND.dtype == weights_NK.dtype == w_in.dtype == w_out.dtype == torch.float32
        and indices_NK.dtype == torch.int64
        and indices_NK.shape == weights_NK.shape == (num_tokens, top_k)
        and w_in.shape == (num_experts, (2 if call.gated else 1) * expert_width, width)
        and w_out.shape == (num_experts, width, expert_width)
        and 0 < num_tokens * top_k <= MOST_SLOTS
        and width % 4 == expert_width % 4 == w_in.data_ptr() % 16 == w_out.data_ptr() % 16 == 0
        and w_in.is_contiguous() and w_out.is_contiguous()
        and forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()
    )  # fmt: skip


def forward(call: ExpertCall, *, summed: bool) -> tuple[Tensor, KeptValues]:
    """N D with the slots summed, else N K D, differentiable. Raises `UserError` for an expert id outside 0..E-1."""
    if call.num_slots <= FEW_SLOTS and not torch.is_grad_enabled():
        return _slot_by_slot(call, summed=summed)
    # Sort, and find where each expert's rows start. They are all of the rows unless some id is none of the experts'.
    sorted_R, order_R = call.expert_indices_NK.reshape(-1).sort(stable=True)
    start_E1 = torch.searchsorted(sorted_R, torch.arange(call.num_experts + 1), out_int32=True)
    starts = start_E1.tolist()
    if starts[0] != 0 or starts[-1] != call.num_slots:
        raise_outside_experts(int(sorted_R[0]), int(sorted_R[-1]), call.num_experts)

    # Gather; two products with the activation between; back to the order of the slots.
    stops_E = start_E1[1:]
    pre_RG = grouped_mm(call.x_ND.index_select(0, order_R // call.top_k), call.weights.w_in.mT, offs=stops_E)
    rows_RD = grouped_mm(_activation(pre_RG, gated=call.gated), call.weights.w_out.mT, offs=stops_E)
    row_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R)))
    slot_NKD = rows_RD.index_select(0, row_R).view(-1, call.top_k, call.width) * call.expert_weights_NK[..., None]
    if summed:
        return _sum(slot_NKD), NOTHING
    return slot_NKD, KeptValues(pre_RG.detach(), order_R, start_E1.long().diff())


def _slot_by_slot(call: ExpertCall, *, summed: bool) -> tuple[Tensor, KeptValues]:
    """The same without a derivative: rows in the order of the slots."""
    (w_in, w_out), top_k = call.weights, call.top_k
    experts_R = call.expert_indices_NK.flatten()
    experts: list[int] = experts_R.tolist()
    raise_outside_experts(min(experts), max(experts), call.num_experts)
    pre_RG = call.x_ND.new_empty(len(experts), call.pre_width)
    for slot, expert in enumerate(experts):
        torch.mv(w_in[expert], call.x_ND[slot // top_k], out=pre_RG[slot])
    act_RF = _activation(pre_RG, gated=call.gated)
    rows_RD = call.x_ND.new_empty(len(experts), call.width)
    for slot, expert in enumerate(experts):
        torch.mv(w_out[expert], act_RF[slot], out=rows_RD[slot])
    slot_NKD = rows_RD.view(-1, top_k, call.width) * call.expert_weights_NK[..., None]
    if summed:
        return _sum(slot_NKD), NOTHING
    order_R = experts_R.argsort(stable=True)
    return slot_NKD, KeptValues(pre_RG[order_R], order_R, torch.bincount(experts_R, minlength=call.num_experts))


def _activation(pre_RG: Tensor, *, gated: bool) -> Tensor:
    """silu(gate) * up, or silu of the whole. -> R F"""
    if not gated:
        return silu(pre_RG)
    gate_RF, up_RF = pre_RG.chunk(2, dim=1)
    return silu(gate_RF) * up_RF


def _sum(slot_NKD: Tensor) -> Tensor:
    """`sum_slots`, to the bit, in one operation where torch's takes the slots in their order: up to four of them, or up
    to sixteen where the columns fill its blocks."""
    _, top_k, width = slot_NKD.shape
    in_order = top_k <= 4 or (top_k <= 16 and width % 64 == 0)
    return slot_NKD.sum(1) if in_order else sum_slots(slot_NKD)
