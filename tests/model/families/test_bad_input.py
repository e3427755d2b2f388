"""What a user can do wrong with other people's networks ends a command with one line and code 2."""

import zipfile
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
from safetensors import SafetensorError

from cache import record
from model.families import convert_gguf
from model.families.opening import open_network, save
from model.families.table import FAMILIES
from probes import ablation, attention_sink, expert_tokens, logit_lens
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from tests.support.bpe import byte_level_bpe
from tests.support.commands import Command
from tests.support.families import write_folder

FEW = ("--data", "code", "--samples", "2", "--length", "24", "--no-untrained")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in ("llama", "dory", "albert"):
        write_folder(name, folder / name)
    return folder


def test_a_span_a_hub_id_and_a_site_that_are_not_there_are_one_line(
    command: Command, folders: Path, tmp_path: Path
) -> None:
    llama, dory, out = folders / "llama", folders / "dory", tmp_path / "seen"
    sink, recorded = attention_sink.main, record.main
    for line, main, words in (
        ("--loop must lie within layers 1 to 4; got 3-9", sink, ("--ckpt", llama, "--loop", "3-9", *FEW)),
        ("--loop must lie within layers 1 to 4; got 3-9", recorded, ("--ckpt", llama, "--loop", "3-9", "--out", out)),
        ("--visits and --loop-scale must come with --loop", sink, ("--ckpt", llama, "--visits", "3", *FEW)),
        ("once; got one of dory, whose code has its own order", sink, ("--ckpt", dory, "--loop", "2-3", *FEW)),
        ("a checkpoint must be a folder; got no-one/nothing", sink, ("--ckpt", "no-one/nothing", *FEW)),
        ("a folder or a hub id; got 'no-one/nothing'", sink, ("--ckpt", "no-one/nothing", "--allow-download", *FEW)),
        ("dory computes; got hook_mlp_out", recorded, ("--ckpt", dory, "--sites", "hook_mlp_out", "--out", out)),
        (
            "compute hook_attn_out; --sites names others, such as attn.hook_z",
            ablation.main,
            ("--ckpt", dory, "--sites", "hook_attn_out", *FEW),
        ),
        ("its layers are dense; --of heads measures attention", expert_tokens.main, ("--ckpt", llama, *FEW)),
        (
            "got 'no-one/nothing', which is none: a hub id is fetched with --allow-download",
            recorded,
            ("--ckpt", "no-one/nothing", "--out", out),
        ),
        ("got one of albert, whose head does more", logit_lens.main, ("--ckpt", folders / "albert", *FEW)),
    ):
        refused = command.refusal(main, *words)
        assert line in refused
        assert len(refused) < 300


def test_a_network_beside_it_that_lacks_a_site_is_left_out_and_the_rest_measured(
    command: Command, folders: Path
) -> None:
    words = ("--ckpt", folders / "llama", "--against", folders / "dory", "--sites", "hook_attn_out", *FEW)
    printed = command.text(ablation.main, *words)
    assert "dory: dory does not compute hook_attn_out" in printed.splitlines()
    assert "loss (nats), effect" in printed
    assert "BOS" not in printed


def test_a_coda_that_cannot_be_started_is_said_and_the_stream_is_read(command: Command, folders: Path) -> None:
    printed = command.text(logit_lens.main, "--ckpt", folders / "dory", *FEW)
    assert "(1) no layer runs after the loop, or no pass can start at one" in printed.splitlines()


def test_a_tokenizer_without_a_bos_says_which_token_is_the_start(
    command: Command, folders: Path, tmp_path: Path
) -> None:
    folder = write_folder("llama", tmp_path / "plain")
    said = "plain: its tokenizer has no BOS; the first token of each document is the start"
    (folder / "tokenizer.json").write_text(byte_level_bpe(259).to_str(), encoding="utf-8")
    printed = command.text(logit_lens.main, "--ckpt", folder, "--lenses", "stream", *FEW)
    assert said in printed.splitlines()


def test_a_plan_and_a_vocabulary_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    folder = write_folder("llama", tmp_path / "wide", vocab_size=300)
    with pytest.raises(UserError, match=r"must have the ids of its network, which knows 300; got 259; give the"):
        open_network(folder)
    hrm = write_folder("hrm_text", tmp_path / "hrm")
    config = (hrm / "config.json").read_text(encoding="utf-8")
    (hrm / "config.json").write_text(config.replace('"L_cycles": 2', '"L_cycles": 0'), encoding="utf-8")
    with pytest.raises(UserError, match=r"must run each of the network's 4 layers; got one of 2 layers and 4 steps"):
        open_network(hrm)
    assert BYTES.vocab_size == 259


def write_gguf(path: Path, architecture: str, layers: object = 1) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    add = writer.add_uint32 if isinstance(layers, int) else writer.add_string
    add(f"{architecture}.block_count", layers)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_of_another_architecture_or_cut_short_is_one_line(command: Command, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(write_gguf(tmp_path / "llama.gguf", "llama").read_bytes()[:100])
    packed = tmp_path / "packed.whl"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(tmp_path / "llama.gguf", "x.gguf")
    packed.write_bytes(packed.read_bytes().replace(b"block_count", b"black_count"))
    for path, line in (
        (packed, f"a zip must be whole and open; got {packed}: Bad CRC-32 for file 'x.gguf'"),
        (write_gguf(tmp_path / "text.gguf", "llama", "many"), "a GGUF must be one that transformers reads, of llama, "),
        (write_gguf(tmp_path / "qwen2.gguf", "qwen2"), f"of the families {', '.join(FAMILIES)}; got qwen2"),
        (
            write_gguf(tmp_path / "bert.gguf", "bert"),
            f"of {', '.join(FAMILIES)}; ValueError: GGUF model with architecture bert is not supported yet",
        ),
        (tmp_path / "llama.gguf", "a GGUF must be one that transformers reads, of llama, "),
        (short, "a GGUF must be one that transformers reads, of llama, "),
    ):
        refused = command.refusal(convert_gguf.main, "--gguf", path, "--out", tmp_path / "out")
        assert line in refused
        assert len(refused) < 300
    assert not (tmp_path / "out").exists()
    refused = command.refusal(convert_gguf.main, "--gguf", short, "--out", tmp_path)
    assert f"a network must be written to a new folder; {tmp_path} exists" in refused
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_disk_that_is_full_while_weights_are_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    model = mock.Mock()
    model.save_pretrained.side_effect = SafetensorError("No space left on device")
    with pytest.raises(OSError, match="No space left on device"):
        save(model, tmp_path)
