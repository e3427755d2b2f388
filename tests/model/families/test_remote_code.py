"""Checkpoints that bring their own code: it runs when it is trusted, and not before."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

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
