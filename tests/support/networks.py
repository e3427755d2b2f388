"""Tiny random networks, and a deliberately plain one that computes the same without hooks, modules or batching."""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.network import LoopedMoE
from smelt_interp.config import ModelConfig
from smelt_interp.plan import plan
from tests.support.configs import TINY


def tiny_network(config: ModelConfig = TINY, seed: int = 0) -> LoopedMoE:
    """A random network whose gains are not 1, so that a forgotten one shows."""
    network = LoopedMoE(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 1:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return network.eval()


def random_tokens(batch: int = 3, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_logits(config: ModelConfig, weights: Mapping[str, Tensor], tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (T, W) of one row and its chosen experts (L_exec, T, K), in float64, one head and one token at a time."""
    weights = {name: weight.double() for name, weight in weights.items()}
    x_TD = weights["embed.weight"][tokens_T]
    length = len(tokens_T)
    chosen = []
    for layer, _ in plan(config):
        own = {name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()}
        scale = config.loop_scale if config.loop_start <= layer < config.loop_stop else 1.0
        x_TD = x_TD + scale * _plain_attention(config, own, _norm(x_TD, own["ln1.weight"], config.norm_eps))
        normed_TD = _norm(x_TD, own["ln2.weight"], config.norm_eps)
        update_TD, chosen_TK = torch.zeros_like(x_TD), []
        for t in range(length):
            update_TD[t], chosen_K = _plain_experts(config, own, normed_TD[t])
            chosen_TK.append(chosen_K)
        x_TD = x_TD + scale * update_TD
        chosen.append(torch.tensor(chosen_TK))
    final_TD = _norm(x_TD, weights["ln_final.weight"], config.norm_eps)
    return final_TD @ weights.get("unembed.weight", weights["embed.weight"]).T, torch.stack(chosen)


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def _plain_attention(config: ModelConfig, own: Mapping[str, Tensor], x_TD: Tensor) -> Tensor:
    length, out_TD = len(x_TD), torch.zeros_like(x_TD)
    per_group = config.num_heads // config.num_kv_heads

    def head(which: str, index: int) -> Tensor:
        rows = slice(index * config.head_width, (index + 1) * config.head_width)
        of_all_TX = x_TD @ own[f"attn.{which}_proj.weight"].T
        value_TC = of_all_TX[:, rows]
        if which == "v":
            return value_TC
        if config.qk_norm:
            gain = own[f"attn.{which}_norm.weight"]
            together = config.qk_norm_over == "all heads"
            value_TC = (
                _norm(of_all_TX, gain, config.norm_eps)[:, rows] if together else _norm(value_TC, gain, config.norm_eps)
            )
        return torch.stack([_rotated(config, value_TC[t], t) for t in range(length)])

    for index in range(config.num_heads):
        q_TC, k_TC, v_TC = head("q", index), head("k", index // per_group), head("v", index // per_group)
        columns = slice(index * config.head_width, (index + 1) * config.head_width)
        for t in range(length):
            pattern_S = (k_TC[: t + 1] @ q_TC[t] / config.head_width**0.5).softmax(0)
            out_TD[t] += own["attn.o_proj.weight"][:, columns] @ (pattern_S @ v_TC[: t + 1])
    return out_TD


def _rotated(config: ModelConfig, x_C: Tensor, position: int) -> Tensor:
    if config.rope_base is None:
        return x_C
    half = config.head_width // 2
    angles = position * config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x_C[:half], x_C[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag))


def _plain_experts(config: ModelConfig, own: Mapping[str, Tensor], x_D: Tensor) -> tuple[Tensor, list[int]]:
    logits_E = own["mlp.router.weight"] @ x_D
    scores_E = logits_E.softmax(0) if config.router == "softmax" else 1 / (1 + (-logits_E).exp())
    chosen = sorted(range(config.num_experts), key=lambda expert: -float(scores_E[expert]))[: config.top_k]
    total = sum(float(scores_E[expert]) for expert in chosen) if config.renormalise_top_k else 1.0
    out_D = torch.zeros_like(x_D)
    for expert in chosen:
        hidden_F = own["mlp.w_in"][expert] @ x_D
        if config.gated_experts:
            gate_F, up_F = hidden_F[: config.expert_width], hidden_F[config.expert_width :]
            hidden_F = gate_F / (1 + (-gate_F).exp()) * up_F
        else:
            hidden_F = hidden_F / (1 + (-hidden_F).exp())
        out_D += scores_E[expert] / total * (own["mlp.w_out"][expert] @ hidden_F)
    return out_D, chosen
