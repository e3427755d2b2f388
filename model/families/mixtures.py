"""Unlooped Mixture-of-Experts networks built like Llama: Qwen3-MoE, OLMoE, Mixtral and GPT-OSS."""

from dataclasses import replace

from model.families.llama import LLAMA

QWEN3_MOE = replace(LLAMA, router="mlp.gate", router_kind="softmax", experts="mlp.experts")
OLMOE = QWEN3_MOE
"""Its norms of queries and keys span all heads; the sites are before them."""
MIXTRAL = replace(QWEN3_MOE, num_experts="num_local_experts")
GPT_OSS = replace(MIXTRAL, router="mlp.router")
"""A learned sink logit a head: rows of the pattern sum to less than 1. Every second layer sees a window."""
