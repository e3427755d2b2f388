"""Routing load: planted routings, loads against counts by hand, nulls against simulation."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch
from probes import expert_load as probe
from probes.expert_load import Classes, entropy, score_entropy, variation
from probes.running.probe import Result
from probes.statistics.arrays import is_token
from probes.statistics.experts import INDICES, LOGITS
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role
from smelt_interp.data.token_text import TokenText
from smelt_interp.errors import UserError
from tests.support.answers import measure
from tests.support.planted import (
    BASELINE,
    LOOPED,
    NESTED,
    pick,
    planted_batch,
    random_sites,
    same_numbers,
    text_samples,
)

WIDE = replace(LOOPED, num_experts=16, top_k=4)
EXPERTS, TOP_K = 16, 4


def random_batch(
    num: int = 6, length: int = 20, *, config: ModelConfig = WIDE, padding: int = 3, seed: int = 0
) -> Batch:
    samples = text_samples(num, length, padding=padding, seed=seed)
    sites = random_sites(config, samples, probe.needs(config.architecture()), seed=seed)
    return planted_batch(config, samples, sites)


def with_sites(batch: Batch, changed: dict[tuple[int, str], NDArray[np.generic]]) -> Batch:
    return replace(batch, sites={**batch.sites, **changed})


def find(result: Result, quantity: str, level: str = "headline", **where: object) -> dict[str, object]:
    return pick(result.rows(), quantity=quantity, level=level, **where)


def test_entropy_of_weights() -> None:
    assert entropy(np.array([3.0, 3.0, 0.0])) == pytest.approx(np.log(2))
    assert entropy(np.array([0.0, 5.0])) == 0
    assert np.isnan(entropy(np.zeros(2)))


def test_score_entropy_survives_large_logits() -> None:
    logits_112 = np.array([[[2000.0, -2000.0]]])
    assert score_entropy(logits_112, "softmax")[0, 0] == pytest.approx(0, abs=1e-12)
    assert score_entropy(logits_112, "sigmoid")[0, 0] == pytest.approx(0, abs=1e-12)


def test_variation_is_the_mass_that_must_move() -> None:
    assert variation(np.array([2.0, 2.0, 0.0]), np.array([1.0, 0.0, 1.0])) == pytest.approx(0.5)
    assert variation(np.array([1.0, 3.0]), np.array([2.0, 6.0])) == pytest.approx(0)


def test_specialisation_weighs_classes_by_their_tokens() -> None:
    # 3 tokens of one class on expert 0, 1 of the other on expert 1: distances 1/4 and 3/4 from (3/4, 1/4).
    classes = Classes(
        names=("a", "b"),
        load_RLZE=np.array([[[[3.0, 0.0], [0.0, 1.0]]]]),
        tokens_RZ=np.array([[3.0, 1.0]]),
    )
    assert classes.specialisation_RL()[0, 0] == pytest.approx(0.75 * 0.25 + 0.25 * 0.75)
    np.testing.assert_array_equal(classes.share_RLZE()[0, 0], [[1, 0], [0, 1]])


def routed(batch: Batch, indices_BTK: NDArray[np.int64]) -> Batch:
    return with_sites(batch, {(step, INDICES): indices_BTK for step in range(len(batch.architecture.steps))})


def test_collapsed_and_even_routing() -> None:
    batch = random_batch(4, 16, padding=0)
    collapsed_BTK = np.broadcast_to(np.arange(TOP_K), (4, 16, TOP_K))
    even_BTK = (np.arange(16)[None, :, None] * TOP_K + np.arange(TOP_K) + np.zeros((4, 1, 1), np.int64)) % EXPERTS
    for indices_BTK, nats, vio, dead in (
        (collapsed_BTK, np.log(TOP_K), EXPERTS / TOP_K - 1, EXPERTS - TOP_K),
        (even_BTK, np.log(EXPERTS), 0.0, 0.0),
    ):
        result = measure(probe, [routed(batch, indices_BTK)])
        for quantity, expected in (("load entropy", nats), ("MaxVio", vio), ("dead experts", dead)):
            found = find(result, quantity, visit=2)
            assert found["value"] == pytest.approx(expected, abs=1e-9)
            assert found["low"] == pytest.approx(expected, abs=1e-9)  # every sample routes alike
    assert find(result, "load entropy", visit=1)["null_uniform"] == pytest.approx(np.log(EXPERTS))
    assert find(result, "dead experts", visit=1)["null_uniform"] == pytest.approx(EXPERTS * 0.75**64)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_router_entropy_is_that_of_the_scores(router: str) -> None:
    config = replace(WIDE, router=router)
    batch = random_batch(config=config)
    result = measure(probe, [batch])
    logits_NE = np.asarray(batch.sites[3, LOGITS], np.float64)[is_token(batch.samples)]
    score_NE = np.exp(logits_NE) if router == "softmax" else 1 / (1 + np.exp(-logits_NE))
    share_NE = score_NE / score_NE.sum(-1, keepdims=True)
    expected = -(share_NE * np.log(share_NE)).sum(-1).mean()
    assert find(result, "router entropy", "layer", layers="2", visit=2)["value"] == pytest.approx(expected, abs=1e-9)
    flat = with_sites(batch, {(s, LOGITS): np.zeros_like(batch.sites[s, LOGITS]) for s in range(6)})
    even = find(measure(probe, [flat]), "router entropy", visit=1)
    assert even["value"] == pytest.approx(even["null_uniform"], abs=1e-12)


def test_coactivation_counts_every_pair() -> None:
    batch = random_batch(40, 20)
    result = measure(probe, [batch])
    expected_EE, by_sample_BEE, count_B = np.zeros((EXPERTS, EXPERTS)), np.zeros((40, EXPERTS, EXPERTS)), np.zeros(40)
    for sample, t in np.argwhere(is_token(batch.samples)):
        chosen_K = batch.sites[2, INDICES][sample, t]
        by_sample_BEE[sample][np.ix_(chosen_K, chosen_K)] += 1
        count_B[sample] += 1
    expected_EE = by_sample_BEE.sum(0) / count_B.sum()
    best = find(result, "most frequent pair of experts", "layer", layers="3", visit=1)
    apart_EE = expected_EE - np.diag(np.diag(expected_EE))
    assert best["value"] == pytest.approx(apart_EE.max())
    first, second = divmod(int(apart_EE.argmax()), EXPERTS)
    assert best["note"] == f"experts {first + 1} and {second + 1}"
    load_E = np.diag(expected_EE)
    scale = TOP_K * (TOP_K - 1) / (load_E.sum() ** 2 - (load_E**2).sum())
    assert best["null_popularity"] == pytest.approx(load_E[first] * load_E[second] * scale)
    assert best["null_uniform"] == pytest.approx(TOP_K * (TOP_K - 1) / (EXPERTS * (EXPERTS - 1)))


def test_the_interval_of_a_pair_is_as_wide_as_a_bootstrap_of_documents() -> None:
    """Documents of four samples each that route alike, more of them than there are groups."""
    batch = random_batch(480, 6, padding=0)
    document_N = np.arange(480) // 4
    alike_BTK = np.asarray(batch.sites[2, INDICES])[document_N]
    batch = replace(batch, samples=replace(batch.samples, document_N=document_N))
    result = measure(probe, [with_sites(batch, {(2, INDICES): alike_BTK})])
    found = find(result, "most frequent pair of experts", "layer", layers="3", visit=1)
    first, second = (int(word) - 1 for word in str(found["note"]).split() if word.isdigit())
    held_B = ((alike_BTK == first).any(-1) & (alike_BTK == second).any(-1)).mean(-1)
    draws_RD = np.random.default_rng(5).integers(0, 120, (600, 120))
    half = 2 * held_B[::4][draws_RD].mean(-1).std()
    assert (float(str(found["high"])) - float(str(found["low"]))) / 2 == pytest.approx(half, rel=0.3)
    assert found["n"] == 64 < 120


def test_classes_are_read_from_the_text_of_tokens_whatever_their_ids() -> None:
    words = [b"the", b" (", b"]", b"12", b"!", b"\n\n", b"  ", b"a1", b""]
    names = ["letters", "opening", "closing", "digits", "punctuation", "newline", "whitespace", "other", "other"]
    samples = replace(text_samples(2, len(words)), text=TokenText.of(words * 2))
    found = probe.classes(samples)["token class"]
    assert {name: np.flatnonzero(of_BT[1]).tolist() for name, of_BT in found.items()} == {
        name: [at for at, each in enumerate(names) if each == name] for name in found
    }
    assert set(found) == set(names)


def test_specialisation_by_token_class() -> None:
    batch = random_batch(8, 20, padding=0)
    digit_BT = np.random.default_rng(0).random((8, 20)) < 0.5
    text = TokenText.of([b"7" if digit else b"x" for digit in digit_BT.ravel()])
    batch = replace(batch, samples=replace(batch.samples, text=text))
    by_class_BTK = np.where(digit_BT[..., None], np.arange(TOP_K), TOP_K + np.arange(TOP_K))
    result = measure(probe, [routed(batch, by_class_BTK)])
    share = digit_BT.mean()
    found = find(result, "specialisation by token class", visit=2)
    assert found["value"] == pytest.approx(2 * share * (1 - share))
    assert 0 < float(str(found["null_shuffled"])) < 0.15
    favourite = find(result, "share of the favourite expert", "head", layers="1", **{"class": "token class digits"})
    assert (favourite["value"], favourite["note"]) == (1.0, "expert 1")


def test_one_expert_a_token_has_no_pairs() -> None:
    result = measure(probe, [random_batch(config=replace(WIDE, top_k=1, renormalise_top_k=False))])
    assert not [row for row in result.rows() if row["quantity"] == "most frequent pair of experts"]


def test_specialisation_of_classes_with_experts_of_their_own() -> None:
    batch = random_batch(8, 20, padding=0)
    # Half of the samples are code, half prose; within each, the second half of the tokens are answers.
    domain_N = np.array([b"code", b"prose"] * 4)
    role_NT = np.where(np.arange(20) < 10, Role.TEXT, Role.ANSWER).astype(np.uint8) + np.zeros((8, 1), np.uint8)
    batch = replace(batch, samples=replace(batch.samples, domain_N=domain_N, role_NT=role_NT))
    by_domain_BTK = np.where((domain_N == b"code")[:, None, None], np.arange(TOP_K), TOP_K + np.arange(TOP_K))
    by_domain_BTK = np.broadcast_to(by_domain_BTK, (8, 20, TOP_K))
    by_role_BTK = np.where((role_NT == Role.ANSWER)[..., None], np.arange(TOP_K), TOP_K + np.arange(TOP_K))
    for indices_BTK, special, other in ((by_domain_BTK, "domain", "role"), (by_role_BTK, "role", "domain")):
        result = measure(probe, [routed(batch, indices_BTK)])
        # Each class uses 4 experts evenly, everyone 8: half of the mass has to move.
        assert find(result, f"specialisation by {special}", visit=1)["value"] == pytest.approx(0.5, abs=1e-9)
        assert find(result, f"specialisation by {other}", visit=1)["value"] == pytest.approx(0.0, abs=1e-9)
    found = find(result, "share of the favourite expert", "head", layers="1", **{"class": "role answer"})
    assert (found["value"], found["null_popularity"], found["null_uniform"]) == (1.0, 0.5, TOP_K / EXPERTS)
    shuffled = find(result, "specialisation by role", visit=1)["null_shuffled"]
    assert 0 < float(str(shuffled)) < 0.15
    one_domain = measure(probe, [random_batch()])
    assert "needs two domains; got code" in str(find(one_domain, "specialisation by domain", visit=1)["note"])


def test_dead_experts_of_random_routing_are_as_many_as_their_null_says() -> None:
    config = replace(LOOPED, num_experts=24, top_k=3)
    rows = [
        row
        for seed in range(30)
        for row in measure(probe, [random_batch(2, 6, config=config, padding=0, seed=seed)]).rows()
        if row["quantity"] == "dead experts" and row["level"] == "layer"
    ]
    counts = np.array([float(str(row["value"])) for row in rows])
    assert rows[0]["null_uniform"] == pytest.approx(counts.mean(), abs=4 * counts.std() / np.sqrt(len(counts)))


def test_padding_never_counts() -> None:
    batch = random_batch()
    padding_BT = ~is_token(batch.samples)
    spoilt = {key: np.array(x) for key, x in batch.sites.items()}
    for (_, suffix), x in spoilt.items():
        x[padding_BT] = 10**6 if suffix == INDICES else np.nan
    spoilt_rows = measure(probe, [with_sites(batch, spoilt)]).rows()
    assert same_numbers(measure(probe, [batch]).rows(), spoilt_rows)


def test_a_baseline_has_loads_of_its_own() -> None:
    result = measure(probe, [random_batch(config=BASELINE)])
    for quantity in ("load entropy", "router entropy", "MaxVio", "dead experts"):
        assert find(result, quantity, visit=1)["layers"] == "middle 2-3"
    assert len(result.figures["load"].data) == 1


def test_three_visits_have_a_load_each() -> None:
    result = measure(probe, [random_batch(config=replace(WIDE, num_visits=3))])
    assert {row["visit"] for row in result.rows() if row["quantity"] == "MaxVio"} == {1, 2, 3}


def test_a_dense_network_has_no_router() -> None:
    batch = planted_batch(NESTED, text_samples(), {})
    with pytest.raises(UserError, match=r"^routing must be measured on a network with experts; got nested, which"):
        measure(probe, [batch])


def test_an_index_above_the_experts_and_logits_that_are_no_numbers_are_told_in_a_line() -> None:
    batch = random_batch()
    wrong_BTK, nan_BTE = np.array(batch.sites[3, INDICES]), np.array(batch.sites[3, LOGITS])
    wrong_BTK[2, 1, 0], nan_BTE[2, 1, 0] = EXPERTS, np.nan
    with pytest.raises(UserError, match=r"^chosen experts must be 0 to 15; got 16: record it again$"):
        measure(probe, [with_sites(batch, {(3, INDICES): wrong_BTK})])
    with pytest.raises(UserError, match=r"^blocks.3.mlp.hook_router_logits must hold finite numbers; got nan among"):
        measure(probe, [with_sites(batch, {(3, LOGITS): nan_BTE})])
