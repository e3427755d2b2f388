"""Weights of Llama, Qwen3, Qwen3-MoE, OLMoE and Mixtral in our own network, and ours unlooped as a folder of theirs.

A dense MLP is one expert that every token is sent to. What our network does not compute is refused by name.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.families.network import FamilyNetwork
from model.families.opening import looped_config, open_network, quiet, save
from model.network import LoopedMoE
from model.tokenizers import tokenizer_files
from smelt_interp.config import ModelConfig
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan
from smelt_interp.terminal.output_files import make_folder, write_whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HELD = ("llama", "qwen3", "qwen3_moe", "olmoe", "mixtral")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A network of theirs in our words."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer


def read_held(folder: str | Path, loop: LoopedSpan | None) -> Held:
    """What `LoopedMoE.from_transformers` makes a network of. Raises `UserError` as that does."""
    theirs = open_network(folder)
    if not isinstance(theirs, FamilyNetwork):
        raise UserError(f"a folder to be taken over must be of {', '.join(HELD)}; got one of our own, {folder}")
    config = held_config(theirs.model.config)
    if loop is not None:
        config = looped_config(config, loop)
    stored = dict(theirs.model.state_dict())
    weights = {ours: _read(stored, name, config) for ours, name in _names(config)}
    return Held(config=config, weights=weights, tokenizer=theirs.tokenizer)


def held_config(theirs: "PretrainedConfig") -> ModelConfig:
    """Our config of one of theirs. Raises `UserError` that names what is not held."""
    # What our network computes in no way.
    named, mixture = theirs.model_type, theirs.model_type in ("qwen3_moe", "olmoe", "mixtral")
    rope = theirs.rope_parameters if named in HELD else {}
    for holds, what in (
        (named in HELD, f"be one of {', '.join(HELD)}; got {named}"),
        (getattr(theirs, "hidden_act", "") == "silu", "have SiLU as activation"),
        (not getattr(theirs, "attention_bias", False), "have no biases in attention"),
        (not getattr(theirs, "mlp_bias", False), "have no biases in the MLP"),
        (not getattr(theirs, "sliding_window", None), "attend to whole rows, without a window"),
        (rope.get("rope_type", "default") == "default", "have a plain rotary embedding"),
        (rope.get("partial_rotary_factor", 1.0) == 1.0, "rotate whole heads"),
        (
            named != "olmoe" or theirs.num_attention_heads * _head_width(theirs) == theirs.hidden_size,
            "have heads as wide together as the stream",
        ),
        (getattr(theirs, "clip_qkv", None) is None, "not clip queries, keys and values (clip_qkv)"),
        (not getattr(theirs, "mlp_only_layers", None), "have experts in every layer"),
        (getattr(theirs, "decoder_sparse_step", 1) == 1, "have experts in every layer"),
    ):
        if not holds:
            raise UserError(f"a network to be taken over must {what}; open it by itself with open_network")
    # The rest has a place in our config; each family has its own words for experts.
    experts = theirs.num_local_experts if named == "mixtral" else theirs.num_experts if mixture else 1
    width = theirs.moe_intermediate_size if named == "qwen3_moe" else theirs.intermediate_size
    return ModelConfig(
        num_layers=theirs.num_hidden_layers,
        width=theirs.hidden_size,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_width=_head_width(theirs),
        num_experts=experts,
        top_k=theirs.num_experts_per_tok if mixture else 1,
        expert_width=width,
        vocab_size=theirs.vocab_size,
        context=theirs.max_position_embeddings,
        loop_start=0,
        loop_stop=0,
        num_visits=1,
        loop_scale=1.0,
        norm_eps=float(theirs.rms_norm_eps),
        rope_base=float(rope["rope_theta"]),
        qk_norm=named in ("qwen3", "qwen3_moe", "olmoe"),
        qk_norm_over="all heads" if named == "olmoe" else "head",
        renormalise_top_k=mixture and bool(getattr(theirs, "norm_topk_prob", True)),
        tied_unembedding=bool(theirs.tie_word_embeddings),
    )


def _head_width(theirs: "PretrainedConfig") -> int:
    width: int = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    return width


def export(network: LoopedMoE, folder: Path) -> None:
    """Write an unlooped network of ours as a new folder that transformers loads, whole or not at all.

    Raises `UserError` for a looped network, for what no family of theirs computes, and for a folder that exists.
    """
    config = network.config
    if config.num_visits > 1:
        raise UserError(f"a network to be exported must run each layer once; got {config.num_visits} visits")
    if config.router != "softmax" or not config.gated_experts or config.rope_base is None:
        raise UserError("a network to be exported must have a softmax router, gated experts and a rotary embedding")
    if folder.exists():
        raise UserError(f"a network must be exported to a new folder; {folder} exists")
    # Their network of this shape, filled in.
    with quiet():
        theirs = _theirs(config)
    stored: dict[str, Tensor] = dict(theirs.state_dict())
    for ours, name in _names(config):
        weight = network.state_dict()[ours]
        for part, rows in _parts(stored, name, weight):
            stored[part].copy_(rows)
    # The folder appears under its name only when it is whole.
    make_folder(folder.parent)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        save(theirs, scratch)
        for file, text in tokenizer_files(network.tokenizer).items():
            write_whole(scratch / file, text.encode())
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _theirs(config: ModelConfig) -> "PreTrainedModel":
    """A network of theirs of the same shape, with weights to be filled in."""
    import transformers

    # What all of them have, then what the experts and norms decide.
    shared = {
        "vocab_size": config.vocab_size, "hidden_size": config.width, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width, "max_position_embeddings": config.context, "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied_unembedding, "intermediate_size": config.expert_width,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if config.qk_norm_over == "all heads":
        if config.num_heads * config.head_width != config.width:
            raise UserError(
                f"a network to be exported must have num_heads x head_width equal to width, {config.width}, for its "
                f"norms over all heads; got {config.num_heads} x {config.head_width}"
            )
        made = transformers.AutoConfig.for_model(
            "olmoe", **shared, num_experts=config.num_experts, num_experts_per_tok=config.top_k,
            norm_topk_prob=config.renormalise_top_k,
        )  # fmt: skip
    elif config.num_experts == 1:
        kind = "qwen3" if config.qk_norm else "llama"
        made = transformers.AutoConfig.for_model(kind, **shared)
    elif config.qk_norm:
        made = transformers.AutoConfig.for_model(
            "qwen3_moe", **shared, num_experts=config.num_experts, num_experts_per_tok=config.top_k,
            moe_intermediate_size=config.expert_width, norm_topk_prob=config.renormalise_top_k,
        )  # fmt: skip
    elif config.renormalise_top_k:
        made = transformers.AutoConfig.for_model(
            "mixtral", **shared, num_local_experts=config.num_experts, num_experts_per_tok=config.top_k
        )
    else:
        raise UserError("a network to be exported must renormalise its top k when queries and keys are not normed")
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(made)
    return model.float()


def _names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Our name of each weight, and theirs; `mlp.up` and `mlp.down` stand for the experts, whose form differs."""
    yield "embed.weight", "model.embed_tokens.weight"
    yield "ln_final.weight", "model.norm.weight"
    if not config.tied_unembedding:
        yield "unembed.weight", "lm_head.weight"
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield f"{ours}.ln1.weight", f"{theirs}.input_layernorm.weight"
        yield f"{ours}.ln2.weight", f"{theirs}.post_attention_layernorm.weight"
        norms = ("q_norm", "k_norm") if config.qk_norm else ()
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", *norms):
            yield f"{ours}.attn.{part}.weight", f"{theirs}.self_attn.{part}.weight"
        yield f"{ours}.mlp.router.weight", f"{theirs}.mlp.gate.weight"
        yield f"{ours}.mlp.w_in", f"{theirs}.mlp.experts.gate_up_proj"
        yield f"{ours}.mlp.w_out", f"{theirs}.mlp.experts.down_proj"


def _read(stored: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """A weight by their name; of a dense MLP the one expert's, and a router with nothing to choose."""
    if name in stored:
        return stored[name].clone()
    if name.endswith("mlp.gate.weight"):
        return torch.zeros(1, config.width)
    mlp = name.partition(".experts.")[0]
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    return torch.cat([stored[f"{mlp}.{part}.weight"] for part in parts])[None].clone()


def _parts(stored: dict[str, Tensor], name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Where a weight of ours goes among theirs: the reverse of `_read`."""
    if name in stored:
        yield name, weight
        return
    mlp = name.partition(".experts.")[0]
    if name.endswith("gate_up_proj"):
        gate, up = weight[0].chunk(2)
        yield f"{mlp}.gate_proj.weight", gate
        yield f"{mlp}.up_proj.weight", up
    elif name.endswith("down_proj"):
        yield f"{mlp}.down_proj.weight", weight[0]
