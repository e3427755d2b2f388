"""A checkpoint that brings its own code runs when it is trusted; a stand-in with Ouro's tree of modules."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.families.opening import Opening, open_network
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from tests.support import remote_code
from tests.support.families import DENSE
from tests.support.remote_code.configuration_ouro import OuroConfig
from tests.support.remote_code.modeling_ouro import OuroForCausalLM

TOKENS_BT = torch.arange(24)[None] * 7 % 250


@torch.no_grad()
def test_code_of_a_checkpoint_runs_by_visit_when_it_is_trusted_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    torch.manual_seed(0)
    config = OuroConfig(**DENSE, total_ut_steps=3)
    theirs = OuroForCausalLM._from_config(config, attn_implementation="eager").eval()
    folder = tmp_path / "ouro"
    folder.mkdir()
    for name in ("configuration_ouro", "modeling_ouro"):
        shutil.copy(Path(str(remote_code.__file__)).parent / f"{name}.py", folder)
    named = {"AutoConfig": "configuration_ouro.OuroConfig", "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}
    values = {**config.to_dict(), "auto_map": named}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({name: weight.clone() for name, weight in theirs.state_dict().items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (folder / "tokenizer.json").write_text(BYTES.to_json(), encoding="utf-8")
    with pytest.raises(UserError, match=r"ouro brings its own code, which must be trusted: add --trust-remote-code"):
        open_network(folder)
    network = open_network(folder, Opening(trust_remote_code=True))
    assert [step.layer for step in network.plan] == [0, 1, 2, 3] * 3
    logits_BTW, found = network.run_with_cache(TOKENS_BT)
    assert torch.equal(logits_BTW, theirs(TOKENS_BT).logits)
    for step in range(12):
        middle = found["hook_resid_pre", step] + found["hook_attn_out", step]
        assert torch.equal(middle + found["hook_mlp_out", step], found["hook_resid_post", step])
