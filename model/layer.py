"""The physical layer: its weights, and the arithmetic that every visit runs with them.

A layer holds no hook of its own. It is handed the step that is running (`model.step_hooks.StepHooks`) and sends each
intermediate value through that step's hook points, so two visits of one layer never share a hook.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.experts.call import ExpertCall, ExpertWeights, sum_slots
from model.experts.expert_layer import experts, experts_traced
from model.hooks.names import Request
from model.kv_cache import KVCache
from model.routing import Routing, gather_weights, route
from model.step_hooks import AttentionHooks, MoEHooks, NormHooks, StepHooks
from smelt_interp.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one forward pass computes, and from what: the same for all its steps."""

    request: Request
    allowed_BTS: Tensor | None
    """True where a query may look; None is plain causal attention over whole rows."""
    cos_BT1C: Tensor | None
    """RoPE cosines by position; None is a network without rotary embedding."""
    sin_BT1C: Tensor | None
    """RoPE sines, those of the first half of the head width with a minus."""
    kv_cache: KVCache | None
    routings: list[Routing]
    """Takes each step's routing, in order."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain, over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, hooks: NormHooks | None = None) -> Tensor:
        """Same shape as `x`. `hooks` sees the scale and the normalised value before the gain."""
        return rms_norm(x, self.weight, self.eps, hooks)


class Attention(nn.Module):
    """Grouped-query attention; query head h reads key/value head h // (Q / G)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_width
        heads, kv_heads = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, heads, bias=False)
        self.k_proj = nn.Linear(config.width, kv_heads, bias=False)
        self.v_proj = nn.Linear(config.width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.width, bias=False)
        q_gains, k_gains = config.qk_gains
        self.q_norm = RMSNorm(q_gains, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(k_gains, config.norm_eps) if config.qk_norm else None
        self.qk_norm_over = config.qk_norm_over

    def forward(self, x_BTD: Tensor, *, hooks: AttentionHooks, scale: float, run: Pass) -> Tensor:
        """The update of one visit, loop factor inside: (B, T, D)."""
        batch, length, _ = x_BTD.shape
        q_BTQC = hooks.hook_q(self.q_proj(x_BTD).view(batch, length, self.num_heads, self.head_width))
        k_BTGC = hooks.hook_k(self.k_proj(x_BTD).view(batch, length, self.num_kv_heads, self.head_width))
        v_BTGC = hooks.hook_v(self.v_proj(x_BTD).view(batch, length, self.num_kv_heads, self.head_width))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTQC, k_BTGC = self._normed(self.q_norm, q_BTQC), self._normed(self.k_norm, k_BTGC)
        rotated_q_BTQC = hooks.hook_rot_q(rotate(q_BTQC, run.cos_BT1C, run.sin_BT1C))
        rotated_k_BTGC = hooks.hook_rot_k(rotate(k_BTGC, run.cos_BT1C, run.sin_BT1C))
        k_BSGC, v_BSGC = rotated_k_BTGC, v_BTGC
        if run.kv_cache is not None:
            k_BSGC, v_BSGC = run.kv_cache.append(hooks.step_index, rotated_k_BTGC, v_BTGC)

        if run.request.attention == "eager":
            z_BTQC = self._eager(rotated_q_BTQC, k_BSGC, v_BSGC, run.allowed_BTS, hooks)
        else:
            z_BTQC = fused_attention(rotated_q_BTQC, k_BSGC, v_BSGC, run.allowed_BTS)
        z_BTQC = hooks.hook_z(z_BTQC)
        if run.request.head_results:
            result_BTQD: Tensor = hooks.hook_result(
                torch.einsum("btqc,qcd->btqd", z_BTQC, self.output_weight() * scale)
            )
            return result_BTQD.sum(2)
        update_BTD: Tensor = self.o_proj(z_BTQC.flatten(2))
        return update_BTD if scale == 1 else update_BTD * scale

    def input_weight(self, which: Literal["q", "k", "v"]) -> Tensor:
        """The matrix of queries, keys or values by head, (heads, D, C)."""
        projection = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}[which]
        by_head: Tensor = projection.weight.unflatten(0, (-1, self.head_width))
        return by_head.mT

    def output_weight(self) -> Tensor:
        """The output matrix by head, (Q, C, D), without the loop factor."""
        return self.o_proj.weight.T.reshape(self.num_heads, self.head_width, -1)

    def _normed(self, norm: RMSNorm, x_BTHC: Tensor) -> Tensor:
        """Queries or keys under their norm, head by head or all heads as one vector."""
        together = self.qk_norm_over == "all heads"
        normed: Tensor = norm(x_BTHC.flatten(2) if together else x_BTHC)
        return normed.view_as(x_BTHC)

    def _eager(
        self, q_BTQC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, allowed_BTS: Tensor | None, hooks: AttentionHooks
    ) -> Tensor:
        batch, length, _, _ = q_BTQC.shape
        grouped_BTGRC = q_BTQC.unflatten(2, (self.num_kv_heads, -1))
        scores_BQTS = torch.einsum("btgrc,bsgc->bgrts", grouped_BTGRC, k_BSGC).flatten(1, 2) * self.head_width**-0.5
        if allowed_BTS is None:
            held = k_BSGC.shape[1] - length
            allowed_BTS = torch.ones(length, k_BSGC.shape[1], dtype=torch.bool, device=q_BTQC.device).tril(held)[None]
        scores_BQTS = hooks.hook_attn_scores(scores_BQTS.masked_fill(~allowed_BTS[:, None], float("-inf")))
        pattern_BQTS = hooks.hook_pattern(scores_BQTS.float().softmax(-1).to(v_BSGC.dtype))
        grouped_BGRTS = pattern_BQTS.unflatten(1, (self.num_kv_heads, -1))
        return torch.einsum("bgrts,bsgc->btgrc", grouped_BGRTS, v_BSGC).reshape(batch, length, self.num_heads, -1)


class MixtureOfExperts(nn.Module):
    """A linear router, and the experts that it chooses from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        num_in = (2 if config.gated_experts else 1) * config.expert_width
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(config.num_experts, num_in, config.width))
        self.w_out = nn.Parameter(torch.empty(config.num_experts, config.width, config.expert_width))

    def forward(self, x_BTD: Tensor, *, hooks: MoEHooks, scale: float, run: Pass) -> tuple[Tensor, Routing]:
        """The update of one visit, loop factor inside: (B, T, D); and its routing, with axes B and T in place of N."""
        config = self.config
        logits_BTE = hooks.hook_router_logits(self.router(x_BTD).float())
        routing = route(
            logits_BTE,
            config.top_k,
            router=config.router,
            renormalise=config.renormalise_top_k,
            site=hooks.hook_router_logits.name,
        )
        indices_BTK = hooks.hook_expert_indices(routing.expert_indices_NK)
        # Gathered anew from what left a hooked point, so an edit there is followed, in place too.
        weights_BTK = routing.expert_weights_NK
        if hooks.hook_expert_indices.is_hooked:
            weights_BTK = gather_weights(routing.scores_NE, indices_BTK, renormalise=config.renormalise_top_k)
        weights_BTK = hooks.hook_expert_weights(weights_BTK)
        call = ExpertCall(
            x_BTD.flatten(0, 1),
            indices_BTK.flatten(0, 1),
            weights_BTK.flatten(0, 1),
            ExpertWeights(self.w_in, self.w_out),
            gated=config.gated_experts,
        )
        shape_BT = x_BTD.shape[:2]
        if run.request.expert_results:
            result_BTKD = hooks.hook_expert_result(experts_traced(call).slot_NKD.unflatten(0, shape_BT) * scale)
            out_BTD = sum_slots(result_BTKD.flatten(0, 1)).unflatten(0, shape_BT)
        else:
            # Also where the factor is 1: the product is no view, on which FSDP could not hang its hook.
            out_BTD = experts(call).unflatten(0, shape_BT) * scale
        return out_BTD, Routing(indices_BTK, weights_BTK, routing.scores_NE, routing.logits_NE)


class Layer(nn.Module):
    """One physical layer: pre-norm attention, then pre-norm experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config)
        self.ln2 = RMSNorm(config.width, config.norm_eps)
        self.mlp = MixtureOfExperts(config)

    def forward(self, resid_BTD: Tensor, *, step: StepHooks, run: Pass) -> tuple[Tensor, Routing]:
        """The residual stream after this visit (B, T, D), and the visit's routing."""
        resid_BTD = step.hook_resid_pre(resid_BTD)
        attn_out_BTD = self.attn(self.ln1(resid_BTD, step.ln1), hooks=step.attn, scale=step.scale, run=run)
        mid_BTD = step.hook_resid_mid(resid_BTD + step.hook_attn_out(attn_out_BTD))
        mlp_out_BTD, routing = self.mlp(self.ln2(mid_BTD, step.ln2), hooks=step.mlp, scale=step.scale, run=run)
        return step.hook_resid_post(mid_BTD + step.hook_mlp_out(mlp_out_BTD)), routing


def rms_norm(x: Tensor, gain: Tensor, eps: float, hooks: NormHooks | None) -> Tensor:
    """The norm itself, statistics in float32, with its hook points if it has any."""
    x_float = x.float()
    scale = x_float.pow(2).mean(-1, keepdim=True).add_(eps).sqrt_()
    if hooks is None:
        return (x_float / scale).to(x.dtype) * gain
    normalised: Tensor = hooks.hook_normalized((x_float / hooks.hook_scale(scale)).to(x.dtype))
    return normalised * gain


def fused_attention(q_BTQC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, allowed_BTS: Tensor | None) -> Tensor:
    """Attention without scores or patterns to look at: (B, T, Q, C)."""
    if q_BTQC.shape[1] == 1 and allowed_BTS is None:  # one query, no key forbidden: a head's group shares its keys
        q_BGRC = q_BTQC.squeeze(1).unflatten(1, (k_BSGC.shape[2], -1))
        z_BGRC = functional.scaled_dot_product_attention(q_BGRC, k_BSGC.transpose(1, 2), v_BSGC.transpose(1, 2))
        return z_BGRC.flatten(1, 2)[:, None]
    mask_B1TS = None if allowed_BTS is None else allowed_BTS[:, None]
    z_BQTC = functional.scaled_dot_product_attention(
        q_BTQC.transpose(1, 2), k_BSGC.transpose(1, 2), v_BSGC.transpose(1, 2),
        attn_mask=mask_B1TS, is_causal=mask_B1TS is None, enable_gqa=True,
    )  # fmt: skip
    return z_BQTC.transpose(1, 2)


def rotate(x_BTHC: Tensor, cos_BT1C: Tensor | None, sin_BT1C: Tensor | None) -> Tensor:
    """Rotary position embedding on halves of the head width (arXiv:2104.09864, in the half-split layout)."""
    if cos_BT1C is None or sin_BT1C is None:
        return x_BTHC
    rotated_BTHC = x_BTHC * cos_BT1C + x_BTHC.roll(x_BTHC.shape[-1] // 2, -1) * sin_BT1C
    return rotated_BTHC.to(x_BTHC.dtype)
