"""Folders of other families open by the commands' one function; what cannot be opened is one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache.store import Capture
from model.families.convert_gguf import convert
from model.families.opening import Opening, open_network, untrained_network
from probes import attention_sink
from probes.__main__ import EveryProbe, SampleGroup, record_all
from probes.running.command import parse
from probes.running.source import Source, open_subjects
from smelt_interp.costs.spans import LayerRange
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan
from tests.support.families import SPAN, hooked, plain, write_folder
from tests.support.networks import TINY, tiny_network

TOKENS_BT = torch.arange(24)[None] % 250


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("llama", tmp_path_factory.mktemp("families") / "llama")


@torch.no_grad()
def test_a_folder_of_transformers_is_the_network_that_it_holds(llama: Path) -> None:
    assert torch.equal(open_network(llama)(TOKENS_BT), plain("llama")(TOKENS_BT).logits)
    looped = open_network(llama, Opening(loop=SPAN))
    assert torch.equal(looped(TOKENS_BT), hooked("llama", SPAN)(TOKENS_BT))
    first, second = (untrained_network(llama, 3, Opening(loop=SPAN)) for _ in range(2))
    assert torch.equal(first(TOKENS_BT), second(TOKENS_BT))
    assert not torch.equal(first(TOKENS_BT), looped(TOKENS_BT))


@torch.no_grad()
def test_a_baseline_of_ours_is_looped_as_its_config_would(tmp_path: Path) -> None:
    baseline = tiny_network(replace(TINY, num_visits=1, loop_scale=1.0))
    baseline.save_pretrained(tmp_path / "ours", readme="# Tiny\n")
    looped = open_network(tmp_path / "ours", Opening(loop=LoopedSpan(layers=LayerRange(1, 2), visits=3, factor=0.25)))
    assert [step.layer for step in looped.plan][:4] == [0, 1, 1, 1]
    tiny_network().save_pretrained(tmp_path / "looped", readme="# Tiny\n")
    with pytest.raises(UserError, match="runs each layer once; got one with a loop of its own"):
        open_network(tmp_path / "looped", Opening(loop=SPAN))


def test_a_looped_span_runs_another_number_of_visits_over_the_same_weights() -> None:
    network = hooked("llama", SPAN)
    more = network.with_visits(3)
    assert torch.equal(more(TOKENS_BT), hooked("llama", replace(SPAN, visits=3))(TOKENS_BT))
    assert torch.equal(more.with_visits(2)(TOKENS_BT), network(TOKENS_BT))
    scaled = network.with_visits(3, loop_scale="1/r")
    assert scaled.architecture.loop_factors[1] == pytest.approx(1 / 3)
    assert scaled.embed.weight is network.embed.weight
    with pytest.raises(UserError, match="visits must be those that the code of family llama runs"):
        hooked("llama").with_visits(2)
    for num_visits in (0, 1.5, "3", 10**9):
        with pytest.raises(UserError, match=f"num_visits must be .*; got {num_visits!r}"):
            network.with_visits(num_visits, loop_scale="1/r")
    with pytest.raises(UserError, match=r"loop_scale must be .*; got nan"):
        network.with_visits(3, loop_scale=float("nan"))


def test_a_command_loops_the_measured_network_and_not_the_one_beside_it(llama: Path) -> None:
    words = ["--ckpt", str(llama), "--loop", "2-3", "--visits", "3", "--against", str(llama), "--no-untrained"]
    source = parse("attention_sink", attention_sink, words).source
    looped, beside = open_subjects(source, 0)
    assert (len(looped.architecture.steps), len(beside.architecture.steps)) == (8, 4)
    assert looped.architecture.loop_factors[1] == pytest.approx(1 / 3)
    assert looped.name == "llama, layers 2-3 run 3 times"
    with pytest.raises(UserError, match="--loop must come with --ckpt, whose network it loops; got 2-3 without"):
        open_subjects(Source(capture=llama, loop=LayerRange(1, 3)), 0)


def test_every_probes_command_records_the_looped_network_the_unlooped_beside_it_and_itself_untrained(
    llama: Path, tmp_path: Path
) -> None:
    group = SampleGroup(name="code", data=DataOptions(data=("code",), samples=2, length=16),
                  probes={"sink": (attention_sink, attention_sink.Options())})  # fmt: skip
    options = EveryProbe(ckpt=llama, against=(llama,), captures=tmp_path, loop=LayerRange(1, 3), loop_scale=0.25)
    found = [Capture(path) for path in record_all(options, group, "recorded")]
    assert [each.path.name for each in found] == [
        "llama-layers-2-3x2-scale-0.25-code", "llama-code", "llama-layers-2-3x2-scale-0.25-untrained-code",
    ]  # fmt: skip
    assert [len(each.architecture.steps) for each in found] == [6, 4, 6]
    assert found[0].architecture.loop_factors == (1, 0.25, 0.25, 0.25, 0.25, 1)
    assert found[0].architecture == found[2].architecture


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bloom"},
            r"model_type must be one of llama, .*; got 'bloom' in .*adding_a_family.md adds a row",
        ),
        ({"hidden_size": "wide"}, r"config.json must be a config that transformers reads; "),
        ({"num_hidden_layers": 5}, r"must hold every weight; missing model.layers.4"),
        ({"num_hidden_layers": 3}, r"must hold no other weights; got model.layers.3"),
        (
            {"vocab_size": 100},
            r"must hold weights of its config's shapes; got lm_head.weight of \(259, 32\) where \(100",
        ),
        ({"num_hidden_layers": 10**9}, r"config.json must be of at most 10000 layers; got 1000000000"),
        ({"num_attention_heads": 0}, r"config.json must be a config that transformers reads; ZeroDivisionError: "),
        ({"num_key_value_heads": 0}, r"must hold safetensors weights of its config; ZeroDivisionError: "),
    ],
)
def test_a_folder_that_is_not_whole_is_one_line(
    llama: Path, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((llama / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**values, **config}), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        open_network(tmp_path)


def test_weights_that_are_cut_short_are_one_line(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(UserError, match=r"must hold safetensors weights of its config; SafetensorError: "):
        open_network(tmp_path)


def test_pickled_weights_are_refused_with_the_way_to_write_others(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(UserError, match=r"pickles are never loaded; got pytorch_model.bin: .* safe_serialization=True"):
        open_network(tmp_path)


def test_a_hub_id_offline_is_one_line() -> None:
    with pytest.raises(UserError, match=r"a checkpoint must be a folder or a hub id; got 'no-one/nothing'; "):
        open_network("no-one/nothing", Opening(allow_download=True))


def test_what_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not weights", encoding="utf-8")
    with pytest.raises(UserError, match=r"a GGUF file must begin with GGUF; got "):
        convert(tmp_path / "text.gguf", tmp_path / "out")
    with pytest.raises(UserError, match=r"a GGUF file must exist; got "):
        convert(tmp_path / "none.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["text.gguf"]
