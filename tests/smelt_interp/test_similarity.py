"""Similarity measures against closed forms, loops and simulated permutations."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import hypergeom

from smelt_interp import similarity as sim
from smelt_interp.errors import UserError

pytestmark = pytest.mark.portable


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def total(sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Added up over samples."""
    return {name: x_N.sum(0) for name, x_N in sums.items()}


def all_tokens(num: int, length: int) -> np.ndarray:
    return np.ones((num, length), dtype=bool)


def test_planted_cosine_is_returned_raw_and_per_head(rng):
    """b is a turned by 60 degrees in head 0 and by 90 in head 1, so cosines are 0.5 and 0 at any length."""
    a = np.zeros((3, 5, 2, 2))
    a[..., 0] = rng.uniform(1, 9, (3, 5, 2))
    b = np.zeros_like(a)
    b[:, :, 0] = a[:, :, 0, :1] * [0.5, np.sqrt(0.75)]
    b[:, :, 1] = a[:, :, 1, :1] * [0.0, 2.0]
    sums = sim.cosine_sums(a, b, all_tokens(3, 5))
    np.testing.assert_allclose(sim.raw_cosine(total(sums)), [0.5, 0.0], atol=1e-12)


def test_a_common_offset_raises_the_raw_cosine_and_its_null_but_not_the_centred(rng):
    offset = np.full(16, 2.0)
    a, b = rng.normal(size=(2, 20, 200, 16)) + offset
    sums = sim.cosine_sums(a, b, all_tokens(20, 200))
    raw, null = sim.raw_cosine(total(sums)), sim.shuffled_raw_cosine(total(sums))
    assert raw > 0.75  # |offset|^2 / (|offset|^2 + 16) = 64 / 80 for long vectors
    assert raw == pytest.approx(null, abs=5e-3)
    assert abs(sim.centred_cosine(total(sums))) < 0.02


def test_centred_cosine_equals_its_definition_over_measured_tokens_and_ignores_offsets(rng):
    a, b = rng.normal(size=(2, 4, 6, 3))
    b += 0.7 * a
    mask = rng.random((4, 6)) < 0.7
    x, y = a[mask] - a[mask].mean(0), b[mask] - b[mask].mean(0)
    expected = (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum())
    for shift in (0.0, 5.0):
        sums = sim.cosine_sums(a + shift, b - 3 * shift, mask)
        assert sim.centred_cosine(total(sums)) == pytest.approx(expected, abs=1e-10)
    small = sim.cosine_sums(a / 1000, b / 1000, mask)
    assert sim.centred_cosine(total(small)) == pytest.approx(expected, abs=1e-10), "lengths say nothing"


def test_cosine_nulls_are_the_mean_over_random_permutations_within_samples(rng):
    a, b = rng.normal(size=(2, 3, 5, 4)) + 0.4 * rng.normal(size=(3, 1, 4))
    mask = all_tokens(3, 5)
    exact = sim.cosine_sums(a, b, mask)
    raw, centred = [], []
    for _ in range(3000):
        shuffled = np.stack([rng.permutation(sample) for sample in b])
        sums = sim.cosine_sums(a, shuffled, mask)
        raw.append(sim.raw_cosine(total(sums)))
        centred.append(sim.centred_cosine(total(sums)))
    for draws, expected in (
        (raw, sim.shuffled_raw_cosine(total(exact))),
        (centred, sim.shuffled_centred_cosine(total(exact))),
    ):
        assert np.mean(draws) == pytest.approx(expected, abs=5 * np.std(draws) / np.sqrt(3000))


def test_a_record_of_one_sample_does_not_depend_on_the_others(rng):
    a, b = rng.normal(size=(2, 8, 5, 2, 3))
    mask = rng.random((8, 5)) < 0.8
    whole = sim.cosine_sums(a, b, mask)
    for size in (1, 3):
        parts = [sim.cosine_sums(a[i : i + size], b[i : i + size], mask[i : i + size]) for i in range(0, 8, size)]
        for name, x_N in whole.items():
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_allclose(joined, x_N, rtol=1e-12, atol=1e-12)


def test_what_stands_at_tokens_that_are_not_measured_never_counts(rng):
    a, b = rng.normal(size=(2, 4, 5, 2, 3))
    rows = rng.dirichlet(np.ones(5), size=(4, 5, 2))
    experts = rng.permuted(np.broadcast_to(np.arange(8), (4, 5, 8)), axis=-1)[..., :3]
    mask = np.arange(5) < np.array([5, 3, 4, 1])[:, None]
    weights = equal_weights(experts)
    spoilt_a, spoilt_rows, spoilt_weights, spoilt_experts = a.copy(), rows.copy(), weights.copy(), experts.copy()
    for spoilt in (spoilt_a, spoilt_rows, spoilt_weights):
        spoilt[~mask] = np.nan
    spoilt_experts[~mask] = -7
    for right, spoilt in (
        (sim.cosine_sums(a, b, mask), sim.cosine_sums(spoilt_a, b, mask)),
        (sim.pattern_sums(rows, rows[::-1], mask), sim.pattern_sums(spoilt_rows, rows[::-1], mask)),
        (
            sim.overlap_sums(experts, weights, experts[::-1], weights, mask, 8),
            sim.overlap_sums(spoilt_experts, spoilt_weights, experts[::-1], weights, mask, 8),
        ),
    ):
        for name, x_N in right.items():
            np.testing.assert_array_equal(spoilt[name], x_N)


def test_equal_vectors_have_no_centred_cosine():
    a = np.ones((2, 3, 4))
    assert np.isnan(sim.centred_cosine(total(sim.cosine_sums(a, a, all_tokens(2, 3)))))


def test_jensen_shannon_distance_equals_scipy_and_its_extremes(rng):
    p, q = rng.dirichlet(np.ones(6), size=(2, 10))
    np.testing.assert_allclose(sim.jensen_shannon_distance(p, q), jensenshannon(p, q, base=2, axis=-1), atol=1e-9)
    assert sim.jensen_shannon_distance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0
    assert sim.jensen_shannon_distance(p[0], p[0]) == 0.0


def test_mass_taken_by_a_learned_sink_counts_as_one_more_outcome():
    p, q = np.array([0.25, 0.25]), np.array([0.5, 0.25])
    expected = jensenshannon([0.25, 0.25, 0.5], [0.5, 0.25, 0.25], base=2)
    assert sim.jensen_shannon_distance(p, q) == pytest.approx(expected, abs=1e-12)


def test_a_row_that_float16_shortened_is_complete(rng):
    """Stored as float16, a row's sum is off by some 1e-4; that is no mass that a sink took."""
    rows = rng.dirichlet(np.full(150, 0.3), size=500)
    stored = rows.astype(np.float16).astype(np.float64)
    assert np.abs(stored.sum(-1) - 1).max() > 5e-5
    assert np.abs(stored.sum(-1) - 1).max() < sim.ROW_SUM_TOLERANCE / 2
    assert sim.jensen_shannon_distance(rows, stored).max() < 5e-4
    short = np.array([1.0, 1.1]) * sim.ROW_SUM_TOLERANCE  # what storage explains, and a little more
    distance = sim.jensen_shannon_distance(np.stack([1 - 0.99 * short[:1], 1 - short[1:]]), np.ones((2, 1)))
    assert distance[0] == 0 < distance[1]
    np.testing.assert_allclose(sim.jensen_shannon_distance(rows, rows * 1.0009), 0, atol=1e-6)  # of equal shares


def test_pattern_sums_measure_only_the_masked_queries(rng):
    a, b = rng.dirichlet(np.ones(4), size=(2, 3, 4, 2))
    mask = np.array([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]], dtype=bool)
    sums = sim.pattern_sums(a, b, mask)
    expected = sim.jensen_shannon_distance(a[mask], b[mask]).mean(0)
    np.testing.assert_allclose(sim.pattern_distance(total(sums)), expected)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(sim.pattern_cosine(total(sums)), cosine[mask].mean(0))


def choices(rng: np.random.Generator, shape: tuple[int, int], top_k: int, popularity: np.ndarray) -> np.ndarray:
    """Chosen experts by perturbed log-popularity: skewed towards the popular ones."""
    noise = rng.gumbel(size=(*shape, len(popularity)))
    return np.argsort(-(np.log(popularity) + noise), axis=-1)[..., :top_k]


def equal_weights(experts: np.ndarray) -> np.ndarray:
    return np.full(experts.shape, 1 / experts.shape[-1])


def test_overlap_jaccard_and_weighted_sum_of_two_worked_choices():
    first, second = np.array([[4, 0, 7]]), np.array([[7, 1, 4]])
    weights_first, weights_second = np.array([[0.5, 0.3, 0.2]]), np.array([[0.6, 0.3, 0.1]])
    assert sim.expert_overlap(first, second).tolist() == [2.0]
    sums = sim.overlap_sums(first[None], weights_first[None], second[None], weights_second[None], all_tokens(1, 1), 8)
    assert sim.mean_jaccard(total(sums)) == pytest.approx(2 / 4)
    assert sim.mean_weighted_overlap(total(sums)) == pytest.approx(0.1 + 0.2)


def test_uniform_null_is_the_hypergeometric_mean():
    assert sim.uniform_overlap(8, 288) == pytest.approx(hypergeom(288, 8, 8).mean())


def test_skewed_popularity_alone_exceeds_the_uniform_null_and_the_popularity_null_says_so(rng):
    popularity = 1.0 / np.arange(1, 33) ** 1.2
    first, second = (choices(rng, (40, 100), 4, popularity) for _ in range(2))
    sums = sim.overlap_sums(
        first, equal_weights(first), second, equal_weights(second), all_tokens(40, 100), len(popularity)
    )
    observed = sim.mean_overlap(total(sums))
    assert observed > 2 * sim.uniform_overlap(4, 32)
    assert observed == pytest.approx(sim.popularity_overlap(total(sums)), abs=0.05)
    assert observed == pytest.approx(sim.shuffled_overlap(total(sums)), abs=0.05)
    assert abs(sim.shuffled_overlap_z(total(sums))) < 4


def test_mean_and_variance_of_the_shuffle_are_those_of_all_permutations(rng):
    """Exactly: every permutation of two samples of 5 and 4 tokens, shuffled independently."""
    first, second = (choices(rng, (2, 5), 2, np.array([8.0, 4, 2, 1, 1])) for _ in range(2))
    mask = np.arange(5) < np.array([[5], [4]])
    sums = total(sim.overlap_sums(first, equal_weights(first), second, equal_weights(second), mask, 5))
    shared = [
        [sum(len({*a} & {*b}) for a, b in zip(first[n, :length].tolist(), order, strict=True))
         for order in permutations(second[n, :length].tolist())]
        for n, length in ((0, 5), (1, 4))
    ]  # fmt: skip
    every = np.array([one + other for one, other in product(*shared)], np.float64)
    assert sums["shuffled_overlap"] == pytest.approx(every.mean(), rel=1e-12)
    assert sums["shuffled_variance"] == pytest.approx(every.var(), rel=1e-12)
    expected = (sums["overlap"] - every.mean()) / every.std()
    assert sim.shuffled_overlap_z(sums) == pytest.approx(expected, rel=1e-12)


def test_kept_choices_give_full_overlap_and_a_large_z(rng):
    first = choices(rng, (4, 50), 2, np.ones(8))
    weights = equal_weights(first)
    sums = sim.overlap_sums(first, weights, first[..., ::-1], weights, all_tokens(4, 50), 8)
    assert (sim.mean_overlap(total(sums)), sim.mean_jaccard(total(sums))) == (2.0, 1.0)
    assert sim.mean_weighted_overlap(total(sums)) == pytest.approx(1.0)
    assert sim.shuffled_overlap_z(total(sums)) > 20


def test_one_token_a_sample_has_no_shuffle_and_no_z(rng):
    first = choices(rng, (4, 1), 2, np.ones(8))
    sums = sim.overlap_sums(first, equal_weights(first), first, equal_weights(first), all_tokens(4, 1), 8)
    assert np.isnan(sim.shuffled_overlap_z(total(sums)))


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="one shape that begins with the mask's"):
        sim.cosine_sums(np.ones((2, 3, 4)), np.ones((2, 3, 5)), all_tokens(2, 3))
    experts, weights = np.array([[[0, 8]]]), np.ones((1, 1, 2))
    with pytest.raises(UserError, match=r"chosen experts must be 0 to 7; got 8: record it again"):
        sim.overlap_sums(experts, weights, experts - 1, weights, all_tokens(1, 1), 8)
    with pytest.raises(UserError, match=r"chosen experts must be 0 to 8; got -1: record it again"):
        sim.overlap_sums(experts, weights, experts - 1, weights, all_tokens(1, 1), 9)
