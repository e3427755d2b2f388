"""A stand-in for the config that Ouro's checkpoints bring."""

from transformers import LlamaConfig


class OuroConfig(LlamaConfig):
    model_type = "ouro"
    total_ut_steps: int = 3
