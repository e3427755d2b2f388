"""The attention function that transformers is given: the authors' eager arithmetic, through the running step's points.

It is called once an attention, with queries and keys as they are compared. What carries arithmetic in the ten families
is `scaling`, an additive mask, a bias by position, and a learned sink: a logit a query and head (`sinks`) or a head
(`s_aux`) that takes a share of the softmax and gives nothing, so a row of the pattern may sum to less than 1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.families.run import RUNNING, FamilyRun

NAME = "by_visit"


def register() -> None:
    """Make the function known to transformers, with the mask that its eager path has."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Means of values (B, T, Q, C) and the pattern (B, Q, T, S), as transformers' eager functions give them.

    Parameters have the names by which transformers hands them over: query (B, Q, T, C), key and value (B, G, S, C).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    run = RUNNING.get()
    if run is None or not run.attends(module):
        # Called outside a pass of ours, or for something that is no layer's attention: plain arithmetic.
        scores_BQTS = _scores(query, key, scale, position_bias)
        scores_BQTS = scores_BQTS if attention_mask is None else scores_BQTS + attention_mask
        pattern_BQTS = _softmax(scores_BQTS, sinks, s_aux).to(query.dtype)
        pattern_BQTS = functional.dropout(pattern_BQTS, dropout, module.training)
        return (pattern_BQTS @ _repeated(value, query)).transpose(1, 2).contiguous(), pattern_BQTS

    rotary = "attn.hook_rot_q" in run.request.architecture.sites
    query_BQTC = run.heads_through("attn.hook_rot_q" if rotary else "attn.hook_q", query)
    key_BGSC = run.heads_through("attn.hook_rot_k" if rotary else "attn.hook_k", key)
    value_BGSC = run.heads_through("attn.hook_v", value)
    key_BGSC, value_BGSC = run.remembered(key_BGSC, value_BGSC)
    scores_BQTS = _scores(query_BQTC, key_BGSC, scale, position_bias)
    allowed_BQTS = _allowed(run, attention_mask)
    if allowed_BQTS is not None:
        scores_BQTS = scores_BQTS.masked_fill(~allowed_BQTS, float("-inf"))
    eager = run.request.attention == "eager"
    if eager:
        scores_BQTS = run.through("attn.hook_attn_scores", scores_BQTS)
    pattern_BQTS = _softmax(scores_BQTS, sinks, s_aux).to(query.dtype)
    if eager:
        pattern_BQTS = run.through("attn.hook_pattern", pattern_BQTS)
    kept_BQTS = functional.dropout(pattern_BQTS, dropout, module.training)
    z_BTQC = (kept_BQTS @ _repeated(value_BGSC, query)).transpose(1, 2).contiguous()
    return run.through("attn.hook_z", z_BTQC), pattern_BQTS


def _repeated(x_BGSC: Tensor, query_BQTC: Tensor) -> Tensor:
    """Keys or values once a query head."""
    groups = query_BQTC.shape[1] // x_BGSC.shape[1]
    return x_BGSC if groups == 1 else x_BGSC.repeat_interleave(groups, 1)


def _scores(query_BQTC: Tensor, key_BGSC: Tensor, scale: float, bias_BQTS: Tensor | None) -> Tensor:
    scores_BQTS = query_BQTC @ _repeated(key_BGSC, query_BQTC).transpose(2, 3) * scale
    return scores_BQTS if bias_BQTS is None else scores_BQTS + bias_BQTS


def _softmax(scores_BQTS: Tensor, sinks: Tensor | None, s_aux: Tensor | None) -> Tensor:
    """The pattern in float32 at least; a sink takes its share and is dropped."""
    dtype = torch.promote_types(scores_BQTS.dtype, torch.float32)
    if sinks is None and s_aux is None:
        return scores_BQTS.softmax(-1, dtype=dtype)
    batch, heads, length, _ = scores_BQTS.shape
    sink = sinks if s_aux is None else s_aux.reshape(1, -1, 1, 1)
    assert sink is not None
    with_sink = torch.cat((scores_BQTS, sink.expand(batch, heads, length, 1).to(scores_BQTS.dtype)), -1)
    return with_sink.softmax(-1, dtype=dtype)[..., :-1]


def _allowed(run: FamilyRun, attention_mask: Tensor | None) -> Tensor | None:
    """True where a query may look, by the network's own mask and by the documents of a row; None is everywhere."""
    allowed_BQTS = None
    if attention_mask is not None and run.kv_cache is None:  # theirs knows of no tokens before these
        allowed_BQTS = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    if allowed_BQTS is None and run.within_BTS is None:
        return None
    return limited(run, allowed_BQTS)


def limited(run: FamilyRun, allowed_BQTS: Tensor | None) -> Tensor:
    """The same within documents, and without padding where the network's own mask knows none."""
    if run.within_BTS is not None:
        within_BQTS = run.within_BTS[:, None]
        allowed_BQTS = within_BQTS if allowed_BQTS is None else allowed_BQTS & within_BQTS
    assert allowed_BQTS is not None
    if run.padded:
        # A padding query sees itself: a row without any key would be not-a-number.
        length, keys = allowed_BQTS.shape[-2:]
        key_S = torch.arange(keys, device=allowed_BQTS.device)
        alone = key_S == key_S[keys - length :, None]
        allowed_BQTS = allowed_BQTS | (alone & ~allowed_BQTS.any(-1, keepdim=True))
    return allowed_BQTS
