"""Tiny random networks of every family, as their authors' classes make them, and a tokenizer for their folders."""

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from model.families.network import FamilyNetwork
from model.families.opening import REMOTE, quiet
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
    "ouro": {**DENSE, "total_ut_steps": 3},
    "huginn_raven": {"vocab_size": VOCABULARY, "n_embd": 32},
    "open_mythos": {"vocab_size": VOCABULARY, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64,
                    "max_loop_iters": 3, "prelude_layers": 1, "coda_layers": 1, "attn_type": "gqa", "n_experts": 4,
                    "n_shared_experts": 1, "n_experts_per_tok": 2, "expert_dim": 16, "lora_rank": 4},
}  # fmt: skip
CLASSES = {"ouro": "Ouro", "huginn_raven": "Raven", "open_mythos": "OpenMythos"}
"""How the classes that a checkpoint brings begin."""
EXAMPLE = Path(__file__).parents[2] / "docs" / "adding_a_family.md"
"""Holds the code of open_mythos's folders; that of the other remote ones lies here, in `remote_code`."""
SCRATCH = tempfile.TemporaryDirectory()
LOOPS: dict[str, dict[str, object]] = {
    "inkling2_loop_text": {"loop_num_passes": 2},
    "dory": {"n_recurrent_loops": 3},
    "hrm_text": {"L_cycles": 3},
    "albert": {"num_hidden_layers": 3},
    "ouro": {"total_ut_steps": 2},
    "huginn_raven": {"mean_recurrence": 2},
    "open_mythos": {"max_loop_iters": 2},
}
"""Another number of loops, of the families that have them."""
SPAN = LoopedSpan(layers=LayerRange(1, 3), visits=2, factor=0.5)


def remote_code() -> "mock._patch[str]":
    """A context in which transformers keeps the code of checkpoints in a folder of the tests."""
    return mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", f"{SCRATCH.name}/modules")


def write_code(name: str, folder: Path) -> None:
    """The two files that a checkpoint of this remote family brings."""
    shown = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", EXAMPLE.read_text(encoding="utf-8"), re.DOTALL))
    for kind in ("configuration", "modeling"):
        file = f"{kind}_{name}"
        here = Path(__file__).with_name("remote_code") / f"{file}.py"
        text = here.read_text(encoding="utf-8") if here.is_file() else shown[file]
        (folder / f"{file}.py").write_text(text, encoding="utf-8")


@cache
def code_folder(name: str) -> Path:
    """A folder of a remote family with its code and config, without weights."""
    folder = Path(SCRATCH.name) / name
    folder.mkdir()
    write_code(name, folder)
    named = {"AutoConfig": f"configuration_{name}.{CLASSES[name]}Config",
             "AutoModelForCausalLM": f"modeling_{name}.{CLASSES[name]}ForCausalLM"}  # fmt: skip
    values = {**SETTINGS[name], "model_type": name, "auto_map": named}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def config_of(name: str, **changed: object) -> PretrainedConfig:
    if name in REMOTE:
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            code_folder(name), trust_remote_code=True, **changed
        )
        return config
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    made: PretrainedConfig = classes[name](**{**SETTINGS[name], **changed})
    return made


def plain(name: str, **changed: object) -> PreTrainedModel:
    """The authors' network on their eager path."""
    kind = transformers.AutoModelForMaskedLM if FAMILIES[name].masked else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(), quiet(), remote_code():
        torch.manual_seed(0)
        config = config_of(name, **changed)
        if name in REMOTE:  # what AutoModel knows by this config may be the class of a folder that a test has opened
            code = get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], str(code_folder(name)))
            model = code._from_config(config, attn_implementation="eager")
        else:
            model = kind.from_config(config, attn_implementation="eager")
        for weight in model.parameters():  # what begins at zero or one would hide a swap
            if weight.requires_grad:
                weight.data += 0.05 * torch.randn(weight.shape)
    return model.float().eval()


def hooked(name: str, loop: LoopedSpan | None = None, **changed: object) -> FamilyNetwork:
    return FamilyNetwork(plain(name, **changed), FAMILIES[name], BYTES, loop).eval()


def write_folder(name: str, folder: Path, **changed: object) -> Path:
    """The network as a folder, with the tokenizer of bytes."""
    with quiet():
        plain(name, **changed).save_pretrained(folder)
    if name in REMOTE:
        write_code(name, folder)
    (folder / "tokenizer.json").write_text(BYTES.to_json(), encoding="utf-8")
    return folder
