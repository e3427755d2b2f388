"""What has to be known of a family: where its modules are, and the order in which it runs its layers.

Paths are those of `named_modules`; `*` stands for a number. A path of a part is inside a layer. An empty path is a
part that the family has not: the sites that hang on it are not in its architecture.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from smelt_interp.architecture import Router
from smelt_interp.plan import Plan, Step

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Norm = Literal["RMS", "LN", "L2"]
"""LN takes the mean off; L2 divides by the length."""


def in_order(layers: list[int]) -> Plan:
    """The plan that runs these layers one after the other."""
    return tuple(Step(layer, layers[:position].count(layer)) for position, layer in enumerate(layers))


def each_once(config: "PretrainedConfig") -> Plan:
    """The plan of a network without loops."""
    return tuple(Step(layer, 0) for layer in range(config.num_hidden_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of `model.families.table`."""

    layers: tuple[str, ...] = ("model.layers.*",)
    """The physical layers; a layer's number is its place among all that match, pattern after pattern."""
    plan: Callable[["PretrainedConfig"], Plan] = each_once
    """The order in which a network of this config runs them."""
    loopable: bool = False
    """Whether each layer runs once and hands one stream on, so that `--loop` can run a span of them again."""
    final_norm: str = "model.norm"
    """The norm that reads the stream after the last step."""
    embedding: str = "model.embed_tokens"
    """The token embedding, of a family whose code comes with its checkpoint."""
    reads_out: bool = True
    """Whether it and the unembedding alone make logits of the last stream."""
    attention: str = "self_attn"
    """The module that attends."""
    calls: Literal["interface", "fused", "softmax"] = "interface"
    """What it calls: transformers' attention interface, or torch's `scaled_dot_product_attention` or `softmax`."""
    rotary: bool = True
    """Whether queries and keys are rotated before the function that it calls gets them."""
    projections: Mapping[str, str] = field(
        default_factory=lambda: {"attn.hook_q": "self_attn.q_proj", "attn.hook_k": "self_attn.k_proj"}
    )
    """Sites whose value is the output of a module, all heads side by side."""
    heads_out: str = "self_attn.o_proj"
    """The map from all heads' values, side by side, to the attention's output."""
    attn_out: str = "self_attn"
    """The module whose output is added to the stream."""
    mlp_out: str = "mlp"
    first_norm: str = "input_layernorm"
    """The norm whose output the attention reads."""
    second_norm: str = "post_attention_layernorm"
    """The norm whose output the MLP reads; where updates have sites, it reads the stream between the two."""
    router: str = ""
    """The module that gives router logits, weights of the chosen experts, and which are chosen."""
    router_kind: Router = "none"
    experts: str = ""
    """The module that gives the sum of the chosen experts' outputs, which is what `mlp_out` adds."""
    num_experts: str = "num_experts"
    """The config's word for it."""
    halting: str = ""
    """The gate that is called once a visit."""
    stops: Callable[[Tensor], Tensor] = lambda chances_VBT: chances_VBT
    """The chance with which each token stops after each visit (V, B, T), of what the gate gives; chances add up."""
    norm: Norm = "RMS"
    gated_mlp: bool = True
    causal: bool = True
    whole_rows: bool = False
    """Whether something beside attention reads earlier tokens, so that a row cannot hold two documents."""
    takes_masks: bool = True
    """Whether its forward pass takes a mask of padding and positions; without them its positions must be relative."""
    options: Mapping[str, object] = field(default_factory=dict)
    """More arguments of its forward pass."""
    context: str = "max_position_embeddings"
    """The config's word for it."""
    masked: bool = False
    """Whether it predicts masked tokens instead of the next one."""

    @property
    def heads_apart(self) -> bool:
        """Whether what attention adds is the sum of its heads' results, and a bias if the map has one."""
        return bool(self.heads_out) and self.attn_out == self.attention

    def sites(self) -> tuple[str, ...]:
        """The sites that its modules give."""
        given = {
            "hook_resid_pre": True,
            "hook_resid_mid": bool(self.second_norm and self.mlp_out),
            "hook_resid_post": True,
            "hook_attn_out": bool(self.attn_out),
            "hook_mlp_out": bool(self.mlp_out),
            "ln1.hook_scale": bool(self.first_norm),
            "ln1.hook_normalized": bool(self.first_norm),
            "ln2.hook_scale": bool(self.second_norm),
            "ln2.hook_normalized": bool(self.second_norm),
            "attn.hook_q": "attn.hook_q" in self.projections or not self.rotary,
            "attn.hook_k": "attn.hook_k" in self.projections or not self.rotary,
            "attn.hook_v": self.calls != "softmax" or "attn.hook_v" in self.projections,
            "attn.hook_rot_q": self.rotary and self.calls != "softmax",
            "attn.hook_rot_k": self.rotary and self.calls != "softmax",
            "attn.hook_attn_scores": True,
            "attn.hook_pattern": True,
            "attn.hook_z": True,
            "attn.hook_result": self.heads_apart,
            "mlp.hook_router_logits": bool(self.router),
            "mlp.hook_expert_indices": bool(self.router),
            "mlp.hook_expert_weights": bool(self.router),
            "mlp.hook_expert_result": bool(self.experts),
        }
        return tuple(suffix for suffix, holds in given.items() if holds)

    def find_layers(self, network: nn.Module) -> list[nn.Module]:
        """The physical layers of a network, in the order of their numbers."""
        return [
            module
            for pattern in self.layers
            for name, module in network.named_modules()
            if re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name)
        ]
