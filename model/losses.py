"""What training and default metrics average: next-token cross-entropy over the tokens that count."""

import torch
from torch import Tensor
from torch.nn import functional

from smelt_interp.errors import UserError

IGNORED = -100
"""torch's target of a position that does not count."""


def next_token_loss(
    tokens_BT: Tensor,
    logits_BTW: Tensor,
    *,
    segment_start_BT: Tensor | None = None,
    attention_mask_BT: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of the next tokens that count, in nats: those not the first of a row or document, and those
    for which neither they nor what they are predicted from is padding. `attention_mask_BT` may begin with tokens read
    before. Raises `UserError` when there is none to predict."""
    length = tokens_BT.shape[1]
    if length < 2:
        raise UserError(f"a loss must have rows of at least 2 tokens, one to predict; got {length}")
    target_BT = tokens_BT[:, 1:].long()
    counts_BT = torch.ones_like(target_BT, dtype=torch.bool)
    if segment_start_BT is not None:
        counts_BT &= segment_start_BT[:, 1:] == segment_start_BT[:, :-1]
    if attention_mask_BT is not None:
        real_BT = attention_mask_BT[:, -length:].bool()
        counts_BT &= real_BT[:, 1:] & real_BT[:, :-1]
    rule = "a loss must have a token to predict: one that is neither padding nor the first of its document"
    require_all(counts_BT.any(), counts_BT.sum(), rule)
    target_BT = target_BT.masked_fill(~counts_BT, IGNORED)
    return functional.cross_entropy(logits_BTW[:, :-1].flatten(0, 1).float(), target_BT.flatten())


def require_all(holds_BT: Tensor, x_BT: Tensor, rule: str) -> None:
    """`UserError` with the first value that breaks the rule. On a GPU the rule is asserted where the value lies, since
    to look at it is to wait for everything that the GPU still has to do."""
    if x_BT.is_cuda:
        torch._assert_async(holds_BT.all(), rule)
    elif not bool(holds_BT.all()):
        raise UserError(f"{rule}; got {x_BT[~holds_BT][0].item()}")
