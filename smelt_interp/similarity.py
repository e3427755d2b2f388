"""How alike two visits are: cosines, attention patterns and expert choices, each with its null.

Every measure has two stages. `*_sums` reduces two arrays over the tokens of each sample to one small record a sample,
so that batches of any size give the same records. `pooled` adds the samples up, each as often as a weight says; the
other functions turn added-up sums into the number. Axes before the measure's own stay, such as layers or resamples.

"Shuffled" means: each token is compared with a token of its own sample, by a uniform random permutation of the
sample's measured tokens. What is returned is the exact expectation over all permutations (and, for experts, the exact
variance: Hoeffding 1951), not one draw of it.

Axes: N samples, T tokens, S keys, K chosen experts, E experts, C components; `...` stands for any axes between, such
as heads. mask_NT says which tokens are measured.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

ROW_SUM_TOLERANCE = 1e-3
"""How far an attention row may be from 1 without a learned sink: float16 storage moves a sum by up to 5e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSums:
    """Sums over the measured tokens of each sample for two vectors a, b a token. Shapes (N, ...) and (N, ..., C)."""

    count: Floats
    cosine: Floats
    """Of cos(a, b)."""
    shuffled_cosine: Floats
    """Its expectation when the tokens of b are shuffled within the sample."""
    dot: Floats
    """Of <a, b>."""
    shuffled_dot: Floats
    """Its expectation under the same shuffle."""
    square_a: Floats
    square_b: Floats
    total_a: Floats
    total_b: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternSums:
    """Sums over the measured queries of each sample for two attention rows a query. Shapes (N, ...)."""

    count: Floats
    distance: Floats
    """Of the Jensen-Shannon distance."""
    cosine: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSums:
    """Sums over the measured tokens of each sample for two choices of k experts a token. Shapes (N,) and (N, E)."""

    count: Floats
    overlap: Floats
    """Of o, the size of the intersection."""
    jaccard: Floats
    """Of o / (2k - o)."""
    weighted: Floats
    """Of the sum over experts of the smaller of the two weights."""
    shuffled_overlap: Floats
    """Expectation of `overlap` when the second choices are shuffled within the sample."""
    shuffled_variance: Floats
    """Variance of `overlap` under the same shuffle."""
    chosen_a: Floats
    """Tokens that chose each expert, first visit."""
    chosen_b: Floats


Sums = TypeVar("Sums", CosineSums, PatternSums, OverlapSums)


def pooled(sums: Sums, weight_N: NDArray[np.integer] | None = None) -> Sums:
    """The sums over all samples, each counted as often as its weight says, once without weights. (N, ...) -> (...)"""
    weight_N = np.ones(len(sums.count), np.int64) if weight_N is None else weight_N
    totals = {field.name: np.tensordot(weight_N, getattr(sums, field.name), axes=1) for field in fields(sums)}
    return type(sums)(**totals)


def _sum_tokens(x: NDArray[np.floating], mask_NT: Mask) -> Floats:
    """Sum over the token axis (axis 1) of the measured tokens."""
    summed: Floats = np.einsum("nt...,nt->n...", np.asarray(x, dtype=np.float64), mask_NT.astype(np.float64))
    return summed


def _quotient(x: Floats, y: Floats) -> Floats:
    """x / y, NaN where y is 0."""
    quotient: Floats = np.divide(x, y, out=np.full(np.shape(x), np.nan), where=np.asarray(y) > 0)
    return quotient


def _check_same(a: NDArray[np.generic], b: NDArray[np.generic], mask_NT: Mask) -> None:
    if a.shape != b.shape or a.shape[:2] != mask_NT.shape:
        raise UserError(
            f"arrays to compare must have one shape that begins with the mask's; got {a.shape}, {b.shape}, "
            f"mask {mask_NT.shape}"
        )


# Cosine -----------------------------------------------------------------------------------------------------------


def cosine_sums(a: NDArray[np.floating], b: NDArray[np.floating], mask_NT: Mask) -> CosineSums:
    """Reduce vectors (N, T, ..., C) of two visits. A zero vector has cosine 0 with everything."""
    _check_same(a, b, mask_NT)
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    norm_a, norm_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    unit_a, unit_b = (x / np.where(norm > 0, norm, 1.0)[..., None] for x, norm in ((a, norm_a), (b, norm_b)))
    count = _sum_tokens(np.ones(a.shape[:-1]), mask_NT)
    unit_dot = (_sum_tokens(unit_a, mask_NT) * _sum_tokens(unit_b, mask_NT)).sum(-1)
    total_a, total_b = _sum_tokens(a, mask_NT), _sum_tokens(b, mask_NT)
    return CosineSums(
        count=count,
        cosine=_sum_tokens((unit_a * unit_b).sum(-1), mask_NT),
        shuffled_cosine=unit_dot / np.maximum(count, 1),
        dot=_sum_tokens((a * b).sum(-1), mask_NT),
        shuffled_dot=(total_a * total_b).sum(-1) / np.maximum(count, 1),
        square_a=_sum_tokens(norm_a**2, mask_NT),
        square_b=_sum_tokens(norm_b**2, mask_NT),
        total_a=total_a,
        total_b=total_b,
    )


def raw_cosine(sums: CosineSums) -> Floats:
    """Mean over tokens of cos(a, b)."""
    return _quotient(sums.cosine, sums.count)


def shuffled_raw_cosine(sums: CosineSums) -> Floats:
    """The null of `raw_cosine`: not 0 when vectors share an offset."""
    return _quotient(sums.shuffled_cosine, sums.count)


def centred_cosine(sums: CosineSums) -> Floats:
    """Pooled centred cosine: sum <a - ma, b - mb> / sqrt(sum |a - ma|^2 sum |b - mb|^2).

    ma and mb are means over all measured tokens of a visit. NaN where all vectors of a visit are equal.
    """
    return _centred(sums, sums.dot)


def shuffled_centred_cosine(sums: CosineSums) -> Floats:
    """The null of `centred_cosine`: what samples, rather than tokens, have in common."""
    return _centred(sums, sums.shuffled_dot)


def _centred(sums: CosineSums, dot: Floats) -> Floats:
    mean_a, mean_b = (_quotient(total, sums.count[..., None]) for total in (sums.total_a, sums.total_b))
    spread_a = sums.square_a - sums.count * (mean_a**2).sum(-1)
    spread_b = sums.square_b - sums.count * (mean_b**2).sum(-1)
    scale = np.sqrt(np.maximum(spread_a, 0) * np.maximum(spread_b, 0))
    return _quotient(dot - sums.count * (mean_a * mean_b).sum(-1), scale)


# Attention patterns -----------------------------------------------------------------------------------------------


def _with_remainder(row: NDArray[np.floating]) -> Floats:
    """Attention rows (..., S) as distributions over S + 1: the last holds what a learned sink took.

    A shortfall that storage explains is none: completing one row of a pair with 2e-4 would set equal rows 0.01 apart.
    """
    row = np.asarray(row, dtype=np.float64)
    shortfall = 1 - row.sum(-1, keepdims=True)
    full = np.concatenate([row, np.where(shortfall > ROW_SUM_TOLERANCE, shortfall, 0.0)], axis=-1)
    distribution: Floats = full / full.sum(-1, keepdims=True)
    return distribution


def jensen_shannon_distance(row_a: NDArray[np.floating], row_b: NDArray[np.floating]) -> Floats:
    """Square root of the Jensen-Shannon divergence in bits between attention rows (..., S): 0 to 1. -> (...)

    A row that sums to less than 1 by more than ROW_SUM_TOLERANCE is completed by one more outcome, the mass that a
    learned sink took.
    """
    p, q = _with_remainder(row_a), _with_remainder(row_b)
    middle = (p + q) / 2

    def divergence(x: Floats) -> Floats:
        ratio = np.divide(x, middle, out=np.ones_like(x), where=x > 0)
        total: Floats = (x * np.log2(ratio)).sum(-1)
        return total

    distance: Floats = np.sqrt(np.clip((divergence(p) + divergence(q)) / 2, 0, 1))
    return distance


def row_cosine(row_a: NDArray[np.floating], row_b: NDArray[np.floating]) -> Floats:
    """Cosine between rows (..., S); 0 where one of them is zero. -> (...)"""
    a, b = np.asarray(row_a, dtype=np.float64), np.asarray(row_b, dtype=np.float64)
    scale = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine: Floats = (a * b).sum(-1) / np.where(scale > 0, scale, 1.0)
    return cosine


def pattern_sums(pattern_a: NDArray[np.floating], pattern_b: NDArray[np.floating], mask_NT: Mask) -> PatternSums:
    """Reduce attention patterns (N, T, ..., S), query axis second, over the measured queries.

    Leave out each segment's first query: it has one key, so its two rows are equal. The null is this function with
    `pattern_b` taken from other samples of the same layout.
    """
    _check_same(pattern_a, pattern_b, mask_NT)
    pairs = list(zip(pattern_a, pattern_b, strict=True))  # a sample at a time: patterns are large in float64
    distance, cosine = (np.stack([f(a, b) for a, b in pairs]) for f in (jensen_shannon_distance, row_cosine))
    return PatternSums(
        count=_sum_tokens(np.ones(distance.shape), mask_NT),
        distance=_sum_tokens(distance, mask_NT),
        cosine=_sum_tokens(cosine, mask_NT),
    )


def pattern_distance(sums: PatternSums) -> Floats:
    """Mean Jensen-Shannon distance over queries."""
    return _quotient(sums.distance, sums.count)


def pattern_cosine(sums: PatternSums) -> Floats:
    """Mean cosine of attention rows over queries."""
    return _quotient(sums.cosine, sums.count)


# Experts ----------------------------------------------------------------------------------------------------------


def _same_expert(experts_a: NDArray[np.integer], experts_b: NDArray[np.integer]) -> Mask:
    """Whether the i-th choice of a is the j-th of b. (..., K), (..., K) -> (..., K, K)"""
    same: Mask = experts_a[..., :, None] == experts_b[..., None, :]
    return same


def expert_overlap(experts_a: NDArray[np.integer], experts_b: NDArray[np.integer]) -> Floats:
    """Size of the intersection of two sets of chosen experts (..., K). -> (...)"""
    overlap: Floats = _same_expert(experts_a, experts_b).sum((-2, -1)).astype(np.float64)
    return overlap


def weighted_overlap(
    experts_a: NDArray[np.integer],
    weights_a: NDArray[np.floating],
    experts_b: NDArray[np.integer],
    weights_b: NDArray[np.floating],
) -> Floats:
    """Sum over experts of the smaller of its two weights, all (..., K): 1 when weights sum to 1 and agree. -> (...)"""
    smaller = np.minimum(
        np.asarray(weights_a, np.float64)[..., :, None], np.asarray(weights_b, np.float64)[..., None, :]
    )
    total: Floats = (smaller * _same_expert(experts_a, experts_b)).sum((-2, -1))
    return total


def overlap_sums(
    experts_a: NDArray[np.integer],
    weights_a: NDArray[np.floating],
    experts_b: NDArray[np.integer],
    weights_b: NDArray[np.floating],
    mask_NT: Mask,
    num_experts: int,
) -> OverlapSums:
    """Reduce the chosen experts and their weights, all (N, T, K), of two visits."""
    _check_same(experts_a, experts_b, mask_NT)
    _check_same(weights_a, weights_b, mask_NT)
    overlap_NT = expert_overlap(experts_a, experts_b)
    shuffled = [_shuffled_overlap(experts_a[n][m], experts_b[n][m], num_experts) for n, m in enumerate(mask_NT)]
    return OverlapSums(
        count=mask_NT.sum(1).astype(np.float64),
        overlap=_sum_tokens(overlap_NT, mask_NT),
        jaccard=_sum_tokens(overlap_NT / (2 * experts_a.shape[-1] - overlap_NT), mask_NT),
        weighted=_sum_tokens(weighted_overlap(experts_a, weights_a, experts_b, weights_b), mask_NT),
        shuffled_overlap=np.array([one.mean for one in shuffled]),
        shuffled_variance=np.array([one.variance for one in shuffled]),
        chosen_a=np.stack([one.chosen_a for one in shuffled]),
        chosen_b=np.stack([one.chosen_b for one in shuffled]),
    )


class _Shuffled(NamedTuple):
    mean: float
    variance: float
    chosen_a: Floats
    chosen_b: Floats


def _shuffled_overlap(
    experts_a_TK: NDArray[np.integer], experts_b_TK: NDArray[np.integer], num_experts: int
) -> _Shuffled:
    """Mean and variance of sum_i o(i, pi(i)) over permutations pi, where o(i, j) = overlap of token i with token j.

    For any matrix o the mean is (sum of o) / n and the variance (sum of d^2) / (n - 1), d being o with its row and
    column means taken out (Hoeffding 1951). Here o = a b', so sum d^2 = <a'a, b'b> of the column-centred indicators.
    """
    held = []
    for experts_TK in (experts_a_TK, experts_b_TK):
        held_TE = np.zeros((len(experts_TK), num_experts))
        np.put_along_axis(held_TE, experts_TK.astype(np.intp), 1.0, axis=1)
        held.append(held_TE)
    chosen_a, chosen_b = (held_TE.sum(0) for held_TE in held)
    num = len(experts_a_TK)
    if num < 2:
        return _Shuffled(float(chosen_a @ chosen_b), 0.0, chosen_a, chosen_b)
    centred_a_TE, centred_b_TE = (held_TE - held_TE.mean(0) for held_TE in held)
    variance = ((centred_a_TE.T @ centred_a_TE) * (centred_b_TE.T @ centred_b_TE)).sum() / (num - 1)
    return _Shuffled(float(chosen_a @ chosen_b) / num, float(variance), chosen_a, chosen_b)


def mean_overlap(sums: OverlapSums) -> Floats:
    """Mean over tokens of the experts kept, 0 to k."""
    return _quotient(sums.overlap, sums.count)


def mean_jaccard(sums: OverlapSums) -> Floats:
    """Mean over tokens of o / (2k - o), 0 to 1."""
    return _quotient(sums.jaccard, sums.count)


def mean_weighted_overlap(sums: OverlapSums) -> Floats:
    """Mean over tokens of the sum of the smaller weights."""
    return _quotient(sums.weighted, sums.count)


def uniform_overlap(top_k: int, num_experts: int) -> float:
    """First null of `mean_overlap`: two uniform sets of k among E share k^2 / E (mean of the hypergeometric law)."""
    return top_k**2 / num_experts


def popularity_overlap(sums: OverlapSums) -> Floats:
    """Second null: sum over experts of p_a(e) p_b(e), p(e) = share of all tokens whose choice holds e."""
    return _quotient((sums.chosen_a * sums.chosen_b).sum(-1), sums.count**2)


def shuffled_overlap(sums: OverlapSums) -> Floats:
    """Third null: mean overlap with tokens shuffled within their samples."""
    return _quotient(sums.shuffled_overlap, sums.count)


def shuffled_overlap_z(sums: OverlapSums) -> Floats:
    """Standard deviations of the shuffle by which the observed overlap exceeds it; NaN when the shuffle has none."""
    return _quotient(sums.overlap - sums.shuffled_overlap, np.sqrt(sums.shuffled_variance))
