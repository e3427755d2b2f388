"""A looped network's config as transformer-lens reads it: its layers are our steps."""

import torch
from transformer_lens.config import TransformerLensConfig

from smelt_interp.config import ModelConfig
from smelt_interp.plan import plan


def lens_config(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> TransformerLensConfig:
    """A new record at each call: changing it changes no network."""
    return TransformerLensConfig(
        d_model=config.width,
        d_head=config.head_width,
        n_layers=len(plan(config)),
        n_ctx=config.context,
        n_heads=config.num_heads,
        n_key_value_heads=config.num_kv_heads,
        d_mlp=config.expert_width * config.top_k,
        d_vocab=config.vocab_size,
        device=str(device),
        eps=config.norm_eps,
        normalization_type="RMS",
        uses_rms_norm=True,
        final_rms=True,
        positional_embedding_type="none" if config.rope_base is None else "rotary",
        act_fn="silu",
        gated_mlp=config.gated_experts,
        num_experts=config.num_experts,
        experts_per_token=config.top_k,
        dtype=dtype,
    )
