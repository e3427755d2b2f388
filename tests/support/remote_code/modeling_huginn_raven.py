"""A stand-in for the code that Huginn's checkpoints bring: the tree of modules and the calls of
seal-rg/recurrent-pretraining's `raven_modeling_minimal.py`, in the fewest lines."""

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_huginn_raven import RavenConfig  # transformers reads it so


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_heads
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, freqs_cis, block_idx, mask=None, past_key_values=None):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.Wqkv(x).chunk(3, dim=-1))
        q, k = (self.rotated(x, freqs_cis) for x in (q + self.qk_bias[0], k + self.qk_bias[1]))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))

    def rotated(self, x, freqs_cis):
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs_cis.unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class GatedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size * 2, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(functional.silu(gate) * up)


class SandwichBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        for index in (1, 2, 3, 4):
            self.add_module(f"norm_{index}", nn.RMSNorm(config.n_embd, eps=1e-6))
        self.attn, self.mlp = CausalSelfAttention(config), GatedMLP(config)

    def forward(self, x, freqs_cis, step_idx, mask=None, past_key_values=None):
        x = self.norm_2(self.attn(self.norm_1(x), freqs_cis, step_idx, mask, past_key_values) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class RavenForCausalLM(PreTrainedModel):
    config_class = RavenConfig

    def __init__(self, config):
        super().__init__(config)
        counts = {"prelude": config.n_layers_in_prelude, "core_block": config.n_layers_in_recurrent_block,
                  "coda": config.n_layers_in_coda}  # fmt: skip
        stacks = {name: nn.ModuleList(SandwichBlock(config) for _ in range(count)) for name, count in counts.items()}
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "adapter": nn.Linear(config.n_embd * 2, config.n_embd, bias=False),
            **stacks, "ln_f": nn.RMSNorm(config.n_embd, eps=1e-6),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer.wte

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, init_scale=1.0, **others):
        frequency = 50_000.0 ** -(torch.arange(0, self.config.head_dim, 2) / self.config.head_dim)
        angles = torch.arange(input_ids.shape[1])[:, None] * frequency
        freqs_cis = torch.stack([angles.cos(), angles.sin()], -1)[None, :, None]
        e = self.transformer.wte(input_ids) * self.config.n_embd**0.5
        for block in self.transformer.prelude:
            e = block(e, freqs_cis, 0)
        x = torch.randn_like(e) * init_scale
        for _ in range(self.config.mean_recurrence):
            x = self.transformer.adapter(torch.cat([x, e], dim=-1))
            for block in self.transformer.core_block:
                x = block(x, freqs_cis, 0)
        x = self.transformer.ln_f(x)
        for block in self.transformer.coda:
            x = block(x, freqs_cis, 0)
        return CausalLMOutput(logits=self.lm_head(self.transformer.ln_f(x)).float())
