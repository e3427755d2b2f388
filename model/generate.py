"""Generation with one KV slot a step: greedy or sampled, in batches padded on the left, with hooks active."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from model.hooks.finite import check_finite
from model.hooks.looped_model import LoopedModel
from model.hooks.names import AttentionPath
from model.kv_cache import KVCache
from smelt_interp.data.tokenizer import PAD
from smelt_interp.errors import UserError

LOWEST_TEMPERATURE = 1e-6
"""Logits divided by less would leave the numbers of single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Sample among this many most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the smallest set of tokens whose probability reaches this."""
    stop_token: int = -1
    """A row ends after this token; -1 is none."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "stop_token", "seed"):
            if not _is_integer(getattr(self, name)):
                raise UserError(f"{name} must be an integer; got {getattr(self, name)!r}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf):
            raise UserError(
                f"temperature must be 0, or finite and at least {LOWEST_TEMPERATURE}; got {self.temperature}"
            )
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (all) or above; got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if not -(2**63) <= self.seed < 2**64:
            raise UserError(f"seed must be from -2^63 to 2^64 - 1; got {self.seed}")


@torch.no_grad()
def generate(
    network: LoopedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, attention: AttentionPath = "fast"
) -> list[list[int]]:
    """New tokens of each prompt, the stop token included. Prompts may differ in length.

    The whole prompt is read in one pass, then one token a pass, each with the hooks that are set; hooks on scores and
    patterns ask for attention="eager". Raises `UserError` for no prompts, an empty one, one whose tokens with the new
    ones exceed the context, and logits that are not finite, naming the first site that is not.
    """
    _check_prompts(prompts, network.architecture.vocab_size)
    longest = max(map(len, prompts))
    if longest + sampling.max_new_tokens > network.architecture.context:
        raise UserError(
            f"a prompt and its new tokens must fit the context of {network.architecture.context}; got {longest} and "
            f"{sampling.max_new_tokens}; shorten the prompt or lower max_new_tokens"
        )
    device = network.device
    # Nothing attends to padding; its id only has to be in the vocabulary.
    tokens_BT = torch.full((len(prompts), longest), min(PAD, network.architecture.vocab_size - 1), device=device)
    mask_BS = torch.zeros(len(prompts), longest, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, longest - len(prompt) :] = torch.as_tensor(list(prompt), device=device)
        mask_BS[row, longest - len(prompt) :] = True
    generator = torch.Generator(device).manual_seed(sampling.seed)
    kv_cache = KVCache(len(network.plan), capacity=longest + sampling.max_new_tokens)
    padded = not bool(mask_BS.all())
    made: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    with network.lock:  # a hook that another thread sets between two tokens would change half a text
        for _ in range(sampling.max_new_tokens):
            mask = mask_BS if padded else None
            logits_BW = network(tokens_BT, attention_mask_BT=mask, attention=attention, kv_cache=kv_cache)[:, -1]
            if not bool(torch.isfinite(logits_BW).all()):
                _raise_where_not_finite(network, prompts, made, attention)
            next_B = choose(logits_BW, sampling, generator)
            new_B = next_B.tolist()
            for row in going:
                made[row].append(new_B[row])
            going = {row for row in going if new_B[row] != sampling.stop_token}
            if not going:
                break
            tokens_BT = next_B[:, None]
            if padded:
                mask_BS = torch.cat((mask_BS, torch.ones_like(mask_BS[:, :1])), 1)
    return made


def _raise_where_not_finite(
    network: LoopedModel, prompts: Sequence[Sequence[int]], made: Sequence[Sequence[int]], attention: AttentionPath
) -> NoReturn:
    """`UserError` with the first site that is not finite, found by reading the rows again, each by itself."""
    for prompt, new in zip(prompts, made, strict=True):
        tokens_BT = torch.tensor([[*prompt, *new]], device=network.device)
        logits_BTW, cache = network.run_with_cache(tokens_BT, attention=attention, return_cache_object=False)
        for name, value in [*cache.items(), ("logits", logits_BTW)]:
            check_finite(name, value)
    raise UserError("logits must be finite; got others while generating; look for hooks that change between passes")


def _check_prompts(prompts: object, vocab_size: int) -> None:
    """Raise `UserError` for what is not lists of token ids: what is typed at a prompt has no type check."""
    rows = list(prompts) if isinstance(prompts, (list, tuple)) else [prompts]
    lengths: list[int] = []
    for row in rows:
        if row is prompts or not isinstance(row, (list, tuple)):
            got = type(row).__name__
            raise UserError(f"prompts must be lists of token ids, e.g. [[256, 40, 91]]; got {got}: use .tolist()")
        lengths.append(len(row))
        for token in row:
            if not _is_integer(token):
                raise UserError(f"token ids must be integers; got {token!r}")
            if not 0 <= token < vocab_size:
                raise UserError(f"token ids must be from 0 to {vocab_size - 1}; got {token}")
    if not lengths or not all(lengths):
        raise UserError(f"prompts must be at least one, none of them empty; got lengths {lengths}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def choose(logits_BW: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of each row (B,): top-k first, then top-p on what is left, then one draw."""
    if sampling.temperature == 0:
        return logits_BW.argmax(-1)
    logits_BW = logits_BW.float() / sampling.temperature
    ordered_BW, ids_BW = logits_BW.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered_BW[:, sampling.top_k :] = float("-inf")
    probs_BW = ordered_BW.softmax(-1)
    # The token that crosses the threshold is kept, and the first whatever the threshold.
    beyond_BW = probs_BW.cumsum(-1) - probs_BW >= sampling.top_p
    beyond_BW[:, 0] = False
    probs_BW = probs_BW.masked_fill(beyond_BW, 0.0)
    drawn_B1 = probs_BW.multinomial(1, generator=generator)
    return ids_BW.gather(-1, drawn_B1)[:, 0]
