"""A dense network with a nested plan, written by hand: the second child of LoopedModel, as unlike ours as may be.

Two stacks of two layers each hold a state. A high cycle runs the low stack three times, each from the sum of both
states, then the high stack once, from the same sum. No experts, no rotary embedding, no loop factor, learned positions,
a byte-pair tokenizer.
"""

from functools import cache
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.config import TransformerLensConfig

from model.hooks.hook_point import SitePoint
from model.hooks.lens_config import lens_config
from model.hooks.looped_model import LoopedModel
from model.hooks.names import PassOptions
from model.tokenizers import HuggingFaceTokenizer
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, Step
from tests.support.bpe import byte_level_bpe

HIGH, LOW = (0, 1), (2, 3)
HIGH_CYCLES, LOW_CYCLES = 2, 3
WIDTH, HEADS, HEAD_WIDTH, CONTEXT = 16, 4, 4, 128
SITES = (
    "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_q",
    "attn.hook_k", "attn.hook_v", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z",
)  # fmt: skip


def nested_plan() -> Plan:
    """LLL H LLL H, each letter two layers."""
    layers = [layer for _ in range(HIGH_CYCLES) for layer in (*LOW * LOW_CYCLES, *HIGH)]
    return tuple(Step(layer, layers[:position].count(layer)) for position, layer in enumerate(layers))


@cache
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(byte_level_bpe(1000).to_str(), eos_token="<|end|>")


class DenseLayer(nn.Module):
    """Attention and a MLP, each after a norm without a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.GELU(), nn.Linear(32, WIDTH, bias=False))

    def forward(self, x_BTD: Tensor, step: "DenseStep", allowed_BTS: Tensor, eager: bool) -> Tensor:
        x_BTD = step.hook_resid_pre(x_BTD)
        qkv = self.qkv(functional.rms_norm(x_BTD, (WIDTH,))).unflatten(-1, (3, HEADS, HEAD_WIDTH)).unbind(2)
        points = (step.attn.hook_q, step.attn.hook_k, step.attn.hook_v)
        q_BQTC, k_BQSC, v_BQSC = (point(x).transpose(1, 2) for point, x in zip(points, qkv, strict=True))
        if eager:
            scores_BQTS = (q_BQTC @ k_BQSC.mT / HEAD_WIDTH**0.5).masked_fill(~allowed_BTS[:, None], float("-inf"))
            z_BQTC = step.attn.hook_pattern(step.attn.hook_attn_scores(scores_BQTS).softmax(-1)) @ v_BQSC
        else:
            z_BQTC = functional.scaled_dot_product_attention(q_BQTC, k_BQSC, v_BQSC, allowed_BTS[:, None])
        z_BTQC = step.attn.hook_z(z_BQTC.transpose(1, 2))
        mid_BTD = step.hook_resid_mid(x_BTD + step.hook_attn_out(self.out(z_BTQC.flatten(2))))
        return step.hook_resid_post(mid_BTD + step.hook_mlp_out(self.mlp(functional.rms_norm(mid_BTD, (WIDTH,)))))


class DenseStep(nn.Module):
    """The hook points of one visit, and nothing else."""

    hook_out_is_single_residual_stream = True

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        for site in SITES:
            self.get_submodule(site.rpartition(".")[0]).add_module(site.rpartition(".")[2], SitePoint())


class DenseNested(LoopedModel):
    def __init__(self, seed: int = 0) -> None:
        plan = nested_plan()
        super().__init__(
            Architecture(
                family="dense-nested", steps=plan, loop_factors=(1.0,) * len(plan), sites=SITES, width=WIDTH,
                num_heads=HEADS, num_kv_heads=HEADS, head_width=HEAD_WIDTH, num_experts=0, top_k=0, router="none",
                vocab_size=tokenizer().vocab_size, context=CONTEXT,
            ),
            tokenizer(),
        )  # fmt: skip
        self.embed = nn.Embedding(self.architecture.vocab_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.hook_embed = SitePoint()
        self.layers = nn.ModuleList(DenseLayer() for _ in range(4))
        self.blocks = nn.ModuleList(DenseStep() for _ in plan)
        self.ln_final = nn.RMSNorm(WIDTH)
        self.unembed = nn.Linear(WIDTH, self.architecture.vocab_size, bias=False)
        self.setup()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)

    def forward(self, inputs: Tensor, **options: Unpack[PassOptions]) -> Tensor:
        """Logits (B, T, W). It starts with tokens and ends with logits: a state in the middle is two tensors."""
        request = self.request(**options)
        if not (request.from_tokens and request.to_logits):
            raise UserError("a dense-nested network must run whole; got start_at or stop_at")
        length = inputs.shape[1]
        allowed_BTS = torch.ones(length, length, dtype=torch.bool).tril()[None]
        start_BT, mask_BT = options.get("segment_start_BT"), options.get("attention_mask_BT")
        if start_BT is not None:
            allowed_BTS = allowed_BTS & (torch.arange(length) >= start_BT[:, :, None])
        if mask_BT is not None:
            allowed_BTS = allowed_BTS & mask_BT.bool()[:, None] | torch.eye(length, dtype=torch.bool)
        position_T = torch.arange(length) if start_BT is None else torch.arange(length) - start_BT
        low_BTD = high_BTD = self.hook_embed(self.embed(inputs) + self.positions(position_T))
        for index, (layer, _) in enumerate(self.plan):
            if layer in (LOW[0], HIGH[0]):
                state_BTD = low_BTD + high_BTD
            state_BTD = self.layers[layer](state_BTD, self.blocks[index], allowed_BTS, request.attention == "eager")
            if layer == LOW[-1]:
                low_BTD = state_BTD
            elif layer == HIGH[-1]:
                high_BTD = state_BTD
        return self.unembed(self.ln_final(high_BTD))

    @property
    def cfg(self) -> TransformerLensConfig:
        return lens_config(
            self.architecture, device=self.device, dtype=self.W_E.dtype, d_mlp=32, eps=1e-6,
            positional_embedding_type="standard", act_fn="gelu", gated_mlp=False,
        )  # fmt: skip
