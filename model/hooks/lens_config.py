"""A looped network as transformer-lens reads it: its layers are our steps."""

from typing import Literal

import torch
from transformer_lens.config import TransformerLensConfig

from smelt_interp.architecture import Architecture


def lens_config(
    architecture: Architecture,
    *,
    device: torch.device,
    dtype: torch.dtype,
    d_mlp: int,
    eps: float,
    positional_embedding_type: Literal["rotary", "standard", "none"],
    act_fn: str,
    gated_mlp: bool,
) -> TransformerLensConfig:
    """A new record at each call: changing it changes no network. The norms are RMSNorm."""
    return TransformerLensConfig(
        d_model=architecture.width,
        d_head=architecture.head_width,
        n_layers=len(architecture.steps),
        n_ctx=architecture.context,
        n_heads=architecture.num_heads,
        n_key_value_heads=architecture.num_kv_heads,
        d_mlp=d_mlp,
        d_vocab=architecture.vocab_size,
        device=str(device),
        eps=eps,
        normalization_type="RMS",
        uses_rms_norm=True,
        final_rms=True,
        positional_embedding_type=positional_embedding_type,
        act_fn=act_fn,
        gated_mlp=gated_mlp,
        num_experts=architecture.num_experts or None,
        experts_per_token=architecture.top_k or None,
        dtype=dtype,
    )
