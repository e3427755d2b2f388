"""What training and default metrics average, each over the tokens that count: padding is never one of them."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from model.hooks.finite import check_finite
from model.routing import Routing, balance_loss, router_z_loss
from smelt_interp.errors import UserError

OverSteps = Literal["mean", "sum"]
"""How the routing losses of the steps become one number."""
IGNORED = -100
"""torch's target of a position that does not count."""


class Loss(NamedTuple):
    """Training losses of one batch, each a scalar."""

    next_token: Tensor
    """Mean cross-entropy in nats over the targets that count."""
    balance: Tensor
    """Switch load-balancing loss, mean or sum over steps; 1 a step for uniform routing."""
    router_z: Tensor
    """Router z-loss, mean or sum over steps."""


def next_token_loss(
    tokens_BT: Tensor,
    logits_BTW: Tensor,
    segment_start_BT: Tensor | None = None,
    attention_mask_BT: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of the next tokens that count, in nats: those not the first of a row or document, and those
    for which neither they nor what they are predicted from is padding. `attention_mask_BT` may begin with tokens read
    before. Raises `UserError` when there is none to predict, and when a logit is not finite."""
    length = tokens_BT.shape[1]
    if length < 2:
        raise UserError(f"a loss must have rows of at least 2 tokens, one to predict; got {length}")
    check_finite("logits", logits_BTW, wait=False)
    target_BT = tokens_BT[:, 1:].long()
    counts_BT = predicted_tokens(tokens_BT, segment_start_BT, attention_mask_BT)
    rule = "a loss must have a token to predict: one that is neither padding nor the first of its document"
    require_all(counts_BT.any(), counts_BT.sum(), rule)
    target_BT = target_BT.masked_fill(~counts_BT, IGNORED)
    return functional.cross_entropy(logits_BTW[:, :-1].flatten(0, 1).float(), target_BT.flatten())


def predicted_tokens(tokens_BT: Tensor, segment_start_BT: Tensor | None, attention_mask_BT: Tensor | None) -> Tensor:
    """Which of the tokens after the first are targets that count, (B, T - 1)."""
    counts_BT = torch.ones_like(tokens_BT[:, 1:], dtype=torch.bool)
    if segment_start_BT is not None:
        counts_BT &= segment_start_BT[:, 1:] == segment_start_BT[:, :-1]
    if attention_mask_BT is not None:
        real_BT = attention_mask_BT[:, -tokens_BT.shape[1] :].bool()
        counts_BT &= real_BT[:, 1:] & real_BT[:, :-1]
    return counts_BT


def routing_losses(
    routings: list[Routing], counts_BT: Tensor, over_steps: OverSteps, over_ranks: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Load-balancing loss and router z-loss of all steps, over the tokens that count; `over_ranks` as `balance_loss`
    has it."""
    if over_steps not in ("mean", "sum"):
        raise UserError(f"over_steps must be 'mean' or 'sum'; got {over_steps!r}")
    steps = [(balance_loss(routing, counts_BT, over_ranks), router_z_loss(routing, counts_BT)) for routing in routings]
    balance, router_z = (torch.stack(values) for values in zip(*steps, strict=True))
    return (balance.mean(), router_z.mean()) if over_steps == "mean" else (balance.sum(), router_z.sum())


def routed_tokens(tokens_BT: Tensor, segment_start_BT: Tensor | None, attention_mask_BT: Tensor | None) -> Tensor:
    """Which tokens the routing losses count, (B, T): all that are not padding. A token alone in its document is
    padding, as packing writes it: nothing sees it, and it predicts nothing."""
    counts_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    if attention_mask_BT is not None:
        counts_BT &= attention_mask_BT.bool()
    if segment_start_BT is not None:
        same_BT = segment_start_BT[:, 1:] == segment_start_BT[:, :-1]
        counts_BT &= functional.pad(same_BT, (0, 1)) | functional.pad(same_BT, (1, 0))
    return counts_BT


def require_all(holds_BT: Tensor, x_BT: Tensor, rule: str) -> None:
    """`UserError` with the first value that breaks the rule. On a GPU the rule is asserted where the value lies, since
    to look at it is to wait for everything that the GPU still has to do."""
    if x_BT.is_cuda:
        torch._assert_async(holds_BT.all(), rule)
    elif not bool(holds_BT.all()):
        raise UserError(f"{rule}; got {x_BT[~holds_BT][0].item()}")
