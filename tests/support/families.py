"""Tiny random networks of every family, as their authors' classes make them, and a tokenizer for their folders."""

from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from model.families.network import FamilyNetwork
from model.families.opening import quiet
from model.families.table import FAMILIES
from smelt_interp.costs.spans import LayerRange
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.looped_span import LoopedSpan

VOCABULARY = BYTES.vocab_size
DENSE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXTURE = {**DENSE, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SETTINGS: dict[str, dict[str, object]] = {
    "llama": DENSE,
    "qwen3": DENSE,
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64,
             "bos_token_id": None, "eos_token_id": None},
    "qwen3_moe": {**MIXTURE, "num_experts": 8},
    "olmoe": {**MIXTURE, "num_experts": 8, "intermediate_size": 16},
    "mixtral": {**MIXTURE, "num_local_experts": 8, "intermediate_size": 16},
    "gpt_oss": {**MIXTURE, "num_local_experts": 8, "intermediate_size": 16, "sliding_window": 8},
    "inkling2_loop_text": {
        **MIXTURE, "num_hidden_layers": 6, "n_routed_experts": 8, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
        "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4,
        "loop_num_passes": 3, "loop_gate_rank": 4, "unpadded_vocab_size": VOCABULARY,
    },
    "dory": {**DENSE, "num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
             "n_recurrent_loops": 2, "sliding_window": 8},
    "hrm_text": {**DENSE, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2, "num_key_value_heads": 4},
    "albert": {"vocab_size": VOCABULARY, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 4,
               "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
               "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
}  # fmt: skip
LOOPS: dict[str, dict[str, object]] = {
    "inkling2_loop_text": {"loop_num_passes": 2},
    "dory": {"n_recurrent_loops": 3},
    "hrm_text": {"L_cycles": 3},
    "albert": {"num_hidden_layers": 3},
}
"""Another number of loops, of the families that have them."""
SPAN = LoopedSpan(layers=LayerRange(1, 3), visits=2, factor=0.5)


def config_of(name: str, **changed: object) -> PretrainedConfig:
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    config: PretrainedConfig = classes[name](**{**SETTINGS[name], **changed})
    return config


def plain(name: str, **changed: object) -> PreTrainedModel:
    """The authors' network on their eager path."""
    config = config_of(name, **changed)
    kind = transformers.AutoModelForMaskedLM if FAMILIES[name].masked else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation="eager")
        for weight in model.parameters():  # what begins at zero or one would hide a swap
            if weight.requires_grad:
                weight.data += 0.05 * torch.randn(weight.shape)
    return model.float().eval()


def hooked(name: str, loop: LoopedSpan | None = None, **changed: object) -> FamilyNetwork:
    return FamilyNetwork(plain(name, **changed), FAMILIES[name], BYTES, loop).eval()


def write_folder(name: str, folder: Path) -> Path:
    """The network as a folder, with the tokenizer of bytes."""
    with quiet():
        plain(name).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(BYTES.to_json(), encoding="utf-8")
    return folder
