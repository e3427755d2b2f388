"""How alike two visits are: cosines, attention patterns, expert choices, update norms, each with its null.

Every measure has two stages. `*_sums` reduces two arrays over the tokens of each sample, so a stream of batches
becomes one small record a sample whatever the batch size; `join` strings the records of batches together. The other
functions turn sums into the number, with a weight for each sample: ones for the number itself, the counts of a
resample inside `bootstrap_interval`.

"Shuffled" means: each token is compared with a token of its own sample, by a uniform random permutation of the
sample's measured tokens. What is returned is the exact expectation over all permutations (and, for experts, the exact
variance: Hoeffding 1951), not one draw of it.

Axes: N samples, T tokens, S keys, K chosen experts, E experts, C components; `...` stands for any axes between, such
as heads. mask_NT says which tokens are measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Weights = NDArray[np.integer]
"""How often each sample counts, (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSums:
    """Sums over the measured tokens of each sample for two vectors a, b a token. Shapes (N, ...) and (N, ..., C)."""

    count: Floats
    cosine: Floats
    """Of cos(a, b)."""
    shuffled_cosine: Floats
    """Its expectation when the tokens of b are shuffled within the sample."""
    dot: Floats
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSums:
    """Euclidean norms of two vectors a token. Shapes (N, T); tokens that are not measured hold NaN."""

    a: Floats
    b: Floats


Sums = TypeVar("Sums", CosineSums, PatternSums, OverlapSums, NormSums)


def join(parts: Sequence[Sums]) -> Sums:
    """The sums of several batches as one, samples in order. Raises UserError when there are none."""
    if not parts:
        raise UserError("measured batches must be at least one; got 0")
    kind = type(parts[0])
    return kind(**{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(kind)})


def _sum_tokens(x: NDArray[np.floating], mask_NT: Mask) -> Floats:
    """Sum over the token axis (axis 1) of the measured tokens."""
    summed: Floats = np.einsum("nt...,nt->n...", np.asarray(x, dtype=np.float64), mask_NT.astype(np.float64))
    return summed


def _weighted(x: Floats, weight_N: Weights) -> Floats:
    """Sum over samples, each as often as its weight says."""
    summed: Floats = np.tensordot(np.asarray(weight_N, dtype=np.float64), x, axes=1)
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
    return CosineSums(
        count=count,
        cosine=_sum_tokens((unit_a * unit_b).sum(-1), mask_NT),
        shuffled_cosine=unit_dot / np.maximum(count, 1),
        dot=_sum_tokens((a * b).sum(-1), mask_NT),
        square_a=_sum_tokens(norm_a**2, mask_NT),
        square_b=_sum_tokens(norm_b**2, mask_NT),
        total_a=_sum_tokens(a, mask_NT),
        total_b=_sum_tokens(b, mask_NT),
    )


def raw_cosine(sums: CosineSums, weight_N: Weights) -> Floats:
    """Mean over tokens of cos(a, b). -> (...)"""
    return _quotient(_weighted(sums.cosine, weight_N), _weighted(sums.count, weight_N))


def shuffled_raw_cosine(sums: CosineSums, weight_N: Weights) -> Floats:
    """The null of `raw_cosine`: not 0 when vectors share an offset. -> (...)"""
    return _quotient(_weighted(sums.shuffled_cosine, weight_N), _weighted(sums.count, weight_N))


def _centred_scale(sums: CosineSums, weight_N: Weights) -> tuple[Floats, Floats, Floats, Floats]:
    """Token count, the means of a and b over all tokens, and sqrt(sum |a - ma|^2 sum |b - mb|^2)."""
    count = _weighted(sums.count, weight_N)
    mean_a, mean_b = (_quotient(_weighted(total, weight_N), count[..., None]) for total in (sums.total_a, sums.total_b))
    spread_a = _weighted(sums.square_a, weight_N) - count * (mean_a**2).sum(-1)
    spread_b = _weighted(sums.square_b, weight_N) - count * (mean_b**2).sum(-1)
    return count, mean_a, mean_b, np.sqrt(np.maximum(spread_a, 0) * np.maximum(spread_b, 0))


def centred_cosine(sums: CosineSums, weight_N: Weights) -> Floats:
    """Pooled centred cosine: sum <a - ma, b - mb> / sqrt(sum |a - ma|^2 sum |b - mb|^2). -> (...)

    ma and mb are means over all measured tokens of a visit. NaN where all vectors of a visit are equal.
    """
    count, mean_a, mean_b, scale = _centred_scale(sums, weight_N)
    return _quotient(_weighted(sums.dot, weight_N) - count * (mean_a * mean_b).sum(-1), scale)


def shuffled_centred_cosine(sums: CosineSums, weight_N: Weights) -> Floats:
    """The null of `centred_cosine`: what samples, rather than tokens, have in common. -> (...)"""
    count, mean_a, mean_b, scale = _centred_scale(sums, weight_N)
    within = (sums.total_a * sums.total_b).sum(-1) / np.maximum(sums.count, 1)
    return _quotient(_weighted(within, weight_N) - count * (mean_a * mean_b).sum(-1), scale)


# Attention patterns -----------------------------------------------------------------------------------------------


def _with_remainder(row: NDArray[np.floating]) -> Floats:
    """Attention rows (..., S) as distributions over S + 1: the last holds what a learned sink took."""
    row = np.asarray(row, dtype=np.float64)
    full = np.concatenate([row, np.maximum(1 - row.sum(-1, keepdims=True), 0)], axis=-1)
    distribution: Floats = full / full.sum(-1, keepdims=True)
    return distribution


def jensen_shannon_distance(row_a: NDArray[np.floating], row_b: NDArray[np.floating]) -> Floats:
    """Square root of the Jensen-Shannon divergence in bits between attention rows (..., S): 0 to 1. -> (...)

    A row that sums to less than 1 is completed by one more outcome, the mass that a learned sink took.
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


def pattern_distance(sums: PatternSums, weight_N: Weights) -> Floats:
    """Mean Jensen-Shannon distance over queries. -> (...)"""
    return _quotient(_weighted(sums.distance, weight_N), _weighted(sums.count, weight_N))


def pattern_cosine(sums: PatternSums, weight_N: Weights) -> Floats:
    """Mean cosine of attention rows over queries. -> (...)"""
    return _quotient(_weighted(sums.cosine, weight_N), _weighted(sums.count, weight_N))


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


def mean_overlap(sums: OverlapSums, weight_N: Weights) -> Floats:
    """Mean over tokens of the experts kept, 0 to k."""
    return _quotient(_weighted(sums.overlap, weight_N), _weighted(sums.count, weight_N))


def mean_jaccard(sums: OverlapSums, weight_N: Weights) -> Floats:
    """Mean over tokens of o / (2k - o), 0 to 1."""
    return _quotient(_weighted(sums.jaccard, weight_N), _weighted(sums.count, weight_N))


def mean_weighted_overlap(sums: OverlapSums, weight_N: Weights) -> Floats:
    """Mean over tokens of the sum of the smaller weights."""
    return _quotient(_weighted(sums.weighted, weight_N), _weighted(sums.count, weight_N))


def uniform_overlap(top_k: int, num_experts: int) -> float:
    """First null of `mean_overlap`: two uniform sets of k among E share k^2 / E (mean of the hypergeometric law)."""
    return top_k**2 / num_experts


def popularity_overlap(sums: OverlapSums, weight_N: Weights) -> Floats:
    """Second null: sum over experts of p_a(e) p_b(e), p(e) = share of all tokens whose choice holds e."""
    count = _weighted(sums.count, weight_N)
    both: Floats = (_weighted(sums.chosen_a, weight_N) * _weighted(sums.chosen_b, weight_N)).sum(-1)
    return both / count**2


def shuffled_overlap(sums: OverlapSums, weight_N: Weights) -> Floats:
    """Third null: mean overlap with tokens shuffled within their samples."""
    return _quotient(_weighted(sums.shuffled_overlap, weight_N), _weighted(sums.count, weight_N))


def shuffled_overlap_z(sums: OverlapSums) -> float:
    """Standard deviations of the shuffle by which the observed overlap exceeds it; NaN when the shuffle has none."""
    excess, variance = (sums.overlap - sums.shuffled_overlap).sum(), sums.shuffled_variance.sum()
    return float(excess / np.sqrt(variance)) if variance > 0 else float("nan")


# Norms ------------------------------------------------------------------------------------------------------------


def norm_sums(a: NDArray[np.floating], b: NDArray[np.floating], mask_NT: Mask) -> NormSums:
    """Norms of vectors (N, T, D) of two visits, e.g. what each visit adds to the residual stream."""
    _check_same(a, b, mask_NT)
    norm_a, norm_b = (np.linalg.norm(np.asarray(x, dtype=np.float64), axis=-1) for x in (a, b))
    return NormSums(a=np.where(mask_NT, norm_a, np.nan), b=np.where(mask_NT, norm_b, np.nan))


def median_norm_ratio(sums: NormSums, weight_N: Weights) -> float:
    """Median over tokens of norm(b) / norm(a); tokens with norm(a) = 0 are left out."""
    ratio_NT = np.divide(sums.b, sums.a, out=np.full_like(sums.a, np.nan), where=sums.a > 0)
    return float(np.nanmedian(np.repeat(ratio_NT, weight_N, axis=0)))


def rms_norm_ratio(sums: NormSums, weight_N: Weights) -> float:
    """Root mean square of norm(b) over that of norm(a)."""
    total_a, total_b = (_weighted(np.nansum(x**2, axis=1), weight_N) for x in (sums.a, sums.b))
    return float(np.sqrt(total_b / total_a))


# Intervals --------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A bootstrap interval; `low` and `high` have the shape of the statistic."""

    low: Floats
    high: Floats


def ones(num_samples: int) -> Weights:
    """The weight of each sample when none is resampled."""
    return np.ones(num_samples, dtype=np.int64)


def bootstrap_interval(
    statistic: Callable[[Weights], Floats | float],
    num_samples: int,
    *,
    seed: int = 0,
    num_resamples: int = 1_000,
    level: float = 0.95,
) -> Interval:
    """Percentile interval of a statistic over resamples of whole samples, drawn with replacement.

    `statistic` takes how often each sample counts, e.g. `lambda weight_N: raw_cosine(sums, weight_N)`. Raises
    UserError for fewer than two samples: they have no spread.
    """
    if num_samples < 2:
        raise UserError(f"samples for a bootstrap interval must be at least 2; got {num_samples}")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, num_samples])))
    draws_RN = (generator.random((num_resamples, num_samples)) * num_samples).astype(np.intp)
    values = np.array([statistic(np.bincount(draws_N, minlength=num_samples)) for draws_N in draws_RN])
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(np.asarray(low), np.asarray(high))
