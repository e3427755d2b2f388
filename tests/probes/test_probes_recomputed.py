"""Headline numbers of the shipped network, worked out again by plain loops over `run_with_cache`."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.record import DEFAULT_SITES, run_batches
from model.network import LoopedMoE
from probes import attention_sink, expert_overlap, projection_similarity, residual_updates
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Role
from smelt_interp.data.tokenizer import BYTES
from tests.support.answers import rows_of
from tests.support.planted import pick

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "demo-smelt"
LAYERS, VISITS = (2, 3, 4, 5), (0, 1)
Cache = Mapping[tuple[str, tuple[int, int]], torch.Tensor]


@pytest.fixture(scope="module")
def network() -> LoopedMoE:
    return LoopedMoE.from_pretrained(CHECKPOINT).eval()


@pytest.fixture(scope="module")
def samples() -> object:
    return load_samples(DataOptions(samples=3, shots=(2,)), 160, BYTES)


@pytest.fixture(scope="module")
def caches(network: LoopedMoE, samples) -> list[Cache]:
    """What ran on each row alone, without its padding."""
    found = []
    for ids_T, length in zip(samples.ids_NT, samples.length_N, strict=True):
        with torch.no_grad():
            found.append(network.run_with_cache(torch.tensor(ids_T[None, :length].astype(np.int64)))[1])
    return found


def headline(probe, network: LoopedMoE, samples):
    """The probe's headline rows by quantity and more."""
    rows = rows_of(probe, run_batches(network, samples, DEFAULT_SITES, batch_size=2))
    return partial(pick, [row for row in rows if row["level"] == "headline"])


def site(cache: Cache, suffix: str, layer: int, visit: int) -> np.ndarray:
    return cache[suffix, (layer, visit)][0].numpy().astype(np.float64)


def test_masses_are_means_over_queries_heads_and_looped_layers(network, samples, caches) -> None:
    found = headline(attention_sink, network, samples)
    for visit in VISITS:
        start, content, other, uniform = [], [], [], []
        for cache, role_T, layer, head in zip_with_product(caches, samples.role_NT):
            pattern_TS = site(cache, "attn.hook_pattern", layer, visit)[head]
            for query in range(1, len(pattern_TS)):
                answers = [j for j in range(1, query) if role_T[j] == Role.DEMONSTRATION_ANSWER]
                rest = [j for j in range(1, query) if role_T[j] != Role.DEMONSTRATION_ANSWER]
                start.append(pattern_TS[query, 0])
                content.append(sum(pattern_TS[query, j] for j in answers))
                other.append(sum(pattern_TS[query, j] for j in rest))
                uniform.append(1 / (query + 1))
        for part, mass in (("start", start), ("content", content), ("other", other)):
            row = found(quantity=f"{part} mass", visit=visit + 1, head="mean")
            assert row["value"] == pytest.approx(np.mean(mass), abs=1e-6)
            assert row["n"] == 3
        assert found(quantity="start mass", visit=1, head="mean")["null_uniform"] == pytest.approx(np.mean(uniform))


def zip_with_product(caches: list[Cache], role_NT: np.ndarray):
    return ((cache, role_T, *place) for cache, role_T in zip(caches, role_NT, strict=True)
            for place in product(LAYERS, range(4)))  # fmt: skip


def test_cosines_and_distances_compare_the_same_token_on_both_visits(network, samples, caches) -> None:
    found = headline(projection_similarity, network, samples)
    for name, num_heads in (("q", 4), ("k", 2), ("v", 2)):
        raw, centred = [], []
        for layer, head in product(LAYERS, range(num_heads)):
            first, second = (
                np.concatenate([site(cache, f"attn.hook_{name}", layer, visit)[:, head] for cache in caches])
                for visit in VISITS
            )
            raw.append(np.mean([a @ b / np.sqrt(a @ a * (b @ b)) for a, b in zip(first, second, strict=True)]))
            a, b = first - first.mean(0), second - second.mean(0)
            centred.append((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
        assert found(quantity=f"{name.upper()} cosine, raw")["value"] == pytest.approx(np.mean(raw), abs=1e-6)
        assert found(quantity=f"{name.upper()} cosine, centred")["value"] == pytest.approx(np.mean(centred), abs=1e-6)
    distance = []
    for cache, _, layer, head in zip_with_product(caches, samples.role_NT):
        first, second = (site(cache, "attn.hook_pattern", layer, visit)[head] for visit in VISITS)
        for p, q in zip(first[1:], second[1:], strict=True):
            halves = [sum(x * np.log2(2 * x / (x + y)) for x, y in zip(*both, strict=True) if x) for both in
                      ((p, q), (q, p))]  # fmt: skip
            distance.append(np.sqrt(max(sum(halves) / 2, 0)))
    assert found(quantity="pattern distance")["value"] == pytest.approx(np.mean(distance), abs=1e-6)


def test_experts_shared_and_their_nulls_count_sets(network, samples, caches) -> None:
    found = headline(expert_overlap, network, samples)
    shared, popularity, excess, variance = [], [], 0.0, 0.0
    for layer in LAYERS:
        chosen = [[[set(token) for token in site(cache, "mlp.hook_expert_indices", layer, visit)] for cache in caches]
                  for visit in VISITS]  # fmt: skip
        tokens = [[token for sample in visit for token in sample] for visit in chosen]
        shared.append(np.mean([len(a & b) for a, b in zip(*tokens, strict=True)]))
        popularity.append(sum(np.mean([e in a for a in tokens[0]]) * np.mean([e in b for b in tokens[1]])
                              for e in range(16)))  # fmt: skip
        for first, second in zip(*chosen, strict=True):
            pairs_TT = np.array([[len(a & b) for b in second] for a in first], np.float64)
            centred_TT = pairs_TT - pairs_TT.mean(0) - pairs_TT.mean(1)[:, None] + pairs_TT.mean()
            excess += np.trace(pairs_TT) - pairs_TT.sum() / len(first)
            variance += (centred_TT**2).sum() / (len(first) - 1)
    row = found(quantity="experts shared")
    assert (row["value"], row["null_popularity"]) == pytest.approx((np.mean(shared), np.mean(popularity)))
    z = found(quantity="experts shared, z")
    assert z["value"] == pytest.approx(excess / np.sqrt(variance))
    assert float(z["low"]) < float(z["value"]) < float(z["high"])


def test_updates_are_compared_token_by_token(network, samples, caches) -> None:
    found = headline(residual_updates, network, samples)
    medians, roots, cosines = [], [], []
    for layer in LAYERS:
        first, second = (
            np.concatenate([site(cache, "hook_attn_out", layer, visit) + site(cache, "hook_mlp_out", layer, visit)
                            for cache in caches])
            for visit in VISITS
        )  # fmt: skip
        norms = [[np.sqrt(x @ x) for x in visit] for visit in (first, second)]
        medians.append(np.median(np.divide(norms[1], norms[0])))
        roots.append(np.sqrt(np.mean(np.square(norms[1])) / np.mean(np.square(norms[0]))))
        cosines.append(np.mean([a @ b / n / m for a, b, n, m in zip(first, second, *norms, strict=True)]))
    layer = {"update": "layer", "visit": "1 vs 2"}
    assert found(quantity="norm ratio, median", **layer)["value"] == pytest.approx(np.mean(medians), rel=0.011)
    assert found(quantity="norm ratio, RMS", **layer)["value"] == pytest.approx(np.mean(roots), rel=1e-5)
    assert found(quantity="cosine", **layer)["value"] == pytest.approx(np.mean(cosines), abs=1e-6)
