"""Checkpoint folders: what is written is what is read, and everything else is refused with one line."""

import json
import os
import pickle
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from model.network import LoopedMoE
from model.tokenizers import HuggingFaceTokenizer
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError, run_command
from tests.support.bpe import byte_level_bpe
from tests.support.configs import TINY, VARIANTS
from tests.support.forked import Child
from tests.support.networks import random_tokens, tiny_network

FILES = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tiny_network().save_pretrained(folder, readme="# Tiny\n")
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "tiny"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_a_round_trip_is_exact_in_single_precision(config, tmp_path):
    network, tokens_BT = tiny_network(config), random_tokens()
    network.save_pretrained(tmp_path / "it", readme="# It\n")
    read = LoopedMoE.from_pretrained(tmp_path / "it")
    assert read.config == config
    assert not read.training
    assert all(isinstance(weight, torch.nn.Parameter) and weight.requires_grad for weight in read.parameters())
    assert torch.equal(read(tokens_BT), network(tokens_BT))
    assert load_file(tmp_path / "it" / "model.safetensors").keys() == network.state_dict().keys()


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_round_trip_in_half_precision_is_within_its_rounding(dtype, precision, tmp_path):
    network = tiny_network()
    network.save_pretrained(tmp_path / "half", readme="", dtype=dtype)
    read = LoopedMoE.from_pretrained(tmp_path / "half")
    for name, weight in network.stored_weights().items():
        stored = read.stored_weights()[name]
        assert stored.dtype == torch.float32
        assert torch.equal(stored, weight.to(dtype).float())
        assert ((stored - weight).abs() <= precision * weight.abs() + 1e-7).all()
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 0.6 * 4 * sum(
        map(torch.numel, network.parameters())
    )


def test_the_folder_holds_four_readable_files(saved):
    assert sorted(file.name for file in saved.iterdir()) == FILES
    assert (saved / "README.md").read_text() == "# Tiny\n"
    assert json.loads((saved / "config.json").read_text()) == TINY.to_json()
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    assert tokenizer.encode("(é\n<bos>").ids == [40, 195, 169, 10, *b"<bos>"]
    assert tokenizer.token_to_id("<bos>") == 256


def test_a_checkpoint_is_as_readable_as_any_new_file(saved, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert saved.stat().st_mode == (tmp_path / "folder").stat().st_mode
    assert {file.stat().st_mode for file in saved.iterdir()} == {(tmp_path / "file").stat().st_mode}


def test_an_existing_folder_is_left_as_it_is(saved):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(UserError, match=r"a checkpoint must be written to a new folder; .*tiny exists"):
        tiny_network(seed=9).save_pretrained(saved, readme="")
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


@pytest.mark.parametrize("room", [10, 1_000, 20_000])
def test_a_folder_appears_only_when_it_is_whole(room, tmp_path):
    """A disk that is full at any of the files: no folder, nothing left beside it, one line, and exit code 1."""
    network = tiny_network()

    def save_on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        run_command(lambda: network.save_pretrained(tmp_path / "it", readme=""))

    code, said = Child(save_on_a_full_disk).wait()
    assert code == 1
    assert said.startswith(f"error: File too large: {tmp_path}")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.complex64, torch.bool])
def test_a_type_that_is_not_read_is_not_written(dtype, tmp_path):
    with pytest.raises(UserError, match=rf"the dtype of a checkpoint must be one of .*; got {dtype}"):
        tiny_network().save_pretrained(tmp_path / "it", readme="", dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the output folder must be writable; got .*/file: File exists"):
        tiny_network().save_pretrained(tmp_path / "file" / "it", readme="")


def test_weights_that_do_not_fit_are_not_written(tmp_path):
    network = tiny_network()
    with torch.no_grad():
        network.layers[1].attn.q_proj.weight[0, 0] = 1e5
    with pytest.raises(UserError, match=r"weights as float16 must be finite; layers\.1\.attn\.q_proj\.weight holds"):
        network.save_pretrained(tmp_path / "it", readme="", dtype=torch.float16)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_network_has_its_weights_to_itself(dtype, folder, tmp_path):
    """The file is overwritten in place, then cut off: nothing changes, and the process lives."""
    tiny_network().save_pretrained(tmp_path / "it", readme="", dtype=dtype)
    network, tokens_BT, path = LoopedMoE.from_pretrained(tmp_path / "it"), random_tokens(), tmp_path / "it"
    path /= "model.safetensors"
    before = network(tokens_BT)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(network(tokens_BT), before)
    os.truncate(path, 10)
    assert torch.equal(network(tokens_BT), before)


@torch.no_grad()
def test_a_network_is_stored_with_its_own_tokenizer(tmp_path):
    tokenizer = HuggingFaceTokenizer(byte_level_bpe().to_str(), eos_token="<|end|>")
    network = LoopedMoE(replace(TINY, vocab_size=1024), tokenizer=tokenizer)
    network.save_pretrained(tmp_path / "it", readme="")
    read = LoopedMoE.from_pretrained(tmp_path / "it")
    text = "Output: } )\n"
    assert read.tokenizer.to_json() == tokenizer.to_json()
    assert (read.tokenizer.eos_id, read.tokenizer.pad_id) == (tokenizer.eos_id, None)
    assert read.to_tokens(text).tolist() == [tokenizer.encode(text).ids_T.tolist()]
    assert read.to_string(read.to_tokens(text)[0]) == text
    assert "".join(read.to_str_tokens("a b")) == "a␣b"
    assert torch.equal(read(read.to_tokens(text)), network(network.to_tokens(text)))


def test_a_network_of_another_vocabulary_is_not_stored_with_the_byte_tokenizer(tmp_path):
    network = LoopedMoE(replace(TINY, vocab_size=1024))
    message = r"a tokenizer must have the ids of its network, which knows 1024; got 259; give the network its own"
    for ask in (lambda: network.save_pretrained(tmp_path / "it", readme=""), lambda: network.to_tokens("a")):
        with pytest.raises(UserError, match=message):
            ask()
    assert not list(tmp_path.iterdir())


def test_shipped_checkpoints_load_as_they_are():
    for name in ("demo-smelt", "demo-baseline"):
        network = LoopedMoE.from_pretrained(Path("checkpoints") / name)
        assert network.tokenizer is BYTES
        assert torch.isfinite(network.loss(network.to_tokens("([]{:")).next_token)


# What is refused


def edit_json(folder: Path, name: str, **changes: object) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | changes
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickle_instead(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def pickle_inside(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Explosive()))


def pipe(path: Path) -> None:
    """One that nobody writes to: whoever opened it would wait for ever."""
    path.unlink()
    os.mkfifo(path)


class Explosive:
    """A pickle that would make a file if it were ever loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("loaded-a-pickle",)


def vocabulary_of(size: int) -> dict[str, object]:
    """A model without merges."""
    return {"type": "BPE", "vocab": {chr(0x4E00 + token): token for token in range(size)}, "merges": []}


def rows_of(size: int) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.zeros(size, TINY.width), "unembed.weight": torch.zeros(size, TINY.width)}


W_OUT = "layers.2.mlp.w_out"
SPOILED = {
    "no config": (lambda f: (f / "config.json").unlink(), "a config file must exist; got .*config.json"),
    "unknown key": (
        lambda f: edit_json(f, "config.json", n_loops=2),
        "only fields of ModelConfig may be given; got n_loops",
    ),
    "bad value": (
        lambda f: edit_json(f, "config.json", loop_stop=9),
        r"config.json: the looped span must .*got 1\.\.9",
    ),
    "other shape": (
        lambda f: edit_json(f, "config.json", expert_width=24),
        r"layers\.0\.mlp\.w_in must have shape \(6, 48, 16\); got \(6, 24, 16\)",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "a checkpoint must hold model.safetensors; got "),
    "missing": (lambda f: edit_weights(f, **{W_OUT: None}), rf"must hold every weight; missing {W_OUT}"),
    "many missing": (
        lambda f: edit_json(f, "config.json", num_layers=6),
        r"must hold every weight; missing layers\.4\.attn\.k_proj\.weight, .* and 15 more",
    ),
    "extra": (lambda f: edit_weights(f, bias=torch.zeros(2)), "must hold no other weights; got bias"),
    "wrong shape": (
        lambda f: edit_weights(f, **{W_OUT: torch.zeros(6, 16, 11)}),
        rf"{W_OUT} must have shape \(6, 16, 12\); got \(6, 16, 11\)",
    ),
    "integers": (
        lambda f: edit_weights(f, **{W_OUT: torch.zeros(6, 16, 12, dtype=torch.int8)}),
        rf"{W_OUT} must be one of \('F32', 'BF16', 'F16'\); got I8",
    ),
    "not finite": (
        lambda f: edit_weights(f, **{W_OUT: torch.full((6, 16, 12), float("nan"))}),
        rf"model.safetensors must be finite; {W_OUT} holds NaN",
    ),
    "truncated": (truncate, "model.safetensors must be a whole safetensors file; "),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "must be a whole safetensors file; "),
    "pickle instead": (
        pickle_instead,
        "pytorch_model.bin is a pickle, which is never loaded: convert it to safetensors",
    ),
    "pickle inside": (pickle_inside, "model.safetensors must be a whole safetensors file; "),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "a tokenizer file must exist; got "),
    "larger tokenizer": (
        lambda f: edit_json(f, "tokenizer.json", model=vocabulary_of(300)),
        "a tokenizer must have the ids of its network, which knows 259; got 300",
    ),
    "no tokenizer inside": (lambda f: edit_json(f, "tokenizer.json", model=3), "tokenizer.json must be a file of Hug"),
    "byte tokenizer of a larger network": (
        lambda f: (edit_json(f, "config.json", vocab_size=300), edit_weights(f, **rows_of(300))),
        "a tokenizer must have the ids of its network, which knows 300; got 259",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json must hold JSON; "),
    "deep tokenizer": (lambda f: (f / "tokenizer.json").write_text("[" * 100_000), "tokenizer.json must hold JSON; "),
    "long number": (lambda f: (f / "tokenizer.json").write_text("1" * 5_000), "tokenizer.json must hold JSON; "),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json must hold JSON; "),
    "infinite norm": (lambda f: edit_json(f, "config.json", norm_eps=float("inf")), "norm_eps must be .*; got inf"),
    "no number": (lambda f: edit_json(f, "config.json", rope_base=float("nan")), "rope_base must be .*; got nan"),
    "layers past all": (lambda f: edit_json(f, "config.json", num_layers=10**9), "must be at most 10000 steps; got 10"),
    "layers past the file": (
        lambda f: edit_json(f, "config.json", num_layers=9_000),
        "model.safetensors must hold every weight of 9000 layers; got 39 weights in all",
    ),
    "experts past the file": (
        lambda f: edit_json(f, "config.json", num_experts=10**9),
        r"layers\.0\.mlp\.w_in must have shape \(1000000000, 24, 16\); got \(6, 24, 16\)",
    ),
    "config pipe": (lambda f: pipe(f / "config.json"), "a config file must be a plain file; got .*config.json, a dev"),
    "weights pipe": (lambda f: pipe(f / "model.safetensors"), "a checkpoint must hold model.safetensors; got "),
    "tokenizer pipe": (lambda f: pipe(f / "tokenizer.json"), "a tokenizer file must be a plain file; got "),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder_is_refused_with_one_line(name, folder, monkeypatch, capsys):
    spoil, message = SPOILED[name]
    spoil(folder)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(UserError, match=message) as refused:
        LoopedMoE.from_pretrained(folder)
    assert "\n" not in str(refused.value)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: LoopedMoE.from_pretrained(folder))
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [each.name for each in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", ["nowhere", "some-owner/some-model", "README.md"])
def test_what_is_no_folder_is_refused(name, saved, monkeypatch):
    monkeypatch.chdir(saved)
    with pytest.raises(UserError, match=rf"a checkpoint must be a folder with config.json and .*; got '{name}'"):
        LoopedMoE.from_pretrained(name)


@pytest.mark.parametrize("name", ["some-owner/some-model", "three/part/name", "not a name!"])
def test_a_hub_id_is_asked_for_only_when_allowed_and_offline_is_one_line(name):
    with pytest.raises(UserError, match=rf"a checkpoint must be a folder or a hub id; got '{name}'; ") as refused:
        LoopedMoE.from_pretrained(name, allow_download=True)
    assert "\n" not in str(refused.value)


def test_a_folder_is_read_as_it_is_even_when_downloads_are_allowed(saved):
    assert LoopedMoE.from_pretrained(str(saved), allow_download=True).config == TINY


def test_a_downloaded_snapshot_is_read_like_any_folder(saved, monkeypatch):
    asked = {}

    def snapshot(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert LoopedMoE.from_pretrained("owner/name", allow_download=True).config == TINY
    weights = ["model*.safetensors", "*.safetensors.index.json", "*.py"]  # of other families: several files, and code
    patterns = ["config.json", *weights, "tokenizer.json", "tokenizer_config.json"]
    assert asked == {"repo_id": "owner/name", "patterns": patterns}


@torch.no_grad()
def test_a_checkpoint_runs_with_more_visits_than_it_was_trained_with(folder):
    edit_json(folder, "config.json", num_visits=4)
    more = LoopedMoE.from_pretrained(folder)
    assert more.config == replace(TINY, num_visits=4)
    assert len(more.plan) == 10
    assert more.blocks[7].scale == 0.5
