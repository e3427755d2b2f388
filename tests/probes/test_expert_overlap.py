"""Experts across visits: planted overlaps, nulls against simulations, and what must not matter."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch
from probes import expert_overlap as probe
from probes.running.probe import Result
from probes.statistics.arrays import is_token
from probes.statistics.experts import INDICES, WEIGHTS
from smelt_interp.config import ModelConfig
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
from tests.support.planted_captures import planted_capture

WIDE = replace(LOOPED, num_experts=16, top_k=4)
EXPERTS, TOP_K = 16, 4


def random_batch(
    num: int = 6, length: int = 20, *, config: ModelConfig = WIDE, padding: int = 3, seed: int = 0
) -> Batch:
    samples = text_samples(num, length, padding=padding, seed=seed)
    return planted_batch(config, samples, random_sites(config, samples, probe.needs(config.architecture()), seed=seed))


def with_sites(batch: Batch, changed: dict[tuple[int, str], NDArray[np.generic]]) -> Batch:
    return replace(batch, sites={**batch.sites, **changed})


def choices(scores_BTE: NDArray[np.float64]) -> NDArray[np.int64]:
    """The top k of random scores: sets of distinct experts, likelier where the scores are higher."""
    return np.argsort(-scores_BTE, -1)[..., :TOP_K]


def find(result: Result, quantity: str, level: str = "headline", **where: object) -> dict[str, object]:
    return pick(result.rows(), quantity=quantity, level=level, **where)


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
    capture = planted_capture(tmp_path / "planted.h5", batch)
    for batches, tolerance in ((iter([batch]), 1e-6), (capture.batches(probe.needs(WIDE.architecture()), 4), 5e-4)):
        result = measure(probe, batches)
        # Shared experts weigh (.4, .1), (.3, .2), (.2, .3): the smaller ones sum to .5.
        for quantity, expected in (("experts shared", 3.0), ("Jaccard", 3 / 5), ("weight shared", 0.5)):
            assert find(result, quantity)["value"] == pytest.approx(expected, abs=tolerance)
            for layers in ("2", "3"):
                by_layer = find(result, quantity, "layer", layers=layers)
                assert by_layer["value"] == pytest.approx(expected, abs=tolerance)


def test_uniform_choices_have_the_uniform_null() -> None:
    result = measure(probe, [random_batch(60, 60)])
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
            measure(probe, [with_sites(batch, {(1, INDICES): early, (3, INDICES): late})]),
            "experts shared", "layer", layers="2",
        )  # fmt: skip
        assert found[caught_by] == pytest.approx(found["value"], abs=0.06)
        assert float(str(found["value"])) > float(str(found[missed_by])) + 0.5


def test_the_shuffled_null_and_z_are_those_of_shuffles() -> None:
    batch = planted_overlap()
    result = measure(probe, [batch], probe.Options(shuffles=300))
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
        null = find(result, quantity, "layer", layers="2")["null_shuffled"]
        assert null == pytest.approx(np.mean(values), abs=4 * error)
    z = (3.0 - np.mean(draws["experts shared"])) / np.std(draws["experts shared"])
    assert find(result, probe.Z, "layer", layers="2")["value"] == pytest.approx(z, rel=0.1)


def test_padding_never_counts() -> None:
    batch = random_batch()
    padding_BT = ~is_token(batch.samples)
    spoilt = {key: np.array(x) for key, x in batch.sites.items()}
    for (_, suffix), x in spoilt.items():
        x[padding_BT] = 10**6 if suffix == INDICES else np.nan
    spoilt_rows = measure(probe, [with_sites(batch, spoilt)]).rows()
    assert same_numbers(measure(probe, [batch]).rows(), spoilt_rows)


def test_the_popularity_null_is_that_of_both_loads() -> None:
    config = replace(LOOPED, num_experts=24, top_k=3)
    for seed in range(5):
        batch = random_batch(2, 6, config=config, padding=0, seed=seed)
        early_E, late_E = (np.bincount(np.asarray(batch.sites[s, INDICES]).ravel(), minlength=24) / 12 for s in (1, 3))
        found = find(measure(probe, [batch]), "experts shared", "layer", layers="2")
        assert found["null_popularity"] == pytest.approx(early_E @ late_E, abs=1e-6)


def test_a_baseline_is_marked() -> None:
    samples = text_samples()
    batch = planted_batch(BASELINE, samples, random_sites(BASELINE, samples, probe.needs(BASELINE.architecture())))
    result = measure(probe, [batch])
    assert [row["quantity"] for row in result.rows()] == list(probe.QUANTITIES)
    assert all(row["value"] is None and str(row["note"]).startswith("needs two visits") for row in result.rows())
    assert len(result.figures["experts shared"].data) == 0


def test_three_visits_give_every_pair() -> None:
    config = replace(WIDE, num_visits=3)
    batch = random_batch(config=config)
    result = measure(probe, [batch], probe.Options(compare=(0, 1, 2)))
    pairs = {row["visit"] for row in result.rows() if row["quantity"] == "experts shared"}
    assert pairs == {"1 vs 2", "1 vs 3", "2 vs 3"}
    assert len(result.figures["experts shared"].data) == 3 * (1 + 3)  # measured and three nulls


@pytest.mark.parametrize("expert", [EXPERTS, -1])
def test_an_index_outside_the_experts_is_told_in_a_line(expert: int) -> None:
    batch = random_batch()
    wrong_BTK = np.array(batch.sites[3, INDICES])
    wrong_BTK[2, 1, 0] = expert
    with pytest.raises(UserError, match=f"^chosen experts must be 0 to 15; got {expert}: record it again$"):
        measure(probe, [with_sites(batch, {(3, INDICES): wrong_BTK})])


def test_a_dense_network_has_no_router() -> None:
    batch = planted_batch(NESTED, text_samples(), {})
    with pytest.raises(UserError, match=r"^routing must be measured on a network with experts; got nested, which"):
        measure(probe, [batch])


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="shuffles must be at least 1; got 0"):
        probe.Options(shuffles=0)
    with pytest.raises(UserError, match="visits must be two or more different numbers from 1; got 3 3"):
        probe.Options(compare=(2, 2))
    with pytest.raises(UserError, match="visits must be among 1 to 2; got 3"):
        measure(probe, [random_batch()], probe.Options(compare=(1, 2)))
