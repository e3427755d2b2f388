"""Every probe that reads batches says the same, of all samples and of each, however they are batched and padded."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from cache.batch import Batch, take
from probes.running import catalog
from probes.running.probe import Result, run
from smelt_interp.arrays import Array
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.sites import SITES
from tests.support.planted import LOOPED, planted_batch, random_sites

NAMES = (*catalog.NAMES, *catalog.APART)
ASKED = {name: (catalog.load(name), catalog.load(name).Options()) for name in NAMES}


@pytest.fixture(scope="module")
def whole() -> Batch:
    """Rows of different lengths, some of them Dyck's, with random numbers at every site that any probe reads."""
    options = DataOptions(data=("dyck", "code"), samples=3, length=60, max_total=10, shots=(0, 1), rendering="compact")
    samples = load_samples(options, 64, BYTES)
    assert len(set(samples.length_N.tolist())) > 2
    suffixes = {suffix for probe, _ in ASKED.values() for suffix in probe.needs(LOOPED.architecture())}
    logprob_BT = -np.random.default_rng(1).random(samples.ids_NT.shape).astype(np.float32)
    sites = random_sites(LOOPED, samples, tuple(sorted(suffixes)))
    return planted_batch(LOOPED, samples, sites, logprob_BT=logprob_BT, argmax_BT=np.roll(samples.ids_NT, -1, 1))


def trimmed(batch: Batch) -> Batch:
    """The batch without the columns that are padding in all of its rows."""
    samples, length = batch.samples, int(batch.samples.length_N.max())
    text = samples.text.take(np.arange(samples.ids_NT.size).reshape(samples.ids_NT.shape)[:, :length].ravel())

    def cut(x: Array, axes: str) -> Array:
        return np.asarray(x)[tuple(slice(length) if axis in "TS" else slice(None) for axis in axes)]

    return replace(
        batch,
        samples=replace(samples, ids_NT=samples.ids_NT[:, :length], role_NT=samples.role_NT[:, :length],
                        segment_start_NT=samples.segment_start_NT[:, :length], text=text),
        logprob_BT=cut(batch.logprob_BT, "BT"), argmax_BT=cut(batch.argmax_BT, "BT"),
        sites={key: cut(x, SITES[key[1]].axes) for key, x in batch.sites.items()},
    )  # fmt: skip


def batches(whole: Batch, size: int) -> Iterator[Batch]:
    for first in range(0, len(whole.samples), size):
        yield trimmed(take(whole, np.arange(first, min(first + size, len(whole.samples)))))


@pytest.fixture(scope="module")
def expected(whole: Batch) -> dict[str, Result]:
    return run([whole], ASKED, by_sample=True)


@pytest.fixture(scope="module", params=[(1, False), (3, True), (8, False)])
def found(whole: Batch, request: pytest.FixtureRequest) -> dict[str, Result]:
    size, by_sample = request.param
    return run(batches(whole, size), ASKED, by_sample=by_sample)


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_padding_say_nothing(name: str, expected: dict[str, Result], found: dict[str, Result]) -> None:
    pd.testing.assert_frame_equal(found[name].table, expected[name].table, rtol=1e-6, atol=1e-6)
    frames = [frame for each in (found, expected) if (frame := each[name].by_sample) is not None]
    if len(frames) < 2:
        return
    by_sample, whole = (frame.sort_index(axis=1) for frame in frames)
    pd.testing.assert_frame_equal(by_sample, whole, rtol=1e-6, atol=1e-6)
