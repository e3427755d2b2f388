"""The expert layer as an experts implementation of Hugging Face transformers.

    register_with_transformers()
    model.set_experts_implementation("smelt")

Any transformers model whose experts are SwiGLU (or SiLU) matrices without biases then runs on the expert layer.
"""

from types import MethodType
from typing import Protocol

from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from model.experts.call import ExpertCall, ExpertWeights
from model.experts.expert_layer import experts
from smelt_interp.errors import UserError

NAME = "smelt"


class _TransformersExperts(Protocol):
    """What transformers' decorator puts on every experts module."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    is_concatenated: bool
    _is_expert_parallel: bool
    act_fn: nn.Module
    gate_up_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    _apply_gate: MethodType


def register_with_transformers() -> str:
    """Make the layer known to transformers; returns the name for `set_experts_implementation`."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, transformers_experts)
    return NAME


def transformers_experts(
    self: _TransformersExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts` with the weights of a transformers module. Raises `UserError` for what the layer does not compute."""
    if not all(hasattr(self, name) for name in ("has_gate", "has_bias", "is_transposed", "act_fn", "down_proj")):
        raise UserError(
            f"{type(self).__name__} must be an experts module in transformers' common form for the {NAME} experts; got "
            "one of its own form; use set_experts_implementation('eager')"
        )
    plain_gate = not self.has_gate or self._apply_gate.__func__ is moe._default_apply_gate
    for holds, what in (
        (not self.has_bias, "no biases"),
        (not self.has_post_expert_norm, "no norm after the experts"),
        (self.is_concatenated, "gate rows before up rows, not interleaved"),
        (not self._is_expert_parallel, "all experts on one device"),
        (isinstance(self.act_fn, (nn.SiLU, SiLUActivation)) or self.act_fn is nn.functional.silu, "SiLU as activation"),
        (plain_gate, "plain SwiGLU as gate"),
    ):
        if not holds:
            raise UserError(
                f"{type(self).__name__} must have {what} for the {NAME} experts; "
                "got another; use set_experts_implementation('eager')"
            )
    w_in, w_out = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if self.is_transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    weights = ExpertWeights(w_in, w_out)
    return experts(ExpertCall(hidden_states, top_k_index, top_k_weights, weights, gated=self.has_gate))
