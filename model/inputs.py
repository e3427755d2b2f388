"""What a forward pass reads: tokens or a residual stream, its masks, and what follows from them for every step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.hooks.names import PassOptions, Request
from model.kv_cache import KVCache
from model.layer import Pass
from model.losses import require_all
from model.routing import Routing
from smelt_interp.architecture import Architecture
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The input of one pass."""

    values: Tensor
    """Tokens (B, T), or the residual stream (B, T, D) of a pass that starts at a step."""
    segment_start_BT: Tensor | None = None
    attention_mask_BT: Tensor | None = None
    kv_cache: KVCache | None = None

    @property
    def held(self) -> int:
        """Tokens already read, which stand before these."""
        return 0 if self.kv_cache is None else self.kv_cache.length

    def check(self, config: ModelConfig | Architecture, request: Request) -> None:
        """Raise `UserError` for tokens, a stream, masks or a cache that do not fit the network or one another."""
        if not issubclass(type(self.values), Tensor):  # a text, a list: what is typed at a prompt has no type check
            got = type(self.values).__name__
            raise UserError(f"tokens must be a tensor of integers; got {got}; network.to_tokens makes one of a text")
        if request.from_tokens and (self.values.ndim != 2 or self.values.dtype not in (torch.int64, torch.int32)):
            raise UserError(f"tokens must be int64 or int32 of shape (B, T); got {_kind(self.values)}")
        if not request.from_tokens and (self.values.ndim != 3 or self.values.shape[-1] != config.width):
            raise UserError(f"a residual stream must have shape (B, T, {config.width}); got {_kind(self.values)}")
        batch, length = self.values.shape[:2]
        if length == 0 or batch == 0:
            raise UserError(f"inputs must hold at least one token; got shape {tuple(self.values.shape)}")
        if self.held + length > config.context:
            raise UserError(f"a row must be at most the context of {config.context} tokens; got {self.held + length}")
        if request.from_tokens:
            known_BT = (self.values >= 0) & (self.values < config.vocab_size)
            require_all(known_BT, self.values, f"token ids must be from 0 to {config.vocab_size - 1}")
        self._check_masks(batch, length)
        self._check_cache(batch, request)

    def _check_masks(self, batch: int, length: int) -> None:
        start_BT, mask_BS = self.segment_start_BT, self.attention_mask_BT
        for name, given in (("segment_start_BT", start_BT), ("attention_mask_BT", mask_BS)):
            if given is not None and not (isinstance(given, Tensor) and given.device == self.values.device):
                got = f"one on {given.device}" if isinstance(given, Tensor) else type(given).__name__
                raise UserError(f"{name} must be a tensor where the inputs are, {self.values.device}; got {got}")
        if start_BT is not None and start_BT.shape != (batch, length):
            raise UserError(f"segment_start_BT must have the shape {(batch, length)}; got {tuple(start_BT.shape)}")
        if start_BT is not None and self.kv_cache is not None:
            raise UserError("segment_start_BT must come without a kv_cache; got both")
        if start_BT is not None:
            behind_BT = (start_BT >= 0) & (start_BT <= torch.arange(length, device=start_BT.device))
            require_all(behind_BT, start_BT, "segment_start_BT must lie from 0 to each token's own position")
        if mask_BS is not None and mask_BS.shape != (batch, self.held + length):
            raise UserError(
                f"attention_mask_BT must have shape {(batch, self.held + length)}; got {tuple(mask_BS.shape)}"
            )
        if mask_BS is not None:
            require_all(
                (mask_BS == 0) | (mask_BS == 1), mask_BS, "attention_mask_BT must be 0 on padding and 1 elsewhere"
            )

    def _check_cache(self, batch: int, request: Request) -> None:
        if self.kv_cache is None:
            return
        if not (request.to_logits if request.from_tokens else self.held):
            raise UserError(
                "a kv_cache must come without stop_at, or hold tokens and come with start_at: every step has a slot"
            )
        steps = len(request.architecture.steps)
        if self.kv_cache.num_steps != steps:
            raise UserError(f"a kv_cache must have one slot a step ({steps}); got {self.kv_cache.num_steps}")
        if self.held and self.kv_cache.batch != batch:
            raise UserError(f"a kv_cache must go on with the batch of {self.kv_cache.batch} it has read; got {batch}")

    def prepare(self, config: ModelConfig, request: Request, routings: list[Routing]) -> Pass:
        """Masks and positions, the same for all steps of the pass. Raises as `check` does, which a traced graph leaves
        to its caller."""
        if not torch.compiler.is_compiling():
            self.check(config, request)
        length, device = self.values.shape[1], self.values.device
        query_T = torch.arange(self.held, self.held + length, device=device)
        positions_BT, allowed_BTS = query_T[None], None
        # Whole rows are causal by themselves, and one query after all keys may look at each of them.
        if self.attention_mask_BT is not None or self.segment_start_BT is not None or (self.held and length > 1):
            key_S = torch.arange(self.held + length, device=device)
            allowed_BTS = (key_S <= query_T[:, None])[None]
        if allowed_BTS is not None and self.attention_mask_BT is not None:
            real_BS = self.attention_mask_BT.bool()
            positions_BT = (real_BS.long().cumsum(-1) - 1).clamp(min=0)[:, self.held :]
            # A padding query sees itself alone: a row without any key would be not-a-number.
            allowed_BTS = (allowed_BTS & real_BS[:, None]) | (key_S == query_T[:, None])
        if allowed_BTS is not None and self.segment_start_BT is not None:
            positions_BT = query_T - self.segment_start_BT
            allowed_BTS = allowed_BTS & (key_S >= self.segment_start_BT[:, :, None])
        cos_BT1C, sin_BT1C = rotary(config, positions_BT)
        return Pass(
            request=request,
            allowed_BTS=allowed_BTS,
            cos_BT1C=cos_BT1C,
            sin_BT1C=sin_BT1C,
            kv_cache=self.kv_cache,
            routings=routings,
        )


def rotary(config: ModelConfig, positions_BT: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """RoPE cosines and signed sines at the given positions, (B, T, 1, C) each; None without a rotary embedding."""
    if config.rope_base is None:
        return None, None
    halves_C = torch.arange(0, config.head_width, 2, device=positions_BT.device, dtype=torch.float32)
    angles_BT1C = positions_BT[..., None, None].float() * config.rope_base ** (-halves_C / config.head_width)
    cos_BT1C, sin_BT1C = angles_BT1C.cos(), angles_BT1C.sin()
    return torch.cat((cos_BT1C, cos_BT1C), -1), torch.cat((-sin_BT1C, sin_BT1C), -1)


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"


def sample_inputs(samples: Samples, architecture: Architecture, device: torch.device) -> tuple[Tensor, PassOptions]:
    """The tokens (B, T) of samples, and the options under which each document is read as if it were alone: padding
    stands on the right, where only a network that is not causal sees it."""
    tokens_BT, start_BT, real_BT = (
        torch.from_numpy(x_BT.astype(np.int64)).to(device)
        for x_BT in (
            samples.ids_NT,
            samples.segment_start_NT,
            np.arange(samples.ids_NT.shape[1]) < samples.length_N[:, None],
        )
    )
    options: PassOptions = {"segment_start_BT": start_BT, "attention": "eager"}
    return tokens_BT, options if architecture.causal else {**options, "attention_mask_BT": real_BT}
