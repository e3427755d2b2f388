"""Induction: planted attention gives its masses, random attention its nulls, and losses fall to their kind."""

from dataclasses import replace

import numpy as np
import pytest

from cache.batch import Batch
from probes import induction as probe
from probes.induction import PATTERN
from probes.running.probe import Result
from probes.statistics.attention import seen_keys
from smelt_interp.data.repeats import repeated_samples
from smelt_interp.data.tokenizer import BYTES
from tests.support.answers import measure
from tests.support.planted import (
    LOOPED,
    pick,
    planted_batch,
    random_sites,
    same_numbers,
    split_batch,
    text_samples,
    uniform_pattern,
)

WIDTH = 10
COPIED, OTHER = 0.25, 3.0


def planted(mass: float = 0.7) -> Batch:
    """Uniform attention everywhere, but head 2 of layer 3, on visit 2, puts `mass` on what followed the same token
    before, and head 1 of layer 2, on visit 1, all of it on the token itself, earlier."""
    samples = repeated_samples(4, length=1 + 2 * WIDTH, seed=0, tokenizer=BYTES)
    sites = random_sites(LOOPED, samples, (PATTERN,))
    for key in sites:
        sites[key] = uniform_pattern(samples, 4)
    for query in range(1 + WIDTH, 1 + 2 * WIDTH):
        row_S = sites[4, PATTERN][:, 1, query]
        row_S *= (1 - mass) / (1 - row_S[:, query - WIDTH + 1])[:, None]
        row_S[:, query - WIDTH + 1] = mass
        sites[1, PATTERN][:, 0, query] = np.arange(1 + 2 * WIDTH) == query - WIDTH
    logprob_BT = np.full(samples.ids_NT.shape, -OTHER, np.float32)
    logprob_BT[:, 1 + WIDTH : -1] = -COPIED
    return planted_batch(LOOPED, samples, sites, logprob_BT=logprob_BT)


@pytest.fixture(scope="module")
def result() -> Result:
    return measure(probe, [planted()])


def find(result: Result, quantity: str, **where: object) -> dict[str, object]:
    return pick(result.rows(), quantity=quantity, **where)


def test_the_planted_heads_are_found_on_their_visit(result: Result) -> None:
    found = find(result, "induction", level="head", layers="3", visit=2, head=2)
    assert (found["value"], found["n"]) == (pytest.approx(0.7), 4)
    uniform = np.mean([1 / (query + 1) for query in range(1 + WIDTH, 1 + 2 * WIDTH)])
    assert found["null_uniform"] == pytest.approx(uniform)
    elsewhere = [0.3 / query for query in range(1 + WIDTH, 1 + 2 * WIDTH)]
    assert found["null_elsewhere"] == pytest.approx(np.mean(elsewhere))
    largest = find(result, "induction", level="headline", visit=2, head="largest")
    assert (largest["value"], largest["note"]) == (pytest.approx(0.7), "layer 3, head 2")
    assert find(result, "induction", level="head", layers="3", visit=1, head=2)["value"] == pytest.approx(uniform)
    assert find(result, "duplicate", level="head", layers="2", visit=1, head=1)["value"] == 1.0
    assert find(result, "previous", level="head", layers="2", visit=1, head=1)["value"] == 0.0


def test_losses_of_tokens_that_can_be_copied_stand_apart(result: Result) -> None:
    assert find(result, "loss (nats)", tokens="copied")["value"] == pytest.approx(COPIED)
    others = find(result, "loss (nats)", tokens="others")
    assert (others["value"], others["null_uniform"]) == (pytest.approx(OTHER), pytest.approx(np.log(259)))


def test_the_last_earlier_place_of_the_same_document_counts_and_the_token_before_does_not() -> None:
    samples = text_samples(1, 9)
    ids_NT = np.array([[256, 5, 6, 5, 5, 6, 7, 6, 5]], np.int32)
    last_BT, found_BT = probe.earlier(replace(samples, ids_NT=ids_NT))
    assert np.flatnonzero(found_BT).tolist() == [3, 5, 7, 8]  # position 4 repeats the token right before it
    assert last_BT[found_BT].tolist() == [1, 2, 5, 4]
    apart = replace(samples, ids_NT=ids_NT, segment_start_NT=np.array([[0, 0, 0, 0, 4, 4, 4, 4, 4]], np.int32))
    last_BT, found_BT = probe.earlier(apart)
    assert dict(zip(np.flatnonzero(found_BT).tolist(), last_BT[found_BT].tolist(), strict=True)) == {3: 1, 7: 5, 8: 4}


def test_the_answer_does_not_depend_on_the_batches() -> None:
    batch = planted()
    assert same_numbers(measure(probe, [batch]).rows(), measure(probe, split_batch(batch, 3)).rows())


@pytest.mark.parametrize("causal", [True, False])
def test_even_attention_gives_its_nulls_in_packed_rows_and_where_later_keys_are_seen(causal: bool) -> None:
    ids_NT = np.tile(np.array([5, 6, 7, 8, 5, 6, 7], np.int32), (2, 2))
    start_NT = np.repeat(np.array([[0, 7], [0, 7]], np.int32), 7, axis=1)
    samples = replace(text_samples(2, 14), ids_NT=ids_NT, segment_start_NT=start_NT)
    seen_BTS = seen_keys(samples, causal=causal)
    pattern_BQTS = np.repeat((seen_BTS / seen_BTS.sum(-1, keepdims=True))[:, None], 4, axis=1)
    architecture = replace(LOOPED.architecture(), causal=causal)
    sites = dict.fromkeys(random_sites(LOOPED, samples, (PATTERN,)), pattern_BQTS)
    rows = measure(probe, [planted_batch(architecture, samples, sites)]).rows()
    found = pick(rows, quantity="induction", level="headline", visit=1, head="mean")
    even = 1 / 7 if not causal else np.mean([1 / 5, 1 / 6, 1 / 7])
    assert [found[name] for name in ("value", "null_uniform", "null_elsewhere")] == pytest.approx([even] * 3)


def test_text_without_repeats_says_so() -> None:
    samples = text_samples(2, 6)
    ids_NT = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    batch = planted_batch(LOOPED, replace(samples, ids_NT=ids_NT), random_sites(LOOPED, samples, (PATTERN,)))
    found = find(measure(probe, [batch]), "induction", level="headline", visit=1, head="mean")
    assert (found["value"], found["note"]) == (None, "not defined: no token occurs twice in these samples")
