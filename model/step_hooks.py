"""The hook points of one step, grouped as transformer-lens names them; a layer sends its values through them."""

from torch import nn

from model.hooks.hook_point import SitePoint


class NormHooks(nn.Module):
    """Hook points of one norm: the scale (B, T, 1), and the normalised value (B, T, D) before the gain."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_scale = SitePoint()
        self.hook_normalized = SitePoint()


class AttentionHooks(nn.Module):
    """Hook points of one visit's attention."""

    def __init__(self, step_index: int) -> None:
        """step_index: the slot of the KV cache that this visit fills."""
        super().__init__()
        self.step_index = step_index
        self.hook_q = SitePoint()
        self.hook_k = SitePoint()
        self.hook_v = SitePoint()
        self.hook_rot_q = SitePoint()
        self.hook_rot_k = SitePoint()
        self.hook_attn_scores = SitePoint()
        self.hook_pattern = SitePoint()
        self.hook_z = SitePoint()
        self.hook_result = SitePoint()


class MoEHooks(nn.Module):
    """Hook points of one visit's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_router_logits = SitePoint()
        self.hook_expert_indices = SitePoint()
        self.hook_expert_weights = SitePoint()
        self.hook_expert_result = SitePoint()


class StepHooks(nn.Module):
    """All hook points of one visit of a layer, and the loop factor with which the visit runs."""

    def __init__(self, scale: float, attn: AttentionHooks, mlp: MoEHooks) -> None:
        super().__init__()
        self.scale = scale
        self.hook_resid_pre = SitePoint()
        self.ln1 = NormHooks()
        self.attn = attn
        self.hook_attn_out = SitePoint()
        self.hook_resid_mid = SitePoint()
        self.ln2 = NormHooks()
        self.mlp = mlp
        self.hook_mlp_out = SitePoint()
        self.hook_resid_post = SitePoint()
