"""Batches with known answers: what tests of probes plant and expect back."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch, take
from smelt_interp.architecture import Architecture
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import EPISODE, NO_EPISODE, Role, Samples
from smelt_interp.data.tokenizer import BYTES, text_of
from smelt_interp.plan import Step
from smelt_interp.sites import SITES

LOOPED = ModelConfig(
    num_layers=4, width=8, num_heads=4, num_kv_heads=2, head_width=6, num_experts=8, top_k=2, expert_width=8,
    vocab_size=259, context=64, loop_start=1, loop_stop=3, num_visits=2, loop_scale=0.5,
)  # fmt: skip
"""Steps 0 | 1 2 | 3 4 | 5: layers 2 and 3 (from 1) are looped."""
BASELINE = replace(LOOPED, num_visits=1, loop_scale=1.0)
NESTED = Architecture(
    family="nested",
    steps=tuple(Step(*step) for step in ((0, 0), (1, 0), (1, 1), (2, 0), (0, 1), (1, 2), (1, 3), (2, 1))),
    loop_factors=(1.0,) * 8, sites=tuple(suffix for suffix in SITES if not suffix.startswith("mlp.")),
    width=8, num_heads=4, num_kv_heads=2, head_width=6, num_experts=0, top_k=0, router="none", vocab_size=1000,
    context=64,
)  # fmt: skip
"""A dense network of two nested loops: layers 1 and 3 (from 1) run twice, layer 2 twice within each round."""


def _architecture(network: ModelConfig | Architecture) -> Architecture:
    return network if isinstance(network, Architecture) else network.architecture()


def text_samples(num: int = 4, length: int = 12, *, seed: int = 0, padding: int = 0) -> Samples:
    """Rows of one document of random letters, BOS first; with `padding`, row i has i % (padding + 1) tokens less."""
    generator = np.random.default_rng(seed)
    ids_NT = generator.integers(97, 123, (num, length)).astype(np.int32)
    ids_NT[:, 0] = 256
    length_N = (length - np.arange(num) % (padding + 1)).astype(np.int32)
    pad_NT = np.arange(length) >= length_N[:, None]
    role_NT = np.full((num, length), Role.TEXT, np.uint8)
    role_NT[:, 0] = Role.BOS
    return Samples(
        ids_NT=np.where(pad_NT, 258, ids_NT).astype(np.int32),
        length_N=length_N,
        role_NT=np.where(pad_NT, Role.PAD, role_NT).astype(np.uint8),
        segment_start_NT=np.zeros((num, length), np.int32),
        domain_N=np.full(num, b"code", "S16"),
        episode_N=np.array([NO_EPISODE] * num, dtype=EPISODE),
        document_N=np.arange(num),
        text=text_of(BYTES, ids_NT, length_N),
    )


def dyck_samples_of(rows: list[list[tuple[str, Role]]], episodes: list[tuple[int, int, int, bool, bool]]) -> Samples:
    """Rows from their parts, BOS added, padded to the longest: `[("(:", DEMONSTRATION_INPUT), (")\\n", ...)]`."""
    length_N = np.array([1 + sum(len(text) for text, _ in parts) for parts in rows], np.int32)
    ids_NT = np.full((len(rows), length_N.max()), 258, np.int32)
    role_NT = np.full(ids_NT.shape, Role.PAD, np.uint8)
    for i, parts in enumerate(rows):
        tokens = [256, *(byte for text, _ in parts for byte in text.encode())]
        ids_NT[i, : len(tokens)] = tokens
        role_NT[i, : len(tokens)] = [Role.BOS, *(role for text, role in parts for _ in text)]
    return Samples(
        ids_NT=ids_NT,
        length_N=length_N,
        role_NT=role_NT,
        segment_start_NT=np.zeros_like(ids_NT),
        domain_N=np.full(len(rows), b"dyck", "S16"),
        episode_N=np.array(episodes, dtype=EPISODE),
        document_N=np.arange(len(rows)),
        text=text_of(BYTES, ids_NT, length_N),
    )


def uniform_pattern(samples: Samples, num_heads: int) -> NDArray[np.float64]:
    """Attention that is uniform over the keys of a query's segment, zero elsewhere. -> (B, Q, T, S)"""
    length = samples.ids_NT.shape[1]
    query_T1, key_S = np.arange(length)[:, None], np.arange(length)
    seen_BTS = (key_S <= query_T1) & (key_S >= samples.segment_start_NT[:, :, None])
    pattern_BTS = seen_BTS / seen_BTS.sum(-1, keepdims=True)
    return np.repeat(pattern_BTS[:, None], num_heads, axis=1)


def start_pattern(samples: Samples, num_heads: int, start_mass: float) -> NDArray[np.float64]:
    """Each query but a segment's first puts `start_mass` on its segment start and the rest evenly on the other keys."""
    pattern_BQTS = uniform_pattern(samples, num_heads)
    length = samples.ids_NT.shape[1]
    for sample, start_T in enumerate(samples.segment_start_NT):
        for query in range(length):
            start = int(start_T[query])
            if query > start:
                pattern_BQTS[sample, :, query, start] = start_mass
                pattern_BQTS[sample, :, query, start + 1 : query + 1] = (1 - start_mass) / (query - start)
    return pattern_BQTS


def random_sites(
    network: ModelConfig | Architecture, samples: Samples, suffixes: tuple[str, ...], *, seed: int = 0
) -> dict[tuple[int, str], NDArray[np.generic]]:
    """Random arrays of the right shape for every step: normal numbers; patterns are causal and sum to 1; experts are
    distinct and their weights sum to 1."""
    config, generator = _architecture(network), np.random.default_rng(seed)
    batch, length = samples.ids_NT.shape
    size = {"B": batch, "T": length, "S": length, "D": config.width, "Q": config.num_heads, "G": config.num_kv_heads,
            "C": config.head_width, "E": config.num_experts, "K": config.top_k, "1": 1}  # fmt: skip
    sites: dict[tuple[int, str], NDArray[np.generic]] = {}
    for step in range(len(config.steps)):
        for suffix in suffixes:
            values = generator.standard_normal([size[axis] for axis in SITES[suffix].axes])
            if suffix == "attn.hook_pattern":
                values = np.exp(values) * (uniform_pattern(samples, config.num_heads) > 0)
                values /= values.sum(-1, keepdims=True)
            elif suffix == "mlp.hook_expert_weights":
                values = np.exp(values)
                values /= values.sum(-1, keepdims=True)
            elif suffix == "mlp.hook_expert_indices":
                order = generator.random((batch, length, config.num_experts)).argsort(-1)
                sites[step, suffix] = order[..., : config.top_k].astype(np.int64)
                continue
            sites[step, suffix] = values.astype(np.float32)
    return sites


def planted_batch(
    network: ModelConfig | Architecture,
    samples: Samples,
    sites: Mapping[tuple[int, str], NDArray[np.generic]],
    *,
    logprob_BT: NDArray[np.float32] | None = None,
    argmax_BT: NDArray[np.int32] | None = None,
) -> Batch:
    """All samples as one batch, every head kept. Without them, log-probabilities are 0 and the argmax is 0."""
    config, shape = _architecture(network), samples.ids_NT.shape
    heads = {"Q": tuple(range(config.num_heads)), "G": tuple(range(config.num_kv_heads))}
    return Batch(
        architecture=config,
        samples=samples,
        sample_ids=np.arange(len(samples), dtype=np.int64),
        logprob_BT=np.zeros(shape, np.float32) if logprob_BT is None else logprob_BT,
        argmax_BT=np.zeros(shape, np.int32) if argmax_BT is None else argmax_BT,
        sites=dict(sites),
        heads={
            suffix: heads[axis] for suffix in {key[1] for key in sites} for axis in "QG" if axis in SITES[suffix].axes
        },
    )


def split_batch(batch: Batch, size: int) -> Iterator[Batch]:
    """The same samples in batches of at most `size`."""
    for first in range(0, len(batch.samples), size):
        yield take(batch, np.arange(first, min(first + size, len(batch.samples))))


def same_numbers(left: list[dict[str, object]], right: list[dict[str, object]], tolerance: float = 1e-6) -> bool:
    """Whether two lists of rows say the same, numbers within `tolerance`."""
    return len(left) == len(right) and all(
        a.keys() == b.keys()
        and all(
            abs(x - y) <= tolerance if isinstance(x, float) and isinstance(y, float) else x == y
            for x, y in zip(a.values(), b.values(), strict=True)
        )
        for a, b in zip(left, right, strict=True)
    )


def pick(rows: list[dict[str, object]], **where: object) -> dict[str, object]:
    """The one row whose columns have these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    assert len(found) == 1, f"{len(found)} rows for {where}"
    return found[0]
