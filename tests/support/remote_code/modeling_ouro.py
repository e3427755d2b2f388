"""A stand-in for the code that Ouro's checkpoints bring, with the same tree of modules."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from .configuration_ouro import OuroConfig  # transformers reads it so


class OuroDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            self.add_module(name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, hidden_states, **given):
        update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        hidden_states = hidden_states + self.input_layernorm_2(update)
        update = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(update)


class OuroModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        mask = create_causal_mask(self.config, x, attention_mask, None, position_ids)
        rotary = self.rotary_emb(x, position_ids)
        gates = []
        for _ in range(self.config.total_ut_steps):
            for layer in self.layers:
                x = layer(x, attention_mask=mask, position_embeddings=rotary)
            x = self.norm(x)
            gates.append(self.early_exit_gate(x))
        return x, gates


class OuroForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OuroConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False, **others):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, attention_mask, position_ids)[0]))
