"""The step: one execution of a layer, with hook points of its own and no weights."""

from torch import Tensor, nn

from model.hooks.hook_point import SitePoint
from model.layer import Layer, Pass


class NormHooks(nn.Module):
    """Hook points of one norm: the scale (B, T, 1), and the normalised value (B, T, D) before the gain."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_scale = SitePoint()
        self.hook_normalized = SitePoint()


class AttentionHooks(nn.Module):
    """Hook points of one visit's attention, and its output weight with the loop factor inside."""

    def __init__(self, step_index: int, layers: "LayerRef", scale: float) -> None:
        super().__init__()
        self.step_index = step_index
        self.scale = scale
        self._layers = layers
        self.hook_q = SitePoint()
        self.hook_k = SitePoint()
        self.hook_v = SitePoint()
        self.hook_rot_q = SitePoint()
        self.hook_rot_k = SitePoint()
        self.hook_attn_scores = SitePoint()
        self.hook_pattern = SitePoint()
        self.hook_z = SitePoint()
        self.hook_result = SitePoint()

    @property
    def W_O(self) -> Tensor:
        """Output weight by head (Q, C, D), loop factor inside, so that head results sum to `hook_attn_out`."""
        return self._layers.layer.attn.output_weight() * self.scale


class MoEHooks(nn.Module):
    """Hook points of one visit's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_router_logits = SitePoint()
        self.hook_expert_indices = SitePoint()
        self.hook_expert_weights = SitePoint()
        self.hook_expert_result = SitePoint()


class LayerRef:
    """Where a step finds its layer: the network's list of layers and a position in it, looked up at each use.

    Not a module, so that `state_dict` holds each weight once; the list itself is shared, so a layer that is replaced
    there is the layer that runs, and `deepcopy` and pickle keep the two together.
    """

    def __init__(self, layers: nn.ModuleList, index: int) -> None:
        self.layers = layers
        self.index = index

    @property
    def layer(self) -> Layer:
        """The layer at the position now."""
        layer: Layer = self.layers[self.index]  # type: ignore[assignment]  # it holds Layers alone
        return layer


class Block(nn.Module):
    """One step of the plan, under transformer-lens's name for a layer."""

    hook_out_is_single_residual_stream = True
    """transformer-lens's word for "the stream after the last step is what the unembedding reads"."""

    def __init__(self, step_index: int, layers: LayerRef, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self._layers = layers
        self.hook_resid_pre = SitePoint()
        self.ln1 = NormHooks()
        self.attn = AttentionHooks(step_index, layers, scale)
        self.hook_attn_out = SitePoint()
        self.hook_resid_mid = SitePoint()
        self.ln2 = NormHooks()
        self.mlp = MoEHooks()
        self.hook_mlp_out = SitePoint()
        self.hook_resid_post = SitePoint()

    @property
    def layer(self) -> Layer:
        """The physical layer that this step runs."""
        return self._layers.layer

    def forward(self, resid_BTD: Tensor, run: Pass) -> Tensor:
        """Run the layer once. Appends the visit's routing to those of the pass and returns the stream (B, T, D)."""
        resid_BTD, routing = self.layer(resid_BTD, step=self, run=run)
        run.routings.append(routing)
        return resid_BTD
