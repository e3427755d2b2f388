"""Routing: from router logits to the chosen experts and their weights, as values."""

from typing import NamedTuple

import torch
from torch import Tensor

from smelt_interp.config import RouterKind
from smelt_interp.errors import UserError


class Routing(NamedTuple):
    """Where each token goes."""

    expert_indices_NK: Tensor
    """Chosen experts, best first; int64; no gradient."""
    expert_weights_NK: Tensor
    """Their weights, float32 (float64 for float64 logits)."""
    scores_NE: Tensor
    """The score of every expert, from which the weights are gathered."""


def route(logits_NE: Tensor, top_k: int, *, router: RouterKind, renormalise: bool) -> Routing:
    """The top k experts of each token; of equal scores the lowest id wins.

    Scores are computed in float32 at least. Any number of leading axes. Raises `UserError` when a logit is NaN or
    infinite (checked on a CPU at once; elsewhere asserted on the device, without waiting for it) and when top_k is
    outside 1..E.
    """
    num_experts = logits_NE.shape[-1]
    if not 1 <= top_k <= num_experts:
        raise UserError(f"top_k must be in 1..{num_experts}, the number of experts; got {top_k}")
    _check_finite(logits_NE)
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    scores_NE = logits_NE.softmax(-1) if router == "softmax" else logits_NE.sigmoid()
    expert_indices_NK = _top_k_lowest_id(scores_NE.detach(), top_k)
    return Routing(expert_indices_NK, gather_weights(scores_NE, expert_indices_NK, renormalise=renormalise), scores_NE)


def gather_weights(scores_NE: Tensor, expert_indices_NK: Tensor, *, renormalise: bool) -> Tensor:
    """The weights of these experts, chosen or edited: their scores, divided by their sum with `renormalise`.

    Raises `UserError` when an index lies outside 0..E-1 or is not an integer.
    """
    num_experts = scores_NE.shape[-1]
    if expert_indices_NK.dtype not in (torch.int64, torch.int32):
        raise UserError(f"expert indices must be int64 or int32; got {expert_indices_NK.dtype}; edit with integers")
    if expert_indices_NK.device.type == "cpu" and expert_indices_NK.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in expert_indices_NK.aminmax())
        if low < 0 or high >= num_experts:
            raise UserError(
                f"expert indices must lie in 0..{num_experts - 1}; got {low if low < 0 else high}; "
                "keep edited indices inside the layer's experts"
            )
    weights_NK = scores_NE.gather(-1, expert_indices_NK)
    return weights_NK / weights_NK.sum(-1, keepdim=True) if renormalise else weights_NK


def balance_loss(scores_NE: Tensor, expert_indices_NK: Tensor) -> Tensor:
    """E * sum over experts of (mean score) * (fraction of assignments): 1 when both are uniform.

    The auxiliary loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6), with assignments counted over all
    K choices; scores are divided by their sum first, which changes nothing for softmax. The gradient flows through the
    scores alone.
    """
    num_experts = scores_NE.shape[-1]
    flat_NE = scores_NE.reshape(-1, num_experts)
    mean_E = (flat_NE / flat_NE.sum(-1, keepdim=True)).mean(0)
    fraction_E = torch.bincount(expert_indices_NK.reshape(-1), minlength=num_experts) / expert_indices_NK.numel()
    return num_experts * (mean_E * fraction_E).sum()


def _check_finite(logits_NE: Tensor) -> None:
    if logits_NE.numel() == 0:
        return
    extremes = torch.stack(logits_NE.detach().aminmax())  # NaN wins both
    if logits_NE.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(torch.isfinite(extremes).all(), "router logits must be finite")
    elif not torch.isfinite(extremes).all():
        flat_NE = logits_NE.detach().reshape(-1, logits_NE.shape[-1])
        token, expert = (~torch.isfinite(flat_NE)).nonzero()[0].tolist()
        raise UserError(
            f"router logits must be finite; got {flat_NE[token, expert].item()} for token {token}, expert {expert}; "
            "look for an overflow or a NaN in the layers before"
        )


def _top_k_lowest_id(scores_NE: Tensor, top_k: int) -> Tensor:
    """Indices of the top k, best first. `argmax` takes the lowest id of equal scores, which `topk` does not; k rounds
    of it cost about what `topk` does, a stable sort four times as much."""
    left_NE = scores_NE.clone()
    chosen = []
    for _ in range(top_k):
        best_N1 = left_NE.argmax(-1, keepdim=True)
        left_NE.scatter_(-1, best_N1, -1.0)  # below every score
        chosen.append(best_N1)
    return torch.cat(chosen, -1)
