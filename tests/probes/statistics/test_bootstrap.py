"""The bootstrap's law, and how often its interval covers the truth."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom, norm
from scipy.stats import t as student

from probes.statistics import bootstrap
from probes.statistics.arrays import ratio
from probes.statistics.bootstrap import FEWEST, NUM_RESAMPLES, binomial_interval, interval, num_groups, weights

Planted = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""A draw: sums and counts of each sample, and the document it is of. The true ratio is 0.5."""
DRAWS = 400


def test_weights_belong_to_the_document_and_are_poisson() -> None:
    ids = np.arange(300)
    weight_RB = weights(0, ids)
    np.testing.assert_array_equal(weight_RB[:, 17:19], weights(0, np.array([17, 18])))
    np.testing.assert_array_equal(weights(0, np.array([17, 18, 17]))[:, 2], weight_RB[:, 17])
    assert not np.array_equal(weight_RB, weights(1, ids))
    assert (weight_RB[0] == 1).all()
    draws = weight_RB[1:]
    assert draws.mean() == pytest.approx(1, abs=0.02)
    assert draws.var() == pytest.approx(1, abs=0.03)
    # Neither one document's resamples nor one resample's documents move together.
    assert draws.mean(0).var() == pytest.approx(1 / NUM_RESAMPLES, rel=0.3)
    assert draws.mean(1).var() == pytest.approx(1 / 300, rel=0.3)


def test_any_number_names_a_document() -> None:
    numbers = np.array([0, -1, 2**63 - 1, -(2**63)])
    assert len({tuple(column) for column in weights(0, numbers).T.tolist()}) == 4


# Coverage


def independent(num: int) -> Planted:
    """Samples of 5 to 14 tokens with a mean of their own, each a document."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        length_N = generator.integers(5, 15, num)
        return (0.5 + generator.standard_normal(num)) * length_N, length_N, np.arange(num)

    return draw


def skewed(num: int) -> Planted:
    """Shares near 0, as masses of attention are."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return 2.5 * generator.beta(1, 4, num), np.ones(num), np.arange(num)

    return draw


def clustered(num: int, *, know: bool = True) -> Planted:
    """Documents of 1 to 8 windows, which have much in common; without `know`, each window passes for a document."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        document_N = np.repeat(np.arange(num), generator.integers(1, 9, num))
        value_N = 0.5 + generator.standard_normal(num)[document_N] + 0.5 * generator.standard_normal(len(document_N))
        return value_N, np.ones(len(document_N)), document_N if know else np.arange(len(document_N))

    return draw


def covered(planted: Planted) -> int:
    """Of DRAWS planted draws, how many intervals hold the truth."""
    count = 0
    for trial in range(DRAWS):
        top_N, bottom_N, document_N = planted(np.random.default_rng(trial))
        weight_RN = weights(trial, document_N)
        found = interval(ratio(weight_RN @ top_N, weight_RN @ bottom_N), len(np.unique(document_N)))
        count += found.low <= 0.5 <= found.high
    return count


LEAST, MOST = (int(limit) for limit in binom.interval(0.999, DRAWS, 0.95))


@pytest.mark.parametrize(
    "planted",
    [independent(8), independent(20), independent(150), skewed(8), skewed(20), clustered(8), clustered(20)],
    ids=["8", "20", "150", "8 skewed", "20 skewed", "8 clusters", "20 clusters"],
)
def test_the_interval_covers_the_truth_in_95_of_100_draws(planted: Planted) -> None:
    assert LEAST <= covered(planted) <= MOST


@pytest.mark.parametrize("num", [2, 3, FEWEST - 1])
def test_few_documents_have_wide_intervals_that_cover(num: int) -> None:
    assert LEAST <= covered(independent(num)) <= MOST


def test_a_90_percent_interval_does_not_pass_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "LEVEL", 0.90)
    assert [covered(independent(num)) < LEAST for num in (8, 20, 60)] == [True] * 3


def test_windows_that_pass_for_documents_make_it_too_narrow() -> None:
    assert covered(clustered(20, know=False)) < LEAST


# Ends


def test_a_recentred_interval_surrounds_a_maximum() -> None:
    load_N8 = np.random.default_rng(2).multinomial(20, np.full(8, 1 / 8), 30)
    load_R8 = weights(0, np.arange(30)) @ load_N8
    largest_R = load_R8.max(-1) / load_R8.sum(-1)
    plain, shifted = interval(largest_R, 30), interval(largest_R, 30, recentred=True)
    assert shifted.low < shifted.value < shifted.high
    bias = largest_R[1:].mean() - largest_R[0]
    assert bias > 0
    assert plain.low - shifted.low == pytest.approx(bias)
    assert plain.high - shifted.high == pytest.approx(bias)


def test_resamples_that_define_nothing_are_left_out_and_one_document_has_no_interval() -> None:
    value_R = np.array([0.5, np.nan, 0.4, 0.6, np.nan, 0.5])
    assert 0.4 <= interval(value_R, 9).low <= interval(value_R, 9).high <= 0.6
    assert np.isnan(interval(value_R, 1)[1:3]).all()
    assert np.isnan(interval(np.full(5, np.nan), 9).low)


def test_ends_are_the_quantiles_that_the_page_names() -> None:
    """Hesterberg's: of 5 documents at Phi(-+ sqrt(5/4) t), t the 97.5% point of Student's law with 4 degrees."""
    draws_R = np.random.default_rng(0).standard_normal(400)
    found = interval(np.array([0.0, *draws_R]), 5)
    outside = norm.cdf(-np.sqrt(5 / 4) * student.ppf(0.975, 4))
    assert found[1:3] == pytest.approx(np.quantile(draws_R, (outside, 1 - outside)))
    assert binomial_interval(1.0, 1)[:3] == pytest.approx((1.0, 0.025, 1.0)), "one document that says yes"


def test_many_numbers_are_counted_in_fewer_groups_of_documents() -> None:
    assert num_groups(6 * 8**2) == 64
    assert num_groups(6 * 288**2) * 6 * 288**2 <= 2**22
    assert num_groups(24 * 288**2) == 8
