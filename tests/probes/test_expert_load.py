"""Arithmetic of expert loads against numbers worked out by hand and simulation."""

from dataclasses import replace

import numpy as np
import pytest

from probes import expert_overlap
from probes.expert_load import INDICES, Classes, chosen, entropy, score_entropy, variation
from tests.support.planted import LOOPED, planted_batch, random_sites, text_samples


def test_entropy_of_weights() -> None:
    assert entropy(np.array([3.0, 3.0, 0.0])) == pytest.approx(np.log(2))
    assert entropy(np.array([0.0, 5.0])) == 0
    assert np.isnan(entropy(np.zeros(2)))


def test_score_entropy_survives_large_logits() -> None:
    logits_112 = np.array([[[2000.0, -2000.0]]])
    assert score_entropy(logits_112, LOOPED)[0, 0] == pytest.approx(0, abs=1e-12)
    assert score_entropy(logits_112, replace(LOOPED, router="sigmoid"))[0, 0] == pytest.approx(0, abs=1e-12)


def test_variation_is_the_mass_that_must_move() -> None:
    assert variation(np.array([2.0, 2.0, 0.0]), np.array([1.0, 0.0, 1.0])) == pytest.approx(0.5)
    assert variation(np.array([1.0, 3.0]), np.array([2.0, 6.0])) == pytest.approx(0)


def test_chosen_marks_tokens_only() -> None:
    held_BTE = chosen(np.array([[[0, 2], [9, -7]]]), np.array([[True, False]]), 3)
    np.testing.assert_array_equal(held_BTE, [[[1, 0, 1], [0, 0, 0]]])


def test_specialisation_weighs_classes_by_their_tokens() -> None:
    # 3 tokens of one class on expert 0, 1 of the other on expert 1: distances 1/4 and 3/4 from (3/4, 1/4).
    classes = Classes(
        names=("a", "b"),
        load_WSZE=np.array([[[[3.0, 0.0], [0.0, 1.0]]]]),
        tokens_WZ=np.array([[3.0, 1.0]]),
    )
    assert classes.specialisation_WS()[0, 0] == pytest.approx(0.75 * 0.25 + 0.25 * 0.75)
    np.testing.assert_array_equal(classes.share_WSZE()[0, 0], [[1, 0], [0, 1]])


def test_nulls_of_dead_experts_and_of_pairs_are_those_of_random_routing() -> None:
    config = replace(LOOPED, num_experts=24, top_k=3)
    samples = text_samples(2, 6)
    dead, popularity, by_hand = [], [], []
    for seed in range(30):
        batch = planted_batch(config, samples, random_sites(config, samples, expert_overlap.needs(config), seed=seed))
        result = expert_overlap.measure([batch], expert_overlap.Options(shuffles=1))
        dead += [row for row in result.rows() if row["quantity"] == "dead experts" and row["level"] == "layer"]
        load_E = np.bincount(np.asarray(batch.sites[1, INDICES]).ravel(), minlength=24) / 12
        late_E = np.bincount(np.asarray(batch.sites[3, INDICES]).ravel(), minlength=24) / 12
        popularity.append(result.popularity_P[0])
        by_hand.append(load_E @ late_E)
    counts = np.array([float(str(row["value"])) for row in dead])
    assert dead[0]["null_uniform"] == pytest.approx(counts.mean(), abs=4 * counts.std() / np.sqrt(len(counts)))
    np.testing.assert_allclose(popularity, by_hand, atol=1e-6)
