"""Samples meet the one before them once, in whatever order they come."""

import numpy as np
import pytest

from cache.batch import take
from probes.statistics.neighbours import MOST_WAITING, Met, Neighbours
from tests.support.planted import LOOPED, planted_batch, random_sites, split_batch, text_samples

SAMPLES = text_samples(9)
SITES = ("attn.hook_q",)
BATCH = planted_batch(LOOPED, SAMPLES, random_sites(LOOPED, SAMPLES, ("attn.hook_q", "attn.hook_k")))


def numbers(met: list[Met]) -> list[tuple[int, int]]:
    return [
        pair
        for before, after in met
        for pair in zip(before.sample_ids.tolist(), after.sample_ids.tolist(), strict=True)
    ]


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_sample_meets_the_one_before_it_once(size: int, seed: int | None) -> None:
    order = np.arange(9) if seed is None else np.random.default_rng(seed).permutation(9)
    neighbours = Neighbours(SITES)
    met = [pair for batch in split_batch(take(BATCH, order), size) for pair in numbers(neighbours.add(batch))]
    assert sorted(met) == [(sample, sample + 1) for sample in range(8)]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_two_runs_meet_where_they_join_whichever_is_merged(cut: int) -> None:
    for first_is_merged in (True, False):
        left, right = Neighbours(SITES), Neighbours(SITES)
        met = numbers(left.add(take(BATCH, np.arange(cut)))) + numbers(right.add(take(BATCH, np.arange(cut, 9))))
        joined = right.merge(left) if first_is_merged else left.merge(right)
        assert numbers(joined) == [(cut - 1, cut)]
        assert sorted(met + numbers(joined)) == [(sample, sample + 1) for sample in range(8)]


def test_samples_with_gaps_between_them_do_not_pile_up() -> None:
    neighbours = Neighbours(SITES)
    batch = planted_batch(LOOPED, text_samples(100, 3), {})
    for sample in range(0, 100, 2):
        assert neighbours.add(take(batch, np.array([sample]))) == []
    assert neighbours.waiting == 2 * MOST_WAITING


def test_samples_that_meet_bring_the_sites_that_are_compared_and_no_others() -> None:
    ((before, after),) = Neighbours(SITES).add(take(BATCH, np.array([4, 2, 3])))
    assert {suffix for _, suffix in before.sites} == {"attn.hook_q"}
    for index, sample in enumerate((2, 3)):
        whole = BATCH.sites[1, "attn.hook_q"]
        np.testing.assert_array_equal(before.sites[1, "attn.hook_q"][index], whole[sample])
        np.testing.assert_array_equal(after.sites[1, "attn.hook_q"][index], whole[sample + 1])
