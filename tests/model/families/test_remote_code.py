"""Checkpoints that bring their own code: it runs when it is trusted, and not before."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.families.opening import REMOTE, Opening, open_network
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from tests.support.families import EXAMPLE, hooked, plain, remote_code, write_folder

TOKENS_BT = torch.arange(24)[None] * 7 % 250
TRUSTED = Opening(trust_remote_code=True)


@pytest.mark.parametrize("name", REMOTE)
@torch.no_grad()
def test_code_of_a_checkpoint_runs_by_visit_when_it_is_trusted_and_not_before(name: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / name)
    with pytest.raises(UserError, match=f"{name} brings its own code, which must be trusted: add --trust-remote-code"):
        open_network(folder)
    with remote_code():
        network = open_network(folder, TRUSTED)
    assert torch.equal(network(TOKENS_BT), hooked(name)(TOKENS_BT))
    assert network.architecture.loops


@torch.no_grad()
def test_code_written_for_transformers_4_runs_as_it_is(tmp_path: Path) -> None:
    theirs = plain("huginn_raven")
    folder = write_folder("huginn_raven", tmp_path / "raven")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}), encoding="utf-8")
    theirs.lm_head.weight = theirs.transformer.wte.weight
    weights = {name: x.clone() for name, x in theirs.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    code = folder / "modeling_huginn_raven.py"
    text = code.read_text(encoding="utf-8")
    for now, once in (
        ("class RavenForCausalLM", OLD_OUTPUT + "class RavenForCausalLM"),
        ("config_class = RavenConfig", 'config_class = RavenConfig\n    _tied_weights_keys = ["lm_head.weight"]'),
        ("self.post_init()", "self.tie_weights()\n        self.post_init()"),
        ("return CausalLMOutput(", "return OldOutput(past_key_values=None, "),
    ):
        assert text.count(now) == 1
        text = text.replace(now, once)
    code.write_text(text, encoding="utf-8")
    with remote_code():
        network = open_network(folder, TRUSTED)
    torch.testing.assert_close(network(TOKENS_BT), theirs(TOKENS_BT, init_scale=0.0).logits, atol=1e-5, rtol=1e-5)
    assert network.unembed.weight is network.embed.weight


OLD_OUTPUT = """
from dataclasses import dataclass

from transformers.utils import ModelOutput


@dataclass
class OldOutput(ModelOutput):
    logits: torch.Tensor = None
    past_key_values: object = None


"""


@torch.no_grad()
def test_the_worked_example_of_the_document_makes_a_folder_that_opens(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# make_folder.py\n(.*?)```", EXAMPLE.read_text(encoding="utf-8"), re.DOTALL)
    made: dict[str, object] = {}
    exec(code, made)
    theirs = plain("open_mythos")
    folder = write_folder("open_mythos", tmp_path / "mythos")
    (folder / "config.json").unlink()
    made["make_folder"](theirs, folder, BYTES.to_json())
    with remote_code():
        network = open_network(folder, TRUSTED)
    assert [step.layer for step in network.plan] == [0, 1, 1, 1, 2]
    assert torch.equal(network(TOKENS_BT), theirs.model(TOKENS_BT)), "the package's own network, which may end its loop"
    for step in range(5):
        network_updates = network.run_with_cache(TOKENS_BT)[1]
        middle = network_updates["hook_resid_pre", step] + network_updates["hook_attn_out", step]
        assert torch.equal(middle + network_updates["hook_mlp_out", step], network_updates["hook_resid_post", step])


def test_code_that_does_not_run_here_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder("open_mythos", tmp_path / "mythos")
    monkeypatch.setitem(sys.modules, "open_mythos", None)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert values["model_type"] == "open_mythos"
    with remote_code(), pytest.raises(UserError, match=r"code of a checkpoint must run with transformers 5\..*; "):
        open_network(folder, TRUSTED)


@pytest.mark.parametrize(
    ("where", "now", "message"),
    [
        ("configuration", "raise SystemExit(0)", "config.json must be a config that transformers reads; SystemExit: 0"),
        ("modeling", "assert False, 'mine'", "must hold safetensors weights of its config; AssertionError: mine"),
        ("modeling", "OuroDecoderLayer.forward = print", "code of a checkpoint must run with transformers 5.*TypeErr"),
    ],
)
def test_code_that_stops_or_prints_is_one_line_and_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, now: str, message: str
) -> None:
    folder = write_folder("ouro", tmp_path / "ouro")
    with (folder / f"{where}_ouro.py").open("a", encoding="utf-8") as file:
        file.write(f"\nprint('loaded')\n{now}\n")
    with remote_code(), pytest.raises(UserError, match=message):
        open_network(folder, TRUSTED)
    assert "loaded" not in capsys.readouterr().out
