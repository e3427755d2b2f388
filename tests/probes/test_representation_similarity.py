"""States alike: alignments against their textbook formulas, planted rotations and independent states."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from cache.batch import Batch
from probes import representation_similarity as probe
from probes.representation_similarity import CKA, DEBIASED, RANK, STATE, alignment, effective_rank, gaussian_rank
from probes.running.probe import Result
from tests.support.answers import measure
from tests.support.planted import BASELINE, LOOPED, pick, planted_batch, random_sites, text_samples

NUM, LENGTH = 12, 24
WIDE = replace(LOOPED, width=16)
GENERATOR = np.random.default_rng(0)


def planted(config=WIDE, padding: int = 0) -> Batch:
    """States are independent, but those of layer 2 on visit 2 are those of visit 1 turned and doubled; every start is
    the same and enormous."""
    samples = text_samples(NUM, LENGTH, padding=padding)
    sites = random_sites(config, samples, (STATE,))
    if config is WIDE:
        turn_DD, _ = np.linalg.qr(GENERATOR.standard_normal((16, 16)))
        sites[3, STATE] = (2 * sites[1, STATE] @ turn_DD + 5).astype(np.float32)
    for values in sites.values():
        values[:, 0] = 1e4
    return planted_batch(config, samples, sites)


def find(result: Result, quantity: str, level: str = "layer", **where: object) -> dict[str, object]:
    return pick(result.rows(), quantity=quantity, level=level, **where)


def test_alignments_are_those_of_the_textbooks() -> None:
    x_TD, y_TE = GENERATOR.standard_normal((6, 3)), GENERATOR.standard_normal((6, 5))
    y_TE[:, :3] += x_TD
    grams = [z @ z.T for z in (x_TD, y_TE)]
    padded = [np.pad(gram, ((0, 2), (0, 2)))[None, None] for gram in grams]
    mask_BT = (np.arange(8) < 6)[None].astype(float)
    found = alignment(*padded, mask_BT)
    # Plain, between features (arXiv:1905.00414).
    x_TD, y_TE = x_TD - x_TD.mean(0), y_TE - y_TE.mean(0)
    assert found[CKA][0, 0, 0] == pytest.approx(((y_TE.T @ x_TD) ** 2).sum() / 25)
    # Unbiased, over all quadruples of different tokens (Song et al. 2012).
    k, m = grams
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(6), 4)]
    assert found[DEBIASED][0, 0, 0] == pytest.approx(np.mean(terms))
    eigenvalues = np.linalg.eigvalsh(x_TD @ x_TD.T)
    rank = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert effective_rank(padded[0], mask_BT)[0, 0] == pytest.approx(rank)


def test_a_turned_and_scaled_state_is_the_same_and_an_independent_one_is_not() -> None:
    result = measure(probe, [planted(padding=3)])
    for name in (CKA, DEBIASED):
        assert find(result, name, layers="2", visit="1 vs 2")["value"] == pytest.approx(1, abs=1e-6)
    apart = find(result, DEBIASED, layers="3", visit="1 vs 2")
    assert abs(float(str(apart["value"]))) < 0.1
    assert float(str(apart["low"])) < 0 < float(str(apart["high"]))
    assert float(str(find(result, CKA, layers="3", visit="1 vs 2")["value"])) > 0.3
    assert abs(float(str(find(result, DEBIASED, layers="2", visit="1 vs 2")["null_shuffled"]))) < 0.1
    among = find(result, DEBIASED, "head", layers="2", visit=1, **{"with": "layer 2, visit 2"})
    assert among["value"] == pytest.approx(1, abs=1e-6)


def test_what_samples_have_in_common_by_position_is_the_null() -> None:
    batch = planted()
    batch.sites[1, STATE][:] = batch.sites[1, STATE][:1]
    batch.sites[3, STATE][:] = batch.sites[3, STATE][:1]
    found = find(measure(probe, [batch]), DEBIASED, layers="2", visit="1 vs 2")
    assert found["value"] == found["null_shuffled"] == pytest.approx(1, abs=1e-6)


def test_the_start_is_left_out_unless_it_is_asked_for() -> None:
    asked = measure(probe, [planted()], probe.Options(t_min=0))
    assert find(asked, CKA, layers="3", visit="1 vs 2")["value"] == pytest.approx(1, abs=1e-3)
    assert find(asked, RANK, layers="3", visit=1)["value"] == pytest.approx(1, abs=1e-2)


def test_the_effective_rank_of_independent_states_is_that_of_normal_vectors() -> None:
    found = find(measure(probe, [planted()]), RANK, layers="3", visit=1)
    assert found["null_gaussian"] == pytest.approx(gaussian_rank(np.array([LENGTH - 1.0]), 16)[0])
    assert found["value"] == pytest.approx(found["null_gaussian"], rel=0.05)


def test_the_first_tokens_alone_are_compared_and_too_few_say_nothing() -> None:
    batch = planted()
    few = measure(probe, [batch], probe.Options(tokens=6))
    assert find(few, RANK, layers="3", visit=1)["null_gaussian"] == pytest.approx(gaussian_rank(np.array([6.0]), 16)[0])
    short = planted_batch(WIDE, text_samples(3, 4), random_sites(WIDE, text_samples(3, 4), (STATE,)))
    assert find(measure(probe, [short]), RANK, layers="3", visit=1)["n"] == 0


def test_a_baseline_has_pairs_of_steps_and_no_visits() -> None:
    result = measure(probe, [planted(replace(BASELINE, width=16))])
    assert find(result, DEBIASED, "headline")["note"].startswith("needs two visits")
    assert find(result, CKA, "head", layers="1", visit=1, **{"with": "layer 4, visit 1"})["value"] > 0
