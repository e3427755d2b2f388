"""Every probe answers the same however its samples are batched, split, recorded or streamed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cache.batch import Batch
from cache.record import DEFAULT_SITES, record, run_batches
from model.network import LoopedMoE
from probes.running import catalog
from probes.running.probe import run
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.data.tokenizer import BYTES, PAD
from tests.support.answers import merged, rows_of
from tests.support.planted import LOOPED, planted_batch, random_sites, same_numbers, split_batch, text_samples

SHORT = 4


def samples() -> Samples:
    """Episodes after two numbers of shots, and text of another length and domain."""
    dyck = load_samples(DataOptions(samples=3, shots=(0, 2), length=48, max_total=6), 48, BYTES)
    text = text_samples(SHORT, 20, padding=3)
    return concatenate([dyck, replace(text, document_N=np.array([5, 5, 6, 6]))], PAD)


@pytest.fixture(scope="module")
def whole() -> Batch:
    batch = planted_batch(LOOPED, samples(), random_sites(LOOPED, samples(), DEFAULT_SITES))
    generator = np.random.default_rng(0)
    logprob_BT = -generator.random(batch.samples.ids_NT.shape, np.float32)
    return replace(batch, logprob_BT=logprob_BT, argmax_BT=np.roll(batch.samples.ids_NT, -1, axis=1))


Expected = Callable[[str], list[dict[str, object]]]


@pytest.fixture(scope="module")
def expected(whole: Batch) -> Expected:
    """A probe's rows from all samples as one batch."""
    return cache(lambda name: rows_of(catalog.load(name), [whole]))


@pytest.mark.parametrize("name", catalog.NAMES)
def test_the_answer_does_not_depend_on_the_batches(name: str, whole: Batch, expected: Expected) -> None:
    for size in (1, 3):
        assert same_numbers(expected(name), rows_of(catalog.load(name), split_batch(whole, size)))


@pytest.mark.parametrize("name", catalog.NAMES)
def test_numbers_by_sample_are_those_of_the_sample_alone(name: str, whole: Batch) -> None:
    asked = {name: (catalog.load(name), catalog.load(name).Options())}
    found, one_by_one = (
        run(split_batch(whole, size), asked, by_sample=True)[name].by_sample.set_index("sample") for size in (4, 1)
    )
    assert found.index.tolist() == list(range(10))
    assert found["domain"].tolist() == ["dyck"] * 6 + ["code"] * 4
    assert len(found.columns) > 2
    for column in one_by_one.columns.drop(["document", "domain"]):
        # The ends of a median's bin are known of the whole batch.
        tolerance = 0.011 if "median" in column else 1e-6
        known = one_by_one[column].notna()  # content is 0 beside samples that have some, undefined alone
        np.testing.assert_allclose(found[column][known], one_by_one[column][known], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_two_halves_merged_are_the_whole(name: str, whole: Batch, expected: Expected) -> None:
    probe = catalog.load(name)

    def half(first: int, stop: int) -> Iterator[Batch]:
        yield from list(split_batch(whole, 1))[first:stop]

    for parts in (((0, 5), (5, 10)), ((5, 10), (0, 5)), ((0, 1), (1, 2), (2, 10))):
        found = merged(probe, [half(*part) for part in parts]).rows()
        assert same_numbers(expected(name), found)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_file_and_the_network_that_made_it_agree(name: str, tmp_path: Path) -> None:
    probe = catalog.load(name)
    network = LoopedMoE(replace(LOOPED, width=16), seed=0).eval()
    needed = probe.needs(network.architecture)
    capture = record(network, samples(), tmp_path / "file", suffixes=needed or DEFAULT_SITES, dtype="float32")
    streamed = rows_of(probe, run_batches(network, samples(), needed, batch_size=3))
    assert same_numbers(streamed, rows_of(probe, capture.batches(needed, 4)), tolerance=2e-6)
