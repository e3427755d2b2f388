"""A probe gets the same batches from a checkpoint as from a capture of it, and refuses what it cannot compare."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.batch import Batch
from cache.record import record
from model.network import LoopedMoE
from probes import attention_sink
from probes.running.source import SampleSet, Source, Subject, open_subjects, sample_sets
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from tests.support.answers import rows_of as answer
from tests.support.planted import BASELINE, LOOPED, same_numbers
from tests.support.planted_captures import planted_capture, random_batch

SMALL = {"samples": 5, "length": 40, "shots": (1,), "max_total": 8}
SITES = attention_sink.needs(LOOPED.architecture())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A looped network, its Baseline, and a capture of the first on five Dyck episodes."""
    folder = tmp_path_factory.mktemp("source")
    network = LoopedMoE(LOOPED, seed=1)
    network.save_pretrained(folder / "looped", readme="")
    LoopedMoE(BASELINE, seed=2).save_pretrained(folder / "baseline", readme="")
    samples = load_samples(DataOptions(**SMALL), LOOPED.context, BYTES)
    record(network, samples, folder / "dyck.h5", suffixes=SITES, batch_size=2, dtype="float32")
    untrained = LoopedMoE(LOOPED, seed=0)
    record(untrained, samples, folder / "null.h5", suffixes=SITES, source={"untrained_seed": 0}, batch_size=2)
    return folder


def small(*names: str) -> DataOptions:
    return DataOptions(data=names, **SMALL)


def opened(source: Source, data: DataOptions) -> tuple[tuple[Subject, ...], tuple[SampleSet, ...]]:
    networks = open_subjects(source, data.seed)
    return networks, sample_sets(networks[0], data)


def rows_of(network: Subject, data: SampleSet) -> list[dict[str, object]]:
    return answer(attention_sink, network.batches(data, SITES), attention_sink.Options(sink_tokens=8))


# The same numbers from both sources


def test_a_capture_answers_as_the_checkpoint_does(folder: Path) -> None:
    (running, *_), (dyck,) = opened(Source(ckpt=folder / "looped", untrained=False), small("dyck"))
    (recorded,), (same,) = opened(Source(capture=folder / "dyck.h5"), DataOptions())
    assert dyck.samples.digest() == same.samples.digest()
    assert running.described["weights"] == recorded.described["weights"]
    assert same_numbers(rows_of(running, dyck), rows_of(recorded, same))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_running_network_answers_alike_in_every_batch_size(folder: Path, size: int) -> None:
    (whole,), (dyck,) = opened(Source(ckpt=folder / "looped", untrained=False, batch_size=5), small("dyck"))
    (split,), _ = opened(Source(ckpt=folder / "looped", untrained=False, batch_size=size), small("dyck"))
    assert same_numbers(rows_of(whole, dyck), rows_of(split, dyck))


def test_the_untrained_network_of_a_checkpoint_is_that_of_its_seed(folder: Path) -> None:
    networks, (dyck,) = opened(Source(ckpt=folder / "looped"), small("dyck"))
    (recorded,), _ = opened(Source(capture=folder / "null.h5"), DataOptions())
    assert [(network.name, network.untrained) for network in networks] == [("looped", False), ("untrained", True)]
    assert recorded.untrained
    assert networks[1].described["weights"] == recorded.described["weights"]
    left, right = (rows_of(network, dyck) for network in (networks[1], recorded))
    assert same_numbers(left, right, tolerance=2e-3), "the capture is float16"


def test_a_capture_of_two_domains_is_two_data_sets(tmp_path: Path) -> None:
    batch = random_batch(7)
    domain_N = np.array([b"code", b"dyck", b"code", b"dyck", b"code", b"code", b"code"], "S16")
    planted_capture(tmp_path / "both.h5", replace(batch, samples=replace(batch.samples, domain_N=domain_N)))
    (network,), recorded = opened(Source(capture=tmp_path / "both.h5", batch_size=2), DataOptions())
    found = {data.name: ids(network.batches(data, ("attn.hook_k",))) for data in recorded}
    assert found == {"code": [0, 2, 4, 5, 6], "dyck": [1, 3]}
    for data in recorded:
        for read in network.batches(data, ("attn.hook_k",)):
            expected = batch.sites[2, "attn.hook_k"][read.sample_ids]
            np.testing.assert_allclose(read.sites[2, "attn.hook_k"], expected, atol=2e-3)


def ids(batches: Iterator[Batch]) -> list[int]:
    return [int(sample) for batch in batches for sample in batch.sample_ids]


# What is refused


def test_networks_are_compared_on_the_same_samples_alone(folder: Path) -> None:
    networks, (other,) = opened(
        Source(ckpt=folder / "looped", against=(folder / "dyck.h5",), untrained=False),
        replace(small("dyck"), seed=5),
    )
    with pytest.raises(UserError, match=r"must have seen the same samples \(5 of dyck\); got .*dyck.h5 with 5 of dyck"):
        next(networks[1].batches(other, SITES))


def test_networks_of_one_name_are_told_apart_by_their_paths(folder: Path) -> None:
    twin = folder / "twin" / "looped"
    if not twin.exists():
        LoopedMoE(LOOPED, seed=3).save_pretrained(twin, readme="")
    networks = open_subjects(Source(ckpt=folder / "looped", against=(twin,), untrained=False), 0)
    assert [network.name for network in networks] == [str(folder / "looped"), str(twin)]
    with pytest.raises(UserError, match="--against must name other networks, each once"):
        open_subjects(Source(ckpt=folder / "looped", against=(folder / "looped",), untrained=False), 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "one of --ckpt DIR and --capture DIR must be given; got neither"),
        ({"ckpt": "looped", "capture": "dyck.h5"}, "one of --ckpt DIR and --capture DIR must be given; got both"),
        ({"ckpt": "nowhere"}, "a checkpoint must be a folder; got .*nowhere, which is none"),
        ({"ckpt": "dyck.h5"}, "a config file must exist; got .*dyck.h5/config.json"),
        ({"capture": "nowhere.h5"}, "a capture must be a folder with a manifest.json; got .*nowhere.h5"),
        ({"capture": "looped"}, "a capture must hold a manifest; got the folder .*looped: --ckpt opens a checkpoint"),
    ],
)
def test_sources_outside_their_rule_are_refused(folder: Path, source: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_subjects(Source(**{name: folder / path for name, path in source.items()}), 0)


def test_a_batch_has_a_sample_and_a_network_a_thread() -> None:
    with pytest.raises(UserError, match="batch_size must be at least 1; got 0"):
        Source(ckpt=Path("x"), batch_size=0)
    with pytest.raises(UserError, match="threads must be at least 1; got 0"):
        Source(ckpt=Path("x"), threads=0)
    with pytest.raises(UserError, match="batch_size must be at most 65536; got 1"):
        Source(ckpt=Path("x"), batch_size=10**23)
    with pytest.raises(UserError, match="threads must be at most 1024; got 1025"):
        Source(ckpt=Path("x"), threads=1025)


def test_every_name_of_the_data_options_is_a_set_of_its_own(folder: Path) -> None:
    networks = open_subjects(Source(ckpt=folder / "looped", untrained=False), 0)
    data = DataOptions(**{**SMALL, "data": ("dyck", "backcopy")})
    assert [(each.name, len(each.samples)) for each in sample_sets(networks[0], data)] == [("dyck", 5), ("backcopy", 5)]
    with pytest.raises(UserError, match=r"data must be one of dyck, .*, or a file or folder; got 'nothing'"):
        sample_sets(networks[0], replace(data, data=("nothing",)))
