"""Transformers models on the expert layer: the same logits and gradients as their own experts."""

import pytest
import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from model.experts.transformers_backend import register_with_transformers
from smelt_interp.errors import UserError

SHAPE = {
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def tiny(name: str, **changes: object) -> PreTrainedModel:
    """Two layers, six experts of width 18: not a multiple of 16 bytes in either direction."""
    torch.manual_seed(0)
    if name == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**SHAPE, intermediate_size=18, **changes))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, intermediate_size=30, moe_intermediate_size=18, head_dim=12, **changes)
    )


def logits_and_gradients(model: PreTrainedModel, implementation: str) -> dict[str, Tensor]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    tokens_BT = torch.arange(22).view(2, 11) * 7 % 50
    logits_BTW = model(tokens_BT).logits
    logits_BTW.square().mean().backward()
    return {"logits": logits_BTW.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["olmoe", "qwen3"])
def test_logits_and_all_gradients_equal_those_of_the_models_own_experts(name):
    model = tiny(name)
    eager = logits_and_gradients(model, "eager")
    ours = logits_and_gradients(model, register_with_transformers())
    assert len([key for key in eager if "experts" in key]) == 4
    for key in eager:
        torch.testing.assert_close(ours[key], eager[key], rtol=1e-5, atol=1e-6 * float(eager[key].abs().max()))


def test_generation_chooses_the_same_tokens():
    model = tiny("qwen3").eval()
    chosen = []
    for implementation in ("eager", register_with_transformers()):
        model.set_experts_implementation(implementation)
        tokens_BT = torch.tensor([[3, 1, 4, 1, 5]])
        chosen.append(
            model.generate(tokens_BT, attention_mask=torch.ones_like(tokens_BT), max_new_tokens=8, do_sample=False)
        )
    assert torch.equal(*chosen)


def test_another_activation_is_refused():
    model = tiny("olmoe", hidden_act="gelu")
    model.set_experts_implementation(register_with_transformers())
    with pytest.raises(UserError, match="OlmoeExperts must have SiLU as activation for the smelt experts"):
        model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [("has_bias", True, "no biases"), ("is_concatenated", False, "gate rows before up rows"),
     ("has_post_expert_norm", True, "no norm after the experts"), ("_is_expert_parallel", True, "on one device")],
)  # fmt: skip
def test_what_the_layer_does_not_compute_is_refused(attribute, value, message):
    model = tiny("olmoe")
    model.set_experts_implementation(register_with_transformers())
    setattr(model.model.layers[1].mlp.experts, attribute, value)
    with pytest.raises(UserError, match=message):
        model(torch.tensor([[1, 2]]))


def test_transposed_weights_are_read_as_they_lie():
    """As in models that store input by output: the same numbers, transposed, give the same logits."""
    model = tiny("olmoe").eval()
    model.set_experts_implementation(register_with_transformers())
    tokens_BT = torch.tensor([[3, 1, 4, 1, 5]])
    plain = model(tokens_BT).logits
    for layer in model.model.layers:
        module = layer.mlp.experts
        module.gate_up_proj = nn.Parameter(module.gate_up_proj.transpose(1, 2).contiguous())
        module.down_proj = nn.Parameter(module.down_proj.transpose(1, 2).contiguous())
        module.is_transposed = True
    torch.testing.assert_close(model(tokens_BT).logits, plain)
