"""The step: one execution of a layer, with hook points of its own and no weights.

Its weights by transformer-lens's names are the layer's. What reads the stream (`W_Q`, `W_K`, `W_V`, `W_in`, `W_gate`)
is the layer's weight as it is; what writes to it (`W_O`, `W_out`) has the loop factor of the step inside.
"""

from torch import Tensor, nn

from model.layer import Layer, Pass
from model.step_hooks import AttentionHooks, MoEHooks, StepHooks
from smelt_interp.errors import UserError


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


class StepAttention(AttentionHooks):
    """Hook points and weights of one visit's attention."""

    def __init__(self, step_index: int, layers: LayerRef, scale: float) -> None:
        super().__init__(step_index)
        self.scale = scale
        self._layers = layers

    @property
    def W_Q(self) -> Tensor:
        """Query weight by head, (Q, D, C)."""
        return self._layers.layer.attn.input_weight("q")

    @property
    def W_K(self) -> Tensor:
        """Key weight by key/value head, (G, D, C)."""
        return self._layers.layer.attn.input_weight("k")

    @property
    def W_V(self) -> Tensor:
        """Value weight by key/value head, (G, D, C)."""
        return self._layers.layer.attn.input_weight("v")

    @property
    def W_O(self) -> Tensor:
        """Output weight by head (Q, C, D), loop factor inside, so that head results sum to `hook_attn_out`."""
        return self._layers.layer.attn.output_weight() * self.scale


class StepExperts(MoEHooks):
    """Hook points and weights of one visit's experts."""

    def __init__(self, layers: LayerRef, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self._layers = layers

    @property
    def W_in(self) -> Tensor:
        """Weight of each expert's linear half, (E, D, F)."""
        experts = self._layers.layer.mlp
        return experts.w_in[:, -experts.config.expert_width :].mT

    @property
    def W_gate(self) -> Tensor:
        """Weight of each expert's gate, (E, D, F). Raises `UserError` for experts without one."""
        experts = self._layers.layer.mlp
        if not experts.config.gated_experts:
            raise UserError("W_gate must be asked of gated experts; got a network with gated_experts=False")
        return experts.w_in[:, : experts.config.expert_width].mT

    @property
    def W_out(self) -> Tensor:
        """Output weight of each expert, (E, F, D), loop factor inside, so that expert results sum to `hook_mlp_out`."""
        return self._layers.layer.mlp.w_out.mT * self.scale


class Block(StepHooks):
    """One step of the plan, under transformer-lens's name for a layer."""

    hook_out_is_single_residual_stream = True
    """transformer-lens's word for "the stream after the last step is what the unembedding reads"."""

    def __init__(self, step_index: int, layers: LayerRef, scale: float) -> None:
        super().__init__(scale, StepAttention(step_index, layers, scale), StepExperts(layers, scale))
        self._layers = layers

    @property
    def layer(self) -> Layer:
        """The physical layer that this step runs."""
        return self._layers.layer

    def forward(self, resid_BTD: Tensor, run: Pass) -> Tensor:
        """Run the layer once. Appends the visit's routing to those of the pass and returns the stream (B, T, D)."""
        resid_BTD, routing = self.layer(resid_BTD, step=self, run=run)
        run.routings.append(routing)
        return resid_BTD
