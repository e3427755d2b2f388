"""Every experts class of the installed transformers: computed as its own forward does, or refused in one line."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import models

from model.experts.transformers_backend import register_with_transformers
from smelt_interp.errors import UserError

SIZES = {
    "hidden_size": 24, "num_experts_per_tok": 2, "hidden_act": "silu", "hidden_activation": "silu",
    "moe_hidden_act": "silu", "mlp_hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
    "moe_latent_size": None, "rms_norm_eps": 1e-6, "post_norm_eps": 1e-6, "mlp_gate_softcap": 5.0,
    "mlp_up_softcap": 5.0, "moe_hidden_size": 24,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_intermediate_size", "mlp_size"), 18),
}  # fmt: skip
"""Every name under which a config of transformers keeps a size that some experts class reads."""
OWN_FORM = {
    "Glm5NextTextExperts", "GptOssExperts", "HYV4Experts", "HYV4VLExperts", "MiniMaxM3VLExperts",
    "OpenAIPrivacyFilterExperts",
}  # fmt: skip
OTHER_GATE = {"BeamExperts", "DeepseekV4Experts"}
OTHER_ACTIVATION = {"Inkling2Experts", "Inkling2LoopExperts"}
OTHER_NORM = {"MuseSparkExperts"}


def classes() -> dict[str, type[nn.Module]]:
    """Name -> class, of every one that takes another experts implementation."""
    found = {}
    for path in sorted(Path(models.__file__).parent.glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), re.MULTILINE):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            found[name] = getattr(module, name)
    return found


def outcome(experts_class: type[nn.Module]) -> str:
    """What the layer makes of a tiny instance: `equal` to its own forward, or the refusal."""
    config = SimpleNamespace(**SIZES, _experts_implementation="eager")
    try:
        layer = experts_class(config)
    except TypeError:  # some take the experts' width beside the config
        layer = experts_class(config, 18)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.2)
    call = torch.randn(9, 24), torch.rand(9, 6).topk(2).indices, torch.rand(9, 2)
    with torch.no_grad():
        own = layer(*call)
        config._experts_implementation = register_with_transformers()
        try:
            ours = layer(*call)
        except UserError as refusal:
            return str(refusal)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6 * float(own.abs().max()))
    return "equal"


def test_every_class_is_computed_or_refused_in_one_line():
    torch.manual_seed(0)
    outcomes = {name: outcome(experts_class) for name, experts_class in classes().items()}
    reasons = {name: text for name, text in outcomes.items() if text != "equal"}
    assert len(outcomes) == 68
    assert {name for name, text in reasons.items() if "one of its own form" in text} == OWN_FORM
    assert {name for name, text in reasons.items() if "plain SwiGLU as gate" in text} == OTHER_GATE
    assert {name for name, text in reasons.items() if "SiLU as activation" in text} == OTHER_ACTIVATION
    assert {name for name, text in reasons.items() if "no norm after the experts" in text} == OTHER_NORM
    assert len(reasons) == len(OWN_FORM | OTHER_GATE | OTHER_ACTIVATION | OTHER_NORM)
    assert all(text.endswith("use set_experts_implementation('eager')") for text in reasons.values())
