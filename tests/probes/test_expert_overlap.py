"""Experts across visits: planted overlaps and routings, nulls against simulations, and what must not matter."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch
from cache.parts import write_capture
from probes import expert_overlap as probe
from probes.expert_load import INDICES, LOGITS, WEIGHTS
from probes.running.contract import is_token
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role
from smelt_interp.errors import UserError
from tests.support.planted import BASELINE, LOOPED, planted_batch, random_sites, same_numbers, split_batch, text_samples

WIDE = replace(LOOPED, num_experts=16, top_k=4)
EXPERTS, TOP_K = 16, 4


def random_batch(
    num: int = 6, length: int = 20, *, config: ModelConfig = WIDE, padding: int = 3, seed: int = 0
) -> Batch:
    samples = text_samples(num, length, padding=padding, seed=seed)
    return planted_batch(config, samples, random_sites(config, samples, probe.needs(config), seed=seed))


def with_sites(batch: Batch, changed: dict[tuple[int, str], NDArray[np.generic]]) -> Batch:
    return replace(batch, sites={**batch.sites, **changed})


def choices(scores_BTE: NDArray[np.float64]) -> NDArray[np.int64]:
    """The top k of random scores: sets of distinct experts, likelier where the scores are higher."""
    return np.argsort(-scores_BTE, -1)[..., :TOP_K]


def find(result: probe.OverlapResult, quantity: str, level: str = "headline", **where: object) -> dict[str, object]:
    (found,) = [
        row
        for row in result.rows()
        if row["level"] == level
        and row["quantity"] == quantity
        and all(row[name] == value for name, value in where.items())
    ]
    return dict(found)


def planted_overlap() -> Batch:
    """On visit 2 each token trades the last of its 4 experts; weights .4 .3 .2 .1, then .1 .2 .3 .4."""
    batch = random_batch()
    sites: dict[tuple[int, str], NDArray[np.generic]] = {}
    for early, late in ((1, 3), (2, 4)):
        early_BTK = np.asarray(batch.sites[early, INDICES])
        free_BT = np.array([[min(set(range(EXPERTS)) - set(row)) for row in sample] for sample in early_BTK.tolist()])
        sites[late, INDICES] = np.concatenate([early_BTK[..., :3], free_BT[..., None]], -1)
        sites[early, WEIGHTS] = np.broadcast_to(np.array([0.4, 0.3, 0.2, 0.1], np.float32), early_BTK.shape)
        sites[late, WEIGHTS] = sites[early, WEIGHTS][..., ::-1]
    return with_sites(batch, sites)


def test_planted_overlap_comes_back(tmp_path: Path) -> None:
    batch = planted_overlap()
    capture = write_capture(tmp_path / "planted.h5", list(split_batch(batch, 4)))
    for batches, tolerance in ((iter([batch]), 1e-6), (capture.batches(probe.needs(WIDE), 4), 5e-4)):
        result = probe.measure(batches, probe.Options())
        # Shared experts weigh (.4, .1), (.3, .2), (.2, .3): the smaller ones sum to .5.
        for quantity, expected in (("experts shared", 3.0), ("Jaccard", 3 / 5), ("weight shared", 0.5)):
            assert find(result, quantity)["value"] == pytest.approx(expected, abs=tolerance)
            np.testing.assert_allclose(result.overlap[quantity], expected, atol=tolerance)


def test_uniform_choices_have_the_uniform_null() -> None:
    result = probe.measure([random_batch(60, 60)], probe.Options())
    for quantity in ("experts shared", "Jaccard"):
        found = find(result, quantity)
        half = (float(str(found["high"])) - float(str(found["low"]))) / 2
        for null in ("null_uniform", "null_shuffled"):
            assert found[null] == pytest.approx(found["value"], abs=2.5 * half)
        assert half < 0.04
    assert find(result, "experts shared")["null_uniform"] == TOP_K**2 / EXPERTS
    assert abs(float(str(find(result, "experts shared, z")["value"]))) < 4


def test_uniform_jaccard_is_the_mean_over_all_pairs_of_sets() -> None:
    sets = [set(chosen) for chosen in combinations(range(6), 3)]
    every = [len(a & b) / len(a | b) for a in sets for b in sets]
    assert probe.uniform_jaccard(3, 6) == pytest.approx(np.mean(every), abs=1e-12)
    assert probe.uniform_jaccard(1, 1) == 1.0


def test_skewed_popularity_is_caught_by_the_second_null_and_skewed_samples_by_the_third() -> None:
    batch = random_batch(40, 40, padding=0)
    generator = np.random.default_rng(3)
    noise_VBTE = generator.gumbel(size=(2, 40, 40, EXPERTS))
    popular_E, by_sample_B1E = 2 * generator.standard_normal(EXPERTS), 2 * generator.standard_normal((40, 1, EXPERTS))
    for skew, caught_by, missed_by in (
        (popular_E, "null_popularity", "null_uniform"),
        (by_sample_B1E, "null_shuffled", "null_popularity"),
    ):
        early, late = (choices(noise_BTE + skew) for noise_BTE in noise_VBTE)
        found = find(
            probe.measure([with_sites(batch, {(1, INDICES): early, (3, INDICES): late})], probe.Options()),
            "experts shared", "layer", layers="2",
        )  # fmt: skip
        assert found[caught_by] == pytest.approx(found["value"], abs=0.06)
        assert float(str(found["value"])) > float(str(found[missed_by])) + 0.5


def test_the_shuffled_null_and_z_are_those_of_shuffles() -> None:
    batch = planted_overlap()
    result = probe.measure([batch], probe.Options(shuffles=300))
    token_BT = is_token(batch.samples)
    generator = np.random.default_rng(4)
    early_BTK, late_BTK = (np.asarray(batch.sites[s, INDICES]) for s in (1, 3))
    weight_a_BTK, weight_b_BTK = (np.asarray(batch.sites[s, WEIGHTS], np.float64) for s in (1, 3))
    draws = {"experts shared": [], "Jaccard": [], "weight shared": []}
    for _ in range(800):
        order_BT = np.tile(np.arange(token_BT.shape[1]), (len(token_BT), 1))
        for b, length in enumerate(batch.samples.length_N):
            order_BT[b, :length] = generator.permutation(length)
        other_BTK, other_weight_BTK = (np.take_along_axis(x, order_BT[..., None], 1) for x in (late_BTK, weight_b_BTK))
        same_BTKK = early_BTK[..., :, None] == other_BTK[..., None, :]
        overlap_N = same_BTKK.sum((-2, -1))[token_BT]
        smaller_BTKK = np.minimum(weight_a_BTK[..., :, None], other_weight_BTK[..., None, :])
        draws["experts shared"].append(overlap_N.mean())
        draws["Jaccard"].append((overlap_N / (2 * TOP_K - overlap_N)).mean())
        draws["weight shared"].append((smaller_BTKK * same_BTKK).sum((-2, -1))[token_BT].mean())
    for quantity, values in draws.items():
        error = np.std(values) * (1 / 800 + (1 / 300 if quantity != "experts shared" else 0)) ** 0.5
        assert result.shuffled[quantity][0] == pytest.approx(np.mean(values), abs=4 * error)
    z = (3.0 - np.mean(draws["experts shared"])) / np.std(draws["experts shared"])
    assert result.overlap[probe.Z][0] == pytest.approx(z, rel=0.1)
    assert find(result, probe.Z, "layer", layers="2")["value"] == result.overlap[probe.Z][0]


def routed(batch: Batch, indices_BTK: NDArray[np.int64]) -> Batch:
    return with_sites(batch, {(step, INDICES): indices_BTK for step in range(len(batch.plan))})


def test_collapsed_and_even_routing() -> None:
    batch = random_batch(4, 16, padding=0)
    collapsed_BTK = np.broadcast_to(np.arange(TOP_K), (4, 16, TOP_K))
    even_BTK = (np.arange(16)[None, :, None] * TOP_K + np.arange(TOP_K) + np.zeros((4, 1, 1), np.int64)) % EXPERTS
    for indices_BTK, entropy, vio, dead in (
        (collapsed_BTK, np.log(TOP_K), EXPERTS / TOP_K - 1, EXPERTS - TOP_K),
        (even_BTK, np.log(EXPERTS), 0.0, 0.0),
    ):
        result = probe.measure([routed(batch, indices_BTK)], probe.Options())
        for quantity, expected in (("load entropy", entropy), ("MaxVio", vio), ("dead experts", dead)):
            found = find(result, quantity, visit=2)
            assert found["value"] == pytest.approx(expected, abs=1e-9)
            assert found["low"] == pytest.approx(expected, abs=1e-9)  # every sample routes alike
    assert find(result, "load entropy", visit=1)["null_uniform"] == pytest.approx(np.log(EXPERTS))
    assert find(result, "dead experts", visit=1)["null_uniform"] == pytest.approx(EXPERTS * 0.75**64)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_router_entropy_is_that_of_the_scores(router: str) -> None:
    config = replace(WIDE, router=router)
    batch = random_batch(config=config)
    result = probe.measure([batch], probe.Options())
    logits_NE = np.asarray(batch.sites[3, LOGITS], np.float64)[is_token(batch.samples)]
    score_NE = np.exp(logits_NE) if router == "softmax" else 1 / (1 + np.exp(-logits_NE))
    share_NE = score_NE / score_NE.sum(-1, keepdims=True)
    expected = -(share_NE * np.log(share_NE)).sum(-1).mean()
    assert find(result, "router entropy", "layer", layers="2", visit=2)["value"] == pytest.approx(expected, abs=1e-9)
    flat = with_sites(batch, {(s, LOGITS): np.zeros_like(batch.sites[s, LOGITS]) for s in range(6)})
    even = find(probe.measure([flat], probe.Options()), "router entropy", visit=1)
    assert even["value"] == pytest.approx(even["null_uniform"], abs=1e-12)


def test_coactivation_counts_every_pair() -> None:
    batch = random_batch(40, 20)
    result = probe.measure([batch], probe.Options())
    expected_EE, by_sample_BEE, count_B = np.zeros((EXPERTS, EXPERTS)), np.zeros((40, EXPERTS, EXPERTS)), np.zeros(40)
    for sample, t in np.argwhere(is_token(batch.samples)):
        chosen_K = batch.sites[2, INDICES][sample, t]
        by_sample_BEE[sample][np.ix_(chosen_K, chosen_K)] += 1
        count_B[sample] += 1
    expected_EE = by_sample_BEE.sum(0) / count_B.sum()
    np.testing.assert_allclose(result.coactivation.share_SEE[2], expected_EE, atol=1e-12)
    np.testing.assert_allclose(np.diag(result.coactivation.share_SEE[2]), result.load_SE[2], atol=1e-6)
    # The linearised interval is as wide as a bootstrap's.
    draws_RN = np.random.default_rng(5).integers(0, 40, (600, 40))
    resampled_R = np.array([by_sample_BEE[draw, 0, 1].sum() / count_B[draw].sum() for draw in draws_RN])
    assert result.coactivation.half_width_SEE[2, 0, 1] == pytest.approx(1.96 * resampled_R.std(), rel=0.15)
    best = find(result, "most frequent pair of experts", "layer", layers="3", visit=1)
    assert best["value"] == pytest.approx((expected_EE - np.diag(np.diag(expected_EE))).max())
    assert best["null_uniform"] == pytest.approx(TOP_K * (TOP_K - 1) / (EXPERTS * (EXPERTS - 1)))


def test_one_expert_a_token_has_no_pairs() -> None:
    result = probe.measure([random_batch(config=replace(WIDE, top_k=1, renormalise_top_k=False))], probe.Options())
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
        result = probe.measure([routed(batch, indices_BTK)], probe.Options())
        # Each class uses 4 experts evenly, everyone 8: half of the mass has to move.
        assert find(result, f"specialisation by {special}", visit=1)["value"] == pytest.approx(0.5, abs=1e-9)
        assert find(result, f"specialisation by {other}", visit=1)["value"] == pytest.approx(0.0, abs=1e-9)
    assert result.class_names == ("role answer", "role text", "domain code", "domain prose")
    np.testing.assert_allclose(result.class_load_SZE[0, 0], np.arange(EXPERTS) < TOP_K)
    found = find(result, "share of the favourite expert", "head", layers="1", **{"class": "role answer"})
    assert (found["value"], found["null_popularity"], found["null_uniform"]) == (1.0, 0.5, TOP_K / EXPERTS)
    shuffled = find(result, "specialisation by role", visit=1)["null_shuffled"]
    assert 0 < float(str(shuffled)) < 0.15
    one_domain = probe.measure([random_batch()], probe.Options())
    assert "needs two domains; got domain code" in str(find(one_domain, "specialisation by domain", visit=1)["note"])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batching_does_not_matter(size: int) -> None:
    long, short = random_batch(8), random_batch(3, 9, seed=1)
    short = replace(
        short,
        sample_ids=np.arange(8, 11),
        samples=replace(short.samples, domain_N=np.full(3, b"prose", "S16")),
    )

    def in_batches() -> Iterator[Batch]:
        yield from split_batch(long, size)
        yield from split_batch(short, size)

    whole = probe.measure([long, short], probe.Options()).rows()
    assert any(row["quantity"] == "specialisation by domain" and row["value"] for row in whole)
    assert same_numbers(whole, probe.measure(in_batches(), probe.Options()).rows())


def test_padding_never_counts() -> None:
    batch = random_batch()
    padding_BT = ~is_token(batch.samples)
    spoilt = {key: np.array(x) for key, x in batch.sites.items()}
    for (_, suffix), x in spoilt.items():
        x[padding_BT] = 10**6 if suffix == INDICES else np.nan
    spoilt_rows = probe.measure([with_sites(batch, spoilt)], probe.Options()).rows()
    assert same_numbers(probe.measure([batch], probe.Options()).rows(), spoilt_rows)


def test_a_baseline_reports_its_routing_and_marks_the_rest() -> None:
    samples = text_samples()
    batch = planted_batch(BASELINE, samples, random_sites(BASELINE, samples, probe.needs(BASELINE)))
    result = probe.measure([batch], probe.Options())
    for quantity in (*probe.OVERLAPS, probe.Z):
        assert str(find(result, quantity)["note"]).startswith("needs two visits")
        assert find(result, quantity)["value"] is None
    for quantity in ("load entropy", "router entropy", "MaxVio", "dead experts"):
        assert find(result, quantity)["value"] is not None
    assert len(probe.figure(result).data) == 1


def test_three_visits_give_every_pair() -> None:
    config = replace(WIDE, num_visits=3)
    batch = random_batch(config=config)
    result = probe.measure([batch], probe.Options(visits=(1, 2, 3)))
    pairs = {row["visit"] for row in result.rows() if row["quantity"] == "experts shared"}
    assert pairs == {"1 vs 2", "1 vs 3", "2 vs 3"}
    assert {row["visit"] for row in result.rows() if row["quantity"] == "MaxVio"} == {1, 2, 3}
    assert len(probe.figure(result).data) == 3 * 3 + 1


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="shuffles must be at least 1; got 0"):
        probe.Options(shuffles=0)
    with pytest.raises(UserError, match="visits must be two or more different numbers from 1; got 2 2"):
        probe.Options(visits=(2, 2))
    with pytest.raises(UserError, match="visits must be among 1 to 2; got 3"):
        probe.measure([random_batch()], probe.Options(visits=(2, 3)))
