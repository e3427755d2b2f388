"""Routing: from router logits to the chosen experts and their weights, as values."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.hooks.finite import check_finite
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
    logits_NE: Tensor
    """What the scores were computed from."""


def route(
    logits_NE: Tensor, top_k: int, *, router: RouterKind, renormalise: bool, site: str = "router logits"
) -> Routing:
    """The top k experts of each token; of equal scores the lowest id wins.

    Scores are computed in float32 at least. Any number of leading axes. Raises `UserError`, naming `site`, when a logit
    is NaN or infinite (checked on a CPU at once; on a GPU asserted there, without waiting for it) and when top_k is
    outside 1..E.
    """
    num_experts = logits_NE.shape[-1]
    if not 1 <= top_k <= num_experts:
        raise UserError(f"top_k must be in 1..{num_experts}, the number of experts; got {top_k}")
    check_finite(site, logits_NE, wait=False)
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    scores_NE = logits_NE.softmax(-1) if router == "softmax" else logits_NE.sigmoid()
    expert_indices_NK = _top_k_lowest_id(scores_NE.detach(), top_k)
    weights_NK = _weights(scores_NE, expert_indices_NK, renormalise=renormalise)
    return Routing(expert_indices_NK, weights_NK, scores_NE, logits_NE)


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
    return _weights(scores_NE, expert_indices_NK, renormalise=renormalise)


def _weights(scores_NE: Tensor, expert_indices_NK: Tensor, *, renormalise: bool) -> Tensor:
    weights_NK = scores_NE.gather(-1, expert_indices_NK)
    return weights_NK / weights_NK.sum(-1, keepdim=True) if renormalise else weights_NK


def alone(x: Tensor) -> Tensor:
    """A sum over one rank."""
    return x


def balance_loss(routing: Routing, counts_N: Tensor, over_ranks: Callable[[Tensor], Tensor] = alone) -> Tensor:
    """E * sum over experts of (mean score) * (fraction of assignments), over the tokens that count: 1 when both are
    uniform.

    The auxiliary loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6), with assignments counted over all
    K choices; scores are divided by their sum first, which changes nothing for softmax. The gradient flows through the
    scores alone.

    over_ranks: sums a tensor over ranks that hold other tokens of the batch. The fractions are then those of all, so
    that the mean of the ranks' losses, each weighted by its tokens, is the loss of the whole batch.
    """
    num_experts, top_k = routing.scores_NE.shape[-1], routing.expert_indices_NK.shape[-1]
    flat_NE = routing.scores_NE.reshape(-1, num_experts)
    share_N = _shares(counts_N, flat_NE)
    mean_E = share_N @ (flat_NE / flat_NE.sum(-1, keepdim=True))
    counted_N = counts_N.flatten().to(flat_NE.dtype)
    assigned_E = flat_NE.new_zeros(num_experts).index_add_(
        0, routing.expert_indices_NK.flatten(), counted_N.repeat_interleave(top_k)
    )
    assigned_E = over_ranks(assigned_E)
    fraction_E = assigned_E / assigned_E.sum()
    return num_experts * (mean_E * fraction_E).sum()


def router_z_loss(routing: Routing, counts_N: Tensor) -> Tensor:
    """Mean of logsumexp(logits)^2 over the tokens that count (ST-MoE, arXiv:2202.08906, equation 5)."""
    flat_NE = routing.logits_NE.reshape(-1, routing.logits_NE.shape[-1])
    return _shares(counts_N, flat_NE) @ flat_NE.logsumexp(-1).square()


def _shares(counts_N: Tensor, flat_NE: Tensor) -> Tensor:
    """What each token counts in a mean, (N,)."""
    counts_N = counts_N.flatten().to(flat_NE.dtype)
    return counts_N / counts_N.sum()


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
