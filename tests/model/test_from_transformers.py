"""Weights go from transformers' folders into our network and back, and the logits stay."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.families.opening import Opening, open_network
from model.from_transformers import HELD, export
from model.network import LoopedMoE
from smelt_interp.errors import UserError
from tests.support.families import SPAN, write_folder
from tests.support.networks import TINY, tiny_network

TOKENS_BT = torch.arange(24)[None] * 7 % 250


@pytest.mark.parametrize("name", HELD)
@torch.no_grad()
def test_our_network_with_their_weights_gives_their_logits_and_goes_back(name: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / name)
    for loop in (None, SPAN):
        theirs_BTW = open_network(folder, Opening(loop=loop))(TOKENS_BT)
        ours_BTW = LoopedMoE.from_transformers(folder, loop)(TOKENS_BT)
        assert (ours_BTW - theirs_BTW).abs().max() < 1e-4 * theirs_BTW.abs().max()
    export(LoopedMoE.from_transformers(folder), tmp_path / "back")
    assert torch.equal(open_network(tmp_path / "back")(TOKENS_BT), open_network(folder)(TOKENS_BT))


@torch.no_grad()
def test_an_unlooped_network_of_ours_is_exported(tmp_path: Path) -> None:
    network = tiny_network(replace(TINY, num_visits=1, loop_scale=1.0))
    export(network, tmp_path / "theirs")
    ours_BTW, theirs_BTW = network(TOKENS_BT), open_network(tmp_path / "theirs")(TOKENS_BT)
    assert (ours_BTW - theirs_BTW).abs().max() < 1e-4 * ours_BTW.abs().max()
    with pytest.raises(UserError, match="must be exported to a new folder; "):
        export(network, tmp_path / "theirs")
    with pytest.raises(UserError, match="a network to be exported must run each layer once; got 2 visits"):
        export(tiny_network(), tmp_path / "looped")
    narrow = replace(TINY, num_visits=1, qk_norm=True, qk_norm_over="all heads")
    with pytest.raises(
        UserError, match=r"num_heads x head_width equal to width, 16, for its norms .* heads; got 4 x 8"
    ):
        export(tiny_network(narrow), tmp_path / "narrow")
    assert not (tmp_path / "narrow").exists()


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gpt2", {}, "must be one of llama, qwen3, qwen3_moe, olmoe, mixtral; got gpt2; open it by itself"),
        ("olmoe", {"clip_qkv": 4.0}, r"must not clip queries, keys and values \(clip_qkv\); open it by itself"),
        ("olmoe", {"head_dim": 16}, "must have heads as wide together as the stream; open it by itself"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(
    name: str, changed: dict[str, float], message: str, tmp_path: Path
) -> None:
    folder = write_folder(name, tmp_path / name, **changed)
    with pytest.raises(UserError, match=message):
        LoopedMoE.from_transformers(folder)
