"""Projections and patterns across visits: planted answers, nulls against simulations, and what must not matter."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch, take
from probes import projection_similarity as probe
from probes.running.probe import Result
from probes.statistics.arrays import is_token
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from tests.support.answers import measure
from tests.support.planted import (
    BASELINE,
    LOOPED,
    NESTED,
    pick,
    planted_batch,
    random_sites,
    same_numbers,
    start_pattern,
    text_samples,
)
from tests.support.planted_captures import planted_capture

VISITS = ((1, 3), (2, 4))
"""Step indices of LOOPED's two looped layers on both visits."""


def with_cosine(a: NDArray[np.generic], cosine: float, seed: int) -> NDArray[np.float64]:
    """Vectors of other lengths with exactly this cosine to each of a's."""
    a = np.asarray(a, np.float64)
    generator = np.random.default_rng(seed)
    other = generator.standard_normal(a.shape)
    other -= a * (a * other).sum(-1, keepdims=True) / (a * a).sum(-1, keepdims=True)
    unit_a, unit_other = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, other))
    length = generator.uniform(0.5, 2, (*a.shape[:-1], 1))
    return length * (cosine * unit_a + np.sqrt(1 - cosine**2) * unit_other)


def random_batch(num: int = 8, length: int = 12, padding: int = 3, seed: int = 0) -> Batch:
    samples = text_samples(num, length, padding=padding, seed=seed)
    return planted_batch(LOOPED, samples, random_sites(LOOPED, samples, probe.needs(LOOPED.architecture()), seed=seed))


def with_sites(batch: Batch, changed: dict[tuple[int, str], NDArray[np.generic]]) -> Batch:
    return replace(batch, sites={**batch.sites, **changed})


def planted_cosines() -> tuple[Batch, dict[str, float]]:
    """A cosine of its own for each projection, the same in every layer and head; start mass 0.6 and then 0.1."""
    batch = random_batch()
    planted = {"attn.hook_q": 0.9, "attn.hook_k": 0.5, "attn.hook_v": -0.3}
    sites: dict[tuple[int, str], NDArray[np.generic]] = {
        (late, suffix): with_cosine(batch.sites[early, suffix], cosine, seed=late)
        for suffix, cosine in planted.items()
        for early, late in VISITS
    }
    for early, late in VISITS:
        for step, mass in ((early, 0.6), (late, 0.1)):
            sites[step, "attn.hook_pattern"] = start_pattern(batch.samples, LOOPED.num_heads, mass)
    return with_sites(batch, sites), {probe_name[-1].upper(): cosine for probe_name, cosine in planted.items()}


def headline(result: Result, quantity: str) -> dict[str, object]:
    return pick(result.rows(), level="headline", quantity=quantity)


def by_head(result: Result, quantity: str, column: str = "value") -> NDArray[np.float64]:
    """A column of the rows of single heads. -> (pairs of visits, heads)"""
    rows = [row for row in result.rows() if row["quantity"] == quantity and row["level"] == "head"]
    pairs = dict.fromkeys((row["layers"], row["visit"]) for row in rows)
    return np.array([[row[column] for row in rows if (row["layers"], row["visit"]) == pair] for pair in pairs], float)


def test_planted_cosines_come_back_for_every_head() -> None:
    batch, planted = planted_cosines()
    result = measure(probe, [batch])
    for name, cosine in planted.items():
        np.testing.assert_allclose(by_head(result, f"{name} cosine, raw"), cosine, atol=1e-6)
    assert by_head(result, "Q cosine, raw").shape == (2, LOOPED.num_heads)
    assert by_head(result, "V cosine, raw").shape == (2, LOOPED.num_kv_heads)


def test_planted_pattern_distance_is_that_of_its_two_part_distributions() -> None:
    # Both rows spread what is not on the start evenly: the rows differ as (0.6, 0.4) and (0.1, 0.9) do, except the
    # query next to the start, whose other key is one key: the same two parts.
    middle = (np.array([0.6, 0.4]) + np.array([0.1, 0.9])) / 2
    divergence = sum((p * np.log2(p / middle)).sum() for p in (np.array([0.6, 0.4]), np.array([0.1, 0.9]))) / 2
    batch, _ = planted_cosines()
    result = measure(probe, [batch])
    np.testing.assert_allclose(by_head(result, "pattern distance"), np.sqrt(divergence), atol=1e-6)
    away_N = np.concatenate([np.arange(1, length) for length in batch.samples.length_N])
    norm_a, norm_b = (np.sqrt(mass**2 + (1 - mass) ** 2 / away_N) for mass in (0.6, 0.1))
    expected = ((0.6 * 0.1 + 0.4 * 0.9 / away_N) / (norm_a * norm_b)).mean()
    np.testing.assert_allclose(by_head(result, "pattern cosine"), expected, atol=1e-6)


def test_a_float16_capture_gives_the_planted_answers(tmp_path: Path) -> None:
    batch, planted = planted_cosines()
    capture = planted_capture(tmp_path / "planted.h5", batch)
    result = measure(probe, capture.batches(probe.needs(LOOPED.architecture()), 3))
    for name, cosine in planted.items():
        assert headline(result, f"{name} cosine, raw")["value"] == pytest.approx(cosine, abs=5e-4)
    memory = measure(probe, [batch])
    for quantity in probe.QUANTITIES:
        np.testing.assert_allclose(by_head(result, quantity), by_head(memory, quantity), atol=5e-4)


def test_centred_cosine_pools_over_all_tokens() -> None:
    batch = random_batch()
    batch = with_sites(batch, {key: x + 2 for key, x in batch.sites.items() if key[1] == "attn.hook_k"})
    result = measure(probe, [batch])
    token_BT = is_token(batch.samples)
    for index, steps in enumerate(VISITS):
        for head in range(LOOPED.num_kv_heads):
            a_NC, b_NC = (np.asarray(batch.sites[s, "attn.hook_k"], np.float64)[:, :, head][token_BT] for s in steps)
            a_NC, b_NC = a_NC - a_NC.mean(0), b_NC - b_NC.mean(0)
            expected = (a_NC * b_NC).sum() / np.sqrt((a_NC**2).sum() * (b_NC**2).sum())
            assert by_head(result, "K cosine, centred")[index, head] == pytest.approx(expected, abs=1e-9)
    # A common offset alone makes independent vectors alike; centring and the null both show it.
    assert headline(result, "K cosine, raw")["value"] > 0.7
    assert headline(result, "K cosine, raw")["null_shuffled"] == pytest.approx(
        headline(result, "K cosine, raw")["value"], abs=0.03
    )
    assert abs(headline(result, "K cosine, centred")["value"]) < 0.1


def test_concatenated_heads_are_one_vector() -> None:
    batch = random_batch()
    result = measure(probe, [batch], probe.Options(heads="concatenated"))
    token_BT = is_token(batch.samples)
    a_NC, b_NC = (np.asarray(batch.sites[s, "attn.hook_q"], np.float64)[token_BT].reshape(token_BT.sum(), -1)
                  for s in VISITS[0])  # fmt: skip
    cosine_N = (a_NC * b_NC).sum(-1) / np.linalg.norm(a_NC, axis=-1) / np.linalg.norm(b_NC, axis=-1)
    row = pick(result.rows(), quantity="Q cosine, raw", level="layer", layers="2")
    assert row["value"] == pytest.approx(cosine_N.mean(), abs=1e-9)
    assert not by_head(result, "Q cosine, raw").size
    assert by_head(result, "pattern cosine").shape == (2, LOOPED.num_heads)


def test_the_shuffled_null_is_the_mean_over_shuffles() -> None:
    # Samples with offsets of their own: shuffling within a sample keeps them, so even the centred null is not 0.
    batch = random_batch(num=5)
    offset_BGC = 2 * np.random.default_rng(1).standard_normal((5, 1, LOOPED.num_kv_heads, LOOPED.head_width))
    batch = with_sites(batch, {(s, "attn.hook_v"): batch.sites[s, "attn.hook_v"] + offset_BGC for s in VISITS[0]})
    result = measure(probe, [batch])
    generator = np.random.default_rng(2)
    values: dict[str, list[NDArray[np.float64]]] = {"V cosine, raw": [], "V cosine, centred": []}
    late_BTGC = np.asarray(batch.sites[3, "attn.hook_v"])
    for _ in range(300):
        shuffled_BTGC = late_BTGC.copy()
        for b, length in enumerate(batch.samples.length_N):
            shuffled_BTGC[b, :length] = late_BTGC[b, generator.permutation(length)]
        drawn = _only_cosines(with_sites(batch, {(3, "attn.hook_v"): shuffled_BTGC}))
        for quantity, draws in values.items():
            draws.append(drawn[quantity][0])
    for quantity, draws in values.items():
        error = np.std(draws, axis=0) / np.sqrt(len(draws))
        assert (np.abs(by_head(result, quantity, "null_shuffled")[0] - np.mean(draws, axis=0)) < 4.5 * error).all()
        assert (np.abs(by_head(result, quantity, "null_shuffled")[0]) > 0.3).all()


def _only_cosines(batch: Batch) -> dict[str, NDArray[np.float64]]:
    """Raw and centred cosine of V on the first looped layer, (1, G) each, straight from the definitions."""
    token_BT = is_token(batch.samples)
    a_NGC, b_NGC = (np.asarray(batch.sites[s, "attn.hook_v"], np.float64)[token_BT] for s in VISITS[0])
    raw_NG = (a_NGC * b_NGC).sum(-1) / np.linalg.norm(a_NGC, axis=-1) / np.linalg.norm(b_NGC, axis=-1)
    a_NGC, b_NGC = a_NGC - a_NGC.mean(0), b_NGC - b_NGC.mean(0)
    scale_G = np.sqrt((a_NGC**2).sum((0, 2)) * (b_NGC**2).sum((0, 2)))
    return {"V cosine, raw": raw_NG.mean(0)[None], "V cosine, centred": ((a_NGC * b_NGC).sum((0, 2)) / scale_G)[None]}


def test_the_pattern_null_compares_with_the_sample_before_where_both_count() -> None:
    batch = random_batch(num=5)
    # The third sample holds two documents: its rows from position 6 on start elsewhere than its neighbours'.
    start_BT = batch.samples.segment_start_NT.copy()
    start_BT[2, 6:] = 6
    batch = replace(batch, samples=replace(batch.samples, segment_start_NT=start_BT))
    result = measure(probe, [batch], probe.Options(t_min=2))
    counted_BT = is_token(batch.samples) & (np.arange(12) - start_BT >= 2)
    distances, cosines = [], []
    for sample in range(1, 5):
        for t in range(12):
            same_start = start_BT[sample, t] == start_BT[sample - 1, t]
            if counted_BT[sample, t] and counted_BT[sample - 1, t] and same_start:
                p_S = np.asarray(batch.sites[1, "attn.hook_pattern"][sample, 0, t], np.float64)
                q_S = np.asarray(batch.sites[3, "attn.hook_pattern"][sample - 1, 0, t], np.float64)
                cosines.append(p_S @ q_S / np.linalg.norm(p_S) / np.linalg.norm(q_S))
                p_S, q_S = p_S / p_S.sum(), q_S / q_S.sum()
                middle_S = (p_S + q_S) / 2
                parts = [(x[x > 0] * np.log2(x[x > 0] / middle_S[x > 0])).sum() for x in (p_S, q_S)]
                distances.append(np.sqrt(sum(parts) / 2))
    assert by_head(result, "pattern distance", "null_shuffled")[0, 0] == pytest.approx(np.mean(distances), abs=1e-6)
    assert by_head(result, "pattern cosine", "null_shuffled")[0, 0] == pytest.approx(np.mean(cosines), abs=1e-6)


def test_one_sample_has_no_pattern_null() -> None:
    result = measure(probe, [random_batch(num=1)])
    assert headline(result, "pattern cosine")["value"] is not None
    assert headline(result, "pattern cosine")["null_shuffled"] is None


def test_queries_that_see_only_themselves_count_only_when_asked_for() -> None:
    batch = random_batch(padding=0)
    without, with_first = (measure(probe, [batch], probe.Options(t_min=t_min)) for t_min in (1, 0))
    # One of 12 queries of each sample then has equal rows: distance 0.
    np.testing.assert_allclose(
        by_head(with_first, "pattern distance"), by_head(without, "pattern distance") * 11 / 12, atol=1e-9
    )


def test_padding_never_counts() -> None:
    batch = random_batch()
    padding_BT = ~is_token(batch.samples)
    spoilt = {key: np.array(x) for key, x in batch.sites.items()}
    for (_, suffix), x in spoilt.items():
        if suffix == "attn.hook_pattern":
            x.swapaxes(1, 2)[padding_BT] = np.nan
        else:
            x[padding_BT] = np.nan
    spoilt_rows = measure(probe, [with_sites(batch, spoilt)]).rows()
    assert same_numbers(measure(probe, [batch]).rows(), spoilt_rows)


def test_a_baseline_marks_every_row_as_needing_two_visits() -> None:
    samples = text_samples()
    batch = planted_batch(BASELINE, samples, random_sites(BASELINE, samples, probe.needs(BASELINE.architecture())))
    result = measure(probe, [batch])
    assert [row["quantity"] for row in result.rows()] == list(probe.QUANTITIES)
    assert all(row["value"] is None and str(row["note"]).startswith("needs two visits") for row in result.rows())
    assert len(result.figures["by layer"].data) == 0


def test_three_visits_give_every_pair() -> None:
    config = replace(LOOPED, num_visits=3)
    samples = text_samples()
    batch = planted_batch(config, samples, random_sites(config, samples, probe.needs(config.architecture())))
    layer_1 = [index for index, step in enumerate(plan(config)) if step.layer == 1]
    third = {(layer_1[2], "attn.hook_q"): with_cosine(batch.sites[layer_1[0], "attn.hook_q"], 0.25, 0)}
    result = measure(probe, [with_sites(batch, third)], probe.Options(compare=(0, 1, 2)))
    assert {row["visit"] for row in result.rows()} == {"1 vs 2", "1 vs 3", "2 vs 3"}
    rows = [row for row in result.rows() if (row["level"], row["layers"], row["visit"]) == ("head", "2", "1 vs 3")]
    cosines = [row["value"] for row in rows if row["quantity"] == "Q cosine, raw"]
    np.testing.assert_allclose(cosines, [0.25] * LOOPED.num_heads, atol=1e-6)
    first_two = measure(probe, [with_sites(batch, third)])
    assert {row["visit"] for row in first_two.rows()} == {"1 vs 2"}
    assert len(result.figures["by layer"].data) == 3 * 3 * len(probe.QUANTITIES)


def test_kept_heads_keep_their_numbers() -> None:
    batch = random_batch()
    kept = {key: x[:, :, [2]] if key[1] == "attn.hook_q" else x for key, x in batch.sites.items()}
    filtered = replace(batch, sites=kept, heads={**batch.heads, "attn.hook_q": (2,)})
    whole, result = (measure(probe, [each]) for each in (batch, filtered))
    np.testing.assert_allclose(
        by_head(result, "Q cosine, raw")[:, 0], by_head(whole, "Q cosine, raw")[:, 2], atol=1e-12
    )
    heads = [row["head"] for row in result.rows() if row["quantity"] == "Q cosine, raw" and row["level"] == "head"]
    assert heads == [3, 3]


def test_the_interval_is_that_of_a_mean_over_samples() -> None:
    batch = random_batch(num=60, padding=0)
    result = measure(probe, [batch])
    a, b = (np.asarray(batch.sites[s, "attn.hook_q"], np.float64) for s in VISITS[0])
    cosine_N = ((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).mean((1, 2))
    (found,) = [
        row
        for row in result.rows()
        if row["level"] == "layer" and row["layers"] == "2" and row["quantity"] == "Q cosine, raw"
    ]
    half = 1.96 * cosine_N.std() / np.sqrt(60)
    assert found["n"] == 60
    assert found["low"] == pytest.approx(cosine_N.mean() - half, abs=0.25 * half)
    assert found["high"] == pytest.approx(cosine_N.mean() + half, abs=0.25 * half)


def test_wrong_options_and_captures_are_refused() -> None:
    batch = random_batch()
    with pytest.raises(UserError, match="visits must be two or more different numbers from 1; got 1"):
        probe.Options(compare=(0,))
    with pytest.raises(UserError, match="t_min must be at least 0; got -1"):
        probe.Options(t_min=-1)
    with pytest.raises(UserError, match="visits must be among 1 to 2; got 3"):
        measure(probe, [batch], probe.Options(compare=(0, 2)))
    second = {key: x for key, x in batch.sites.items() if key[0] not in (1, 2)}
    with pytest.raises(UserError, match="must hold two of the visits 1, 2 of at least one layer"):
        measure(probe, [replace(batch, sites=second)])
    with pytest.raises(UserError, match="samples to measure must be at least one; got 0"):
        measure(probe, [])
    with pytest.raises(UserError, match="sample ids must be distinct"):
        measure(probe, [batch, take(batch, np.array([0]))])


def test_nested_loops_of_a_dense_network_are_each_compared() -> None:
    samples = text_samples()
    batch = planted_batch(NESTED, samples, random_sites(NESTED, samples, probe.needs(NESTED)))
    rows = measure(probe, [batch]).rows()
    found = {
        row["layers"]: row["visit"] for row in rows if row["level"] == "headline" and row["quantity"] == "Q cosine, raw"
    }
    assert found == {"looped 1, 3": "1 vs 2", "looped 2": "1 vs 2"}
    later = measure(probe, [batch], probe.Options(compare=(2, 3))).rows()
    assert {row["layers"] for row in later if row["level"] == "headline"} == {"looped 2"}


@pytest.mark.parametrize("suffix", [*probe.PROJECTIONS.values(), probe.PATTERN])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_site_without_numbers_is_named(suffix: str, number: float) -> None:
    batch = random_batch()
    spoilt = np.array(batch.sites[4, suffix])
    spoilt[5, 1, 1] = number
    message = f"^blocks.4.{suffix} must hold finite numbers; got {number} among samples 0 to 7: mend the network, or"
    with pytest.raises(UserError, match=message):
        measure(probe, [with_sites(batch, {(4, suffix): spoilt})])
