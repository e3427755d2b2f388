"""Residual updates: planted ratios, cosines and variances, nulls against simulations, and what must not matter."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch
from probes import residual_updates as probe
from probes.residual_updates import ATTENTION, ENTERING, EXPERTS
from probes.running.probe import Result
from probes.statistics.arrays import is_token
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

DEEP = replace(LOOPED, num_layers=6, loop_start=2, loop_stop=4)
"""Steps 0 1 | 2 3 | 4 5 | 6 7: two layers in each part, so that prelude and coda have consecutive layers."""


def random_batch(
    num: int = 6, length: int = 12, *, config: ModelConfig = DEEP, padding: int = 3, seed: int = 0
) -> Batch:
    samples = text_samples(num, length, padding=padding, seed=seed)
    return planted_batch(config, samples, random_sites(config, samples, probe.needs(config.architecture()), seed=seed))


def with_sites(batch: Batch, changed: dict[tuple[int, str], NDArray[np.generic]]) -> Batch:
    return replace(batch, sites={**batch.sites, **changed})


def turned(x: NDArray[np.generic], ratio: float, cosine: float) -> NDArray[np.float64]:
    """Vectors `ratio` times as long, at this cosine to each of x's. Linear in x, so it holds for sums as well."""
    x = np.asarray(x, np.float64)
    across = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)  # x turned by 90 degrees in each plane
    return ratio * (cosine * x + np.sqrt(1 - cosine**2) * across)


def planted_updates(ratio: float = 1.7, cosine: float = 0.56) -> Batch:
    """Visit 2 adds what visit 1 added, longer and turned."""
    batch = random_batch()
    return with_sites(
        batch,
        {
            (late, site): turned(batch.sites[early, site], ratio, cosine)
            for early, late in ((2, 4), (3, 5))
            for site in (ATTENTION, EXPERTS)
        },
    )


def find(result: Result, quantity: str, level: str = "headline", **where: object) -> dict[str, object]:
    return pick(result.rows(), quantity=quantity, level=level, **where)


def steps(result: Result, quantity: str, update: str | None = None) -> list[object]:
    """A quantity at every step."""
    return [row["value"] for row in result.rows()
            if (row["quantity"], row["level"], row["update"]) == (quantity, "layer", update)]  # fmt: skip


def number(row: dict[str, object], name: str = "value") -> float:
    found = row[name]
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize("update", ["attention", "experts", "layer", "visit"])
def test_planted_ratio_and_cosine_come_back(update: str, tmp_path: Path) -> None:
    batch = planted_updates()
    capture = planted_capture(tmp_path / "planted.h5", batch)
    for batches, tolerance in ((iter([batch]), 1e-6), (capture.batches(probe.needs(DEEP.architecture()), 4), 5e-4)):
        result = measure(probe, batches)
        for quantity, expected in (("norm ratio, median", 1.7), ("norm ratio, RMS", 1.7), ("cosine", 0.56)):
            found = find(result, quantity, update=update)
            assert number(found) == pytest.approx(expected, abs=tolerance)
            assert number(found, "low") == pytest.approx(expected, abs=2 * tolerance)


def test_numbers_are_those_of_the_definitions() -> None:
    batch = random_batch(40, 30)
    result = measure(probe, [batch])
    token_BT = is_token(batch.samples)
    sites_of = {"attention": (ATTENTION,), "layer": (ATTENTION, EXPERTS), "visit": (ATTENTION, EXPERTS)}
    for update, early, late in (("attention", (2,), (4,)), ("layer", (3,), (5,)), ("visit", (2, 3), (4, 5))):
        a_ND, b_ND = (
            sum(np.asarray(batch.sites[s, site], np.float64)[token_BT] for s in steps for site in sites_of[update])
            for steps in (early, late)
        )
        norm_a_N, norm_b_N = np.linalg.norm(a_ND, axis=-1), np.linalg.norm(b_ND, axis=-1)
        row = partial(find, result, level="headline" if update == "visit" else "layer", update=update,
                      layers="looped 3-4" if update == "visit" else str(early[0] + 1), visit="1 vs 2")  # fmt: skip
        expected = np.median(norm_b_N / norm_a_N)
        assert row("norm ratio, median")["value"] == pytest.approx(expected, rel=2e-3)
        rms = np.sqrt((norm_b_N**2).mean() / (norm_a_N**2).mean())
        assert row("norm ratio, RMS")["value"] == pytest.approx(rms, abs=1e-9)
        cosine_N = (a_ND * b_ND).sum(-1) / norm_a_N / norm_b_N
        assert row("cosine")["value"] == pytest.approx(cosine_N.mean(), abs=1e-9)


def test_the_headline_is_the_mean_over_looped_layers() -> None:
    result = measure(probe, [random_batch()])
    for quantity in probe.QUANTITIES:
        by_layer = [find(result, quantity, "layer", update="experts", layers=name) for name in ("3", "4")]
        headline = find(result, quantity, update="experts", visit="1 vs 2")
        assert headline["layers"] == "looped 3-4"
        assert number(headline) == pytest.approx(np.mean([number(row) for row in by_layer]), abs=1e-12)


def test_the_shuffled_nulls_are_those_of_shuffles() -> None:
    batch = random_batch(6, 24)
    # Directions belong to the sample and survive a shuffle within it. Lengths belong to the token: what visit 1 made
    # long visit 2 makes short, a ratio of 4 for most tokens, and of 1 when shuffled.
    long_BT1 = np.random.default_rng(1).random((6, 24, 1)) < 0.4
    offset_B1D = 20 * np.random.default_rng(2).standard_normal((6, 1, DEEP.width))
    early_BTD = np.where(long_BT1, 4, 1) * (batch.sites[2, ATTENTION] + offset_B1D)
    late_BTD = np.where(long_BT1, 1, 4) * (batch.sites[4, ATTENTION] + offset_B1D)
    batch = with_sites(batch, {(2, ATTENTION): early_BTD, (4, ATTENTION): late_BTD})
    result = measure(probe, [batch], probe.Options(updates=("attention",), shuffles=100))
    generator = np.random.default_rng(3)
    ratios, cosines = [], []
    for _ in range(200):
        for b, length in enumerate(batch.samples.length_N):
            a_TD, b_TD = early_BTD[b, :length], late_BTD[b, generator.permutation(length)]
            norm_a_T, norm_b_T = np.linalg.norm(a_TD, axis=-1), np.linalg.norm(b_TD, axis=-1)
            ratios.append(norm_b_T / norm_a_T)
            cosines.append((a_TD * b_TD).sum(-1) / norm_a_T / norm_b_T)
    found = find(result, "norm ratio, median", "layer", layers="3")
    assert number(found, "null_shuffled") == pytest.approx(np.median(np.concatenate(ratios)), rel=0.03)
    assert number(found) > 3 * number(found, "null_shuffled")
    cosine = find(result, "cosine", "layer", layers="3")
    assert number(cosine, "null_shuffled") == pytest.approx(np.concatenate(cosines).mean(), abs=0.01)
    assert number(cosine, "null_shuffled") > 0.5
    assert find(result, "norm ratio, RMS", "layer", layers="3")["null_shuffled"] is None


def test_the_unlooped_null_is_that_of_consecutive_layers_that_run_once() -> None:
    batch = random_batch()
    batch = with_sites(
        batch,
        {
            (1, ATTENTION): turned(batch.sites[0, ATTENTION], 3.0, 0.2),
            (7, ATTENTION): turned(batch.sites[6, ATTENTION], 5.0, 0.4),
        },
    )
    result = measure(probe, [batch], probe.Options(updates=("attention", "visit")))
    expected = {"norm ratio, median": 4.0, "norm ratio, RMS": 4.0, "cosine": 0.3}
    for quantity, null in expected.items():
        assert number(find(result, quantity, update="attention"), "null_unlooped") == pytest.approx(null, abs=1e-6)
        apart = find(result, f"{quantity}, next layer", "layer", update="attention", layers="unlooped")
        assert number(apart) == pytest.approx(null, abs=1e-6)
        assert find(result, quantity, update="visit")["null_unlooped"] is None
    # One layer before the loop and one after it: nothing is consecutive there.
    shallow = measure(probe, [random_batch(config=LOOPED)])
    assert find(shallow, "cosine", update="layer")["null_unlooped"] is None


def test_the_loop_factor_is_divided_out_of_looped_updates_alone() -> None:
    batch = random_batch()
    result = measure(probe, [batch])
    token_BT = is_token(batch.samples)
    layer_ND = (np.asarray(batch.sites[4, ATTENTION], np.float64) + batch.sites[4, EXPERTS])[token_BT]
    expected = np.sqrt((layer_ND**2).sum(-1).mean())
    as_added = find(result, "update norm", "layer", update="layer", layers="3", visit=2)
    divided = find(result, "undamped norm", "layer", update="layer", layers="3", visit=2)
    assert number(as_added) == pytest.approx(expected, abs=1e-9)
    assert number(divided) == pytest.approx(expected / DEEP.loop_scale, abs=1e-9)
    assert "loop factor 0.5 does not cancel here" in str(as_added["note"])
    for part in ("prelude", "coda"):
        plain = find(result, f"update norm, {part}")
        assert number(plain) == number(find(result, f"undamped norm, {part}"))
        assert plain["note"] == ""
    by_step = [find(result, "update norm", "layer", update="layer", layers=name)["value"] for name in ("1", "2")]
    assert find(result, "update norm, prelude")["value"] == pytest.approx(np.mean(by_step))
    undamped = np.divide(steps(result, "undamped norm", "layer"), steps(result, "update norm", "layer"))
    np.testing.assert_allclose(undamped, [1, 1, 2, 2, 2, 2, 1, 1])


def consistent_batch(config: ModelConfig) -> Batch:
    """The stream that enters a step is what left the step before."""
    batch = random_batch(config=config)
    entering: dict[tuple[int, str], NDArray[np.generic]] = {}
    stream_BTD = np.asarray(batch.sites[0, ENTERING], np.float64)
    for step in range(len(batch.architecture.steps)):
        entering[step, ENTERING] = stream_BTD
        stream_BTD = stream_BTD + batch.sites[step, ATTENTION] + batch.sites[step, EXPERTS]
    return with_sites(batch, entering)


def test_variance_along_the_steps_and_at_scale_1() -> None:
    batch = consistent_batch(DEEP)
    result = measure(probe, [batch])
    token_BT = is_token(batch.samples)
    stream_ND = np.asarray(batch.sites[0, ENTERING], np.float64)[token_BT]
    undamped_ND = stream_ND
    variance_L, undamped_L = (steps(result, f"{name} variance") for name in ("stream", "undamped"))
    assert find(result, "stream variance, entering")["value"] == pytest.approx(stream_ND.var(-1).mean(), abs=1e-9)
    for step in range(8):
        added_ND = (np.asarray(batch.sites[step, ATTENTION], np.float64) + batch.sites[step, EXPERTS])[token_BT]
        stream_ND = stream_ND + added_ND
        undamped_ND = undamped_ND + added_ND / (0.5 if 2 <= step < 6 else 1)
        assert variance_L[step] == pytest.approx(stream_ND.var(-1).mean(), abs=1e-9)
        assert undamped_L[step] == pytest.approx(undamped_ND.var(-1).mean(), abs=1e-9)
    assert find(result, "stream variance, loop", visit=2)["value"] == pytest.approx(variance_L[5])
    scale_1 = find(result, "undamped variance, coda")
    assert scale_1["value"] == pytest.approx(undamped_L[7])
    assert "not a run at scale 1" in str(scale_1["note"])


def test_scale_1_changes_nothing_where_the_loop_scale_is_1() -> None:
    result = measure(probe, [consistent_batch(replace(DEEP, loop_scale=1.0))])
    np.testing.assert_allclose(steps(result, "undamped variance"), steps(result, "stream variance"), atol=1e-12)


def test_steps_that_were_not_recorded_leave_gaps_that_are_marked() -> None:
    batch = random_batch()
    # Without the prelude nothing can be summed up from the start; without layer 4 there is no whole visit.
    sites = {key: x for key, x in batch.sites.items() if key[0] in (2, 4, 6, 7)}
    result = measure(probe, [replace(batch, sites=sites)])
    assert find(result, "cosine", update="visit")["note"] == "needs every looped layer recorded"
    assert find(result, "cosine", update="layer")["layers"] == "looped 3", "what is averaged"
    assert np.isfinite(number(find(result, "cosine", update="layer")))
    gap = find(result, "undamped variance, coda")
    assert (gap["value"], gap["note"]) == (None, "needs every step from the first recorded")
    assert number(find(result, "stream variance, coda")) > 0


def test_padding_never_counts() -> None:
    batch = random_batch()
    padding_BT = ~is_token(batch.samples)
    spoilt = {key: np.array(x) for key, x in batch.sites.items()}
    for x in spoilt.values():
        x[padding_BT] = np.nan
    spoilt_rows = measure(probe, [with_sites(batch, spoilt)]).rows()
    assert same_numbers(measure(probe, [batch]).rows(), spoilt_rows)


def test_a_baseline_reports_its_stream_and_marks_the_rest() -> None:
    batch = consistent_batch(replace(BASELINE, num_layers=6, loop_start=2, loop_stop=4))
    result = measure(probe, [batch])
    for quantity in probe.QUANTITIES:
        for update in ("attention", "experts", "layer", "visit"):
            found = find(result, quantity, update=update, visit="1 vs 2")
            assert found["value"] is None
            assert str(found["note"]).startswith("needs two visits")
        assert np.isfinite(number(find(result, f"{quantity}, next layer", update="layer")))
    assert len(steps(result, "cosine, next layer", "layer")) == 5  # every layer of six against the next
    loop = find(result, "stream variance, loop")
    assert (loop["layers"], loop["value"]) == ("middle 2-5", steps(result, "stream variance")[4])
    np.testing.assert_allclose(steps(result, "undamped variance"), steps(result, "stream variance"), atol=1e-12)
    assert len(result.figures["updates"].data) == 5


def test_three_visits_give_every_pair() -> None:
    batch = random_batch(config=replace(DEEP, num_visits=3))
    third = {(6, site): turned(batch.sites[2, site], 0.5, -0.8) for site in (ATTENTION, EXPERTS)}
    result = measure(probe, [with_sites(batch, third)], probe.Options(compare=(0, 1, 2)))
    visits = {row["visit"] for row in result.rows() if row["quantity"] == "cosine"}
    assert visits == {"1 vs 2", "1 vs 3", "2 vs 3"}
    found = find(result, "cosine", "layer", update="layer", layers="3", visit="1 vs 3")
    assert number(found) == pytest.approx(-0.8, abs=1e-6)
    assert len(result.figures["updates"].data) == 3 * 3 * 2 * 2 + 5


def test_a_token_to_which_nothing_was_added_has_no_ratio() -> None:
    batch = planted_updates(2.0, 0.5)
    spared = {}
    for step in (2, 4):
        x_BTD = np.array(batch.sites[step, ATTENTION])
        x_BTD[:, 0] = 0 if step == 2 else 100
        spared[step, ATTENTION] = x_BTD
    result = measure(probe, [with_sites(batch, spared)], probe.Options(updates=("attention",)))
    assert number(find(result, "norm ratio, median", "layer", layers="3")) == pytest.approx(2.0, abs=1e-6)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="shuffles must be at least 1; got 0"):
        probe.Options(shuffles=0)
    with pytest.raises(UserError, match="updates must be one or more different kinds; got none"):
        probe.Options(updates=())
    with pytest.raises(UserError, match="updates must be one or more different kinds; got layer layer"):
        probe.Options(updates=("layer", "layer"))
    with pytest.raises(UserError, match="visits must be two or more different numbers from 1; got 2 2"):
        probe.Options(compare=(1, 1))


def test_nested_loops_of_a_dense_network_are_parts_of_their_own() -> None:
    samples = text_samples()
    batch = planted_batch(NESTED, samples, random_sites(NESTED, samples, probe.needs(NESTED)))
    result = measure(probe, [batch])
    norms = [(row["quantity"], row["layers"], row["visit"]) for row in result.rows()
             if row["level"] == "headline" and str(row["quantity"]).startswith("update norm")]  # fmt: skip
    assert norms == [
        ("update norm, loop", "looped 1, 3", 1), ("update norm, loop", "looped 2", 1),
        ("update norm, loop", "looped 2", 2), ("update norm, loop", "looped 1, 3", 2),
        ("update norm, loop", "looped 2", 3), ("update norm, loop", "looped 2", 4),
    ]  # fmt: skip
    assert {row["layers"] for row in result.rows() if row["quantity"] == "cosine" and row["update"] == "visit"} == {
        "looped 1, 3", "looped 2"
    }  # fmt: skip


def test_infinite_updates_are_told_in_a_line() -> None:
    batch = random_batch()
    endless = np.full_like(batch.sites[2, ATTENTION], np.inf)
    with pytest.raises(
        UserError, match=r"^blocks.2.hook_attn_out must hold finite numbers; got inf among samples 0 to 5"
    ):
        measure(probe, [with_sites(batch, {(2, ATTENTION): endless})])
