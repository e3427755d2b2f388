"""Llama and what is built like it: pre-norm attention and a gated MLP, each layer once."""

from model.families.family import Family

LLAMA = Family(loopable=True)
"""Llama, Qwen3 (its queries and keys are normed after the site), SmolLM2, and others under these names."""
