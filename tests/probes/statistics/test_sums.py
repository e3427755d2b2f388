"""Sums stream, merge and carry their resamples, whatever the batches; shapes may grow, samples may not come twice."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch
from probes.statistics.bootstrap import NUM_RESAMPLES, weights
from probes.statistics.grid import Grid
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Distinct, Reduced, Sums, Totals
from smelt_interp.architecture import Loop
from smelt_interp.errors import UserError
from tests.support.planted import LOOPED, planted_batch, split_batch, text_samples

pytestmark = pytest.mark.portable

DOCUMENTS = np.array([0, 0, 1, 2, 2, 2, 3])
"""Of seven samples."""
X_N3 = np.random.default_rng(0).standard_normal((7, 3))


def lay_out(batch: Batch, options: object, loops: tuple[Loop, ...]) -> Grid:
    return Grid(architecture=batch.architecture, loops=loops, steps=(1, 2, 3, 4))


def reduce(batch: Batch, grid: Grid, options: object) -> Reduced:
    x_B3 = X_N3[batch.sample_ids]
    longest = int(batch.sample_ids.max()) + 1
    return Reduced(
        by_sample={"x": x_B3, "grows": np.ones((len(x_B3), longest))},
        counts={f"odd {sample % 2}": (batch.sample_ids % 2 == sample % 2) for sample in batch.sample_ids},
        whole={"all": x_B3.sum(0), "positions": np.ones(longest)},
        largest={"most": x_B3.max(0)},
        defined={"above": x_B3[:, 0] > 0},
    )


def quantities(totals: Totals[Grid, object]) -> list[Quantity]:
    x_RL = totals.sums["x"][:, [0, 1, 0, 1]]
    return [Quantity(name="x", value_RLH=x_RL[..., None], places=totals.layout.places(), n=totals.n["above"])]


def sums() -> Sums[Grid, object]:
    return Sums(LOOPED.architecture(), None, lay_out, reduce, quantities)


def batch() -> Batch:
    return planted_batch(LOOPED, replace(text_samples(7), document_N=DOCUMENTS), {})


def added(batches: list[Batch]) -> Sums[Grid, object]:
    found = sums()
    for each in batches:
        found.add(each)
    return found


def check(found: Sums[Grid, object]) -> None:
    totals = found.totals()
    weight_RN = weights(0, DOCUMENTS)
    np.testing.assert_allclose(totals.sums["x"], weight_RN @ X_N3, atol=1e-12)
    np.testing.assert_allclose(totals.sums["odd 1"], weight_RN[:, 1::2].sum(1))
    np.testing.assert_allclose(totals.whole["all"], X_N3.sum(0), atol=1e-12)
    np.testing.assert_allclose(totals.largest["most"], X_N3.max(0))
    assert totals.sums["grows"].shape == (1 + NUM_RESAMPLES, 7)
    assert totals.n == {"above": len(set(DOCUMENTS[X_N3[:, 0] > 0].tolist()))}
    assert (found.samples, found.documents, found.tokens) == (7, 4, 7 * 12)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_sums_do_not_depend_on_batches(size: int) -> None:
    check(added(list(split_batch(batch(), size))))


def test_parts_that_are_merged_are_the_whole_in_any_order() -> None:
    first, second, third = split_batch(batch(), 3)
    left, right = added([third]), added([first])
    left.merge(added([second]))
    left.merge(sums())  # a rank without samples
    right.merge(left)
    check(right)


def test_an_array_may_grow_and_a_name_may_come_late() -> None:
    totals = added(list(split_batch(batch(), 1))).totals()
    np.testing.assert_allclose(totals.sums["grows"][0], [7, 6, 5, 4, 3, 2, 1])
    np.testing.assert_allclose(totals.whole["positions"], [7, 6, 5, 4, 3, 2, 1])


def test_numbers_by_sample_are_those_of_each_sample_alone_and_are_kept_on_request_alone() -> None:
    found = sums()
    found.keep_samples = True
    for each in reversed(list(split_batch(batch(), 3))):
        found.add(each)
    frame = found.by_sample()
    assert frame is not None
    assert frame["sample"].tolist() == list(range(7))
    assert frame["document"].tolist() == DOCUMENTS.tolist()
    np.testing.assert_allclose(frame["x, looped 2-3, visit 1"], X_N3[:, :2].mean(1))
    assert added([batch()]).by_sample() is None


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(UserError, match="samples to measure must be at least one; got 0"):
        sums().totals()
    twice = added([batch(), batch()])
    with pytest.raises(UserError, match="sample ids must be distinct; got 7 of them twice"):
        twice.totals()
    other = Sums(LOOPED.architecture(), "other options", lay_out, reduce, quantities)
    with pytest.raises(UserError, match="sums to merge must be of one network, one choice of options and one layout"):
        sums().merge(other)


def test_different_numbers_are_counted_in_bounded_memory() -> None:
    found, everything = Distinct(), Distinct()
    generator = np.random.default_rng(0)
    parts: list[NDArray[np.int64]] = [generator.integers(0, 500, 300) for _ in range(200)]
    for part in parts:
        found.add(part)
        assert sum(map(len, found._new)) <= 4096 + 500 + 300
    everything.merge(found)
    everything.merge(found)
    assert len(everything) == len(found) == len(np.unique(np.concatenate(parts)))
    assert (found.added, everything.added) == (60_000, 120_000)
