"""How alike two visits are: cosines, attention patterns and expert choices, each with its null.

Every measure has two stages. `*_sums` reduces two arrays over the tokens of each sample to small sums by name, so that
batches of any size give the same; it runs on numpy arrays and on torch tensors alike, in float64. The other functions
take such sums added up over samples, in numpy, and turn them into the number; axes before the measure's own, such as
resamples and steps, stay.

"Shuffled" means: each token is compared with a token of its own sample, by a uniform random permutation of the
sample's measured tokens. What is returned is the exact expectation over all permutations (and, for experts, the exact
variance: Hoeffding 1951), not one draw of it.

Axes: N samples, T tokens, S keys, K chosen experts, E experts, C components; `...` stands for any axes between, such
as steps and heads. mask_NT says which tokens are measured; what stands at the others never counts.
"""

from collections.abc import Mapping

import numpy as np
from array_api_compat import array_namespace
from einops import einsum, rearrange, reduce

from smelt_interp.arrays import Array, Floats, floats, measured
from smelt_interp.errors import UserError

Sums = Mapping[str, Floats]

ROW_SUM_TOLERANCE = 1e-3
"""How far an attention row may be from 1 without a learned sink: float16 storage moves a sum by up to 5e-4."""


def quotient(x: Floats, y: Floats) -> Floats:
    """x / y, NaN where y is 0 or less."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64))
    divided: Floats = np.divide(x, y, out=np.full(x.shape, np.nan), where=y > 0)
    return divided


def _check_same(mask_NT: Array, *arrays: Array) -> None:
    shapes = {tuple(x.shape) for x in arrays}
    if len(shapes) > 1 or next(iter(shapes))[:2] != tuple(mask_NT.shape):
        named = ", ".join(str(tuple(x.shape)) for x in arrays)
        raise UserError(
            f"arrays to compare must have one shape that begins with the mask's; got {named}, mask {mask_NT.shape}"
        )


# Cosine -----------------------------------------------------------------------------------------------------------


def cosine_sums(a: Array, b: Array, mask_NT: Array) -> dict[str, Floats]:
    """Sums over two vectors (N, T, ..., C) a token. A zero vector has cosine 0 with everything.

    count, cosine (of a and b), dot, square_a, square_b (N, ...); total_a, total_b (N, ..., C); shuffled_cosine and
    shuffled_dot (N, ...), what `cosine` and `dot` are expected to be with the tokens of b shuffled.
    """
    _check_same(mask_NT, a, b)
    xp = array_namespace(a)
    a, b = (measured(x, mask_NT) for x in (a, b))
    dot, square_a, square_b = (einsum(x, y, "n t ... c, n t ... c -> n t ...") for x, y in ((a, b), (a, a), (b, b)))
    # One over the length, and 0 for a zero vector.
    inverse_a, inverse_b = (xp.where(x > 0, 1 / xp.sqrt(xp.where(x > 0, x, 1.0)), 0.0) for x in (square_a, square_b))
    unit_a, unit_b = (
        einsum(x, inverse, "n t ... c, n t ... -> n ... c") for x, inverse in ((a, inverse_a), (b, inverse_b))
    )
    total_a, total_b = (reduce(x, "n t ... c -> n ... c", "sum") for x in (a, b))
    count = reduce(measured(xp.ones_like(dot), mask_NT), "n t ... -> n ...", "sum")
    once = xp.where(count > 0, count, 1.0)
    return {
        "count": count,
        "cosine": reduce(dot * inverse_a * inverse_b, "n t ... -> n ...", "sum"),
        "shuffled_cosine": xp.sum(unit_a * unit_b, axis=-1) / once,
        "dot": reduce(dot, "n t ... -> n ...", "sum"),
        "shuffled_dot": xp.sum(total_a * total_b, axis=-1) / once,
        "square_a": reduce(square_a, "n t ... -> n ...", "sum"),
        "square_b": reduce(square_b, "n t ... -> n ...", "sum"),
        "total_a": total_a,
        "total_b": total_b,
    }


def raw_cosine(sums: Sums) -> Floats:
    """Mean over tokens of cos(a, b)."""
    return quotient(sums["cosine"], sums["count"])


def shuffled_raw_cosine(sums: Sums) -> Floats:
    """The null of `raw_cosine`: not 0 when vectors share an offset."""
    return quotient(sums["shuffled_cosine"], sums["count"])


def centred_cosine(sums: Sums) -> Floats:
    """Pooled centred cosine: sum <a - ma, b - mb> / sqrt(sum |a - ma|^2 sum |b - mb|^2).

    ma and mb are means over all measured tokens of a visit. NaN where all vectors of a visit are equal.
    """
    return _centred(sums, sums["dot"])


def shuffled_centred_cosine(sums: Sums) -> Floats:
    """The null of `centred_cosine`: what samples, rather than tokens, have in common."""
    return _centred(sums, sums["shuffled_dot"])


def _centred(sums: Sums, dot: Floats) -> Floats:
    count = sums["count"]
    mean_a, mean_b = (quotient(sums[total], count[..., None]) for total in ("total_a", "total_b"))
    spread_a = sums["square_a"] - count * (mean_a**2).sum(-1)
    spread_b = sums["square_b"] - count * (mean_b**2).sum(-1)
    scale = np.sqrt(np.maximum(spread_a, 0) * np.maximum(spread_b, 0))
    return quotient(dot - count * (mean_a * mean_b).sum(-1), scale)


# Attention patterns -----------------------------------------------------------------------------------------------


def _distribution(rows: Array) -> tuple[Floats, Floats]:
    """Attention rows (..., S) divided by their sum with what a learned sink took, and its share (...).

    A shortfall that storage explains is none: completing one row of a pair with 2e-4 would set equal rows 0.01 apart.
    """
    xp = array_namespace(rows)
    row = floats(rows)
    total = xp.sum(row, axis=-1)
    taken = xp.where(1 - total > ROW_SUM_TOLERANCE, 1 - total, 0.0)
    whole: Floats = total + taken
    return row / whole[..., None], taken / whole


def _divergence(p: Floats, q: Floats) -> Floats:
    """Of each outcome: p log2(p / m) + q log2(q / m), m their mean; 0 log 0 is 0."""
    xp = array_namespace(p)
    tiny = np.finfo(np.float64).tiny
    middle = xp.clip((p + q) / 2, tiny, None)
    found: Floats = sum(x * xp.log2(xp.clip(x, tiny, None) / middle) for x in (p, q))
    return found


def jensen_shannon_distance(rows_a: Array, rows_b: Array) -> Floats:
    """Square root of the Jensen-Shannon divergence in bits between attention rows (..., S): 0 to 1. -> (...)

    A row that sums to less than 1 by more than ROW_SUM_TOLERANCE is completed by one more outcome, the mass that a
    learned sink took.
    """
    xp = array_namespace(rows_a)
    (p, taken_p), (q, taken_q) = _distribution(rows_a), _distribution(rows_b)
    divergence = xp.sum(_divergence(p, q), axis=-1) + _divergence(taken_p, taken_q)
    distance: Floats = xp.sqrt(xp.clip(divergence / 2, 0, 1))
    return distance


def row_cosine(rows_a: Array, rows_b: Array) -> Floats:
    """Cosine between rows (..., S); 0 where one of them is zero. -> (...)"""
    xp = array_namespace(rows_a)
    a, b = floats(rows_a), floats(rows_b)
    dot, square_a, square_b = (xp.sum(x * y, axis=-1) for x, y in ((a, b), (a, a), (b, b)))
    scale = xp.sqrt(square_a) * xp.sqrt(square_b)
    cosine: Floats = dot / xp.where(scale > 0, scale, 1.0)
    return cosine


def pattern_sums(rows_a: Array, rows_b: Array, mask_NT: Array) -> dict[str, Floats]:
    """Sums over two attention rows (N, T, ..., S) a query: count, distance (Jensen-Shannon), cosine (N, ...).

    Leave out each segment's first query: it has one key, so its two rows are equal. The null is this function with
    `rows_b` taken from other samples of the same layout.
    """
    _check_same(mask_NT, rows_a, rows_b)
    rows_a, rows_b = measured(rows_a, mask_NT), measured(rows_b, mask_NT)
    distance, cosine = (measured(f(rows_a, rows_b), mask_NT) for f in (jensen_shannon_distance, row_cosine))
    count = measured(array_namespace(rows_a).ones_like(cosine), mask_NT)
    summed = {"count": count, "distance": distance, "cosine": cosine}
    return {name: reduce(x, "n t ... -> n ...", "sum") for name, x in summed.items()}


def pattern_distance(sums: Sums) -> Floats:
    """Mean Jensen-Shannon distance over queries."""
    return quotient(sums["distance"], sums["count"])


def pattern_cosine(sums: Sums) -> Floats:
    """Mean cosine of attention rows over queries."""
    return quotient(sums["cosine"], sums["count"])


# Experts ----------------------------------------------------------------------------------------------------------


def expert_overlap(experts_a: Array, experts_b: Array) -> Floats:
    """Size of the intersection of two sets of chosen experts (..., K). -> (...)"""
    return _overlap(_same_expert(experts_a, experts_b))


def _overlap(same: Array) -> Floats:
    xp = array_namespace(same)
    overlap: Floats = xp.sum(floats(same), axis=(-2, -1))
    return overlap


def _weighted(same: Array, weights_a: Array, weights_b: Array) -> Floats:
    xp = array_namespace(weights_a)
    a, b = floats(weights_a), floats(weights_b)
    total: Floats = xp.sum(xp.where(same, xp.minimum(a[..., :, None], b[..., None, :]), 0.0), axis=(-2, -1))
    return total


def _same_expert(experts_a: Array, experts_b: Array) -> Array:
    """Whether the i-th choice of a is the j-th of b. (..., K), (..., K) -> (..., K, K)"""
    first, second = rearrange(experts_a, "... k -> ... k 1"), rearrange(experts_b, "... k -> ... 1 k")
    same: Array = array_namespace(experts_a).equal(first, second)
    return same


def chosen(experts: Array, mask_NT: Array, num_experts: int) -> Floats:
    """1 where a token's choice (N, T, ..., K) holds the expert, 0 elsewhere and where not measured. -> (N, T, ..., E)

    Raises UserError for an expert outside 0 to num_experts - 1.
    """
    xp = array_namespace(experts)
    at = xp.astype(measured(experts, mask_NT), xp.int64)
    if (outside := at[(at < 0) | (at >= num_experts)]).shape[0]:
        raise UserError(f"chosen experts must be 0 to {num_experts - 1}; got {int(outside[0])}: record it again")
    each = xp.arange(num_experts, device=at.device)
    held = xp.any(rearrange(at, "... k -> ... k 1") == each, axis=-2)
    return measured(held, mask_NT)


def shared_sums(
    experts_a: Array, weights_a: Array, experts_b: Array, weights_b: Array, mask_NT: Array
) -> dict[str, Floats]:
    """Sums over the chosen experts and their weights, all (N, T, ..., K), of two visits.

    count, overlap (o), jaccard (o / (2k - o)), weighted (the sum of the smaller weights), each (N, ...).
    """
    _check_same(mask_NT, experts_a, experts_b, weights_a, weights_b)
    same = _same_expert(experts_a, experts_b)
    overlap = measured(_overlap(same), mask_NT)  # padding may repeat an expert
    xp = array_namespace(overlap)
    jaccard, weighted = overlap / (2 * experts_a.shape[-1] - overlap), _weighted(same, weights_a, weights_b)
    each = measured(xp.stack([xp.ones_like(overlap), overlap, jaccard, weighted], axis=-1), mask_NT)
    names, summed = ("count", "overlap", "jaccard", "weighted"), reduce(each, "n t ... m -> n ... m", "sum")
    return {name: summed[..., m] for m, name in enumerate(names)}


def overlap_sums(
    experts_a: Array, weights_a: Array, experts_b: Array, weights_b: Array, mask_NT: Array, num_experts: int
) -> dict[str, Floats]:
    """`shared_sums`, and what they are expected to be when the tokens of b are shuffled.

    chosen_a, chosen_b (N, ..., E), tokens that chose each expert; shuffled_overlap, shuffled_variance (N, ...), mean
    and variance of `overlap` under the shuffle. Over permutations pi the sum of o(i, pi(i)) has, for any matrix o, mean
    (sum of o) / n and variance (sum of d^2) / (n - 1), d being o with its row and column means taken out (Hoeffding
    1951). Here o = a b', so sum d^2 = <a'a, b'b> of the column-centred indicators.
    """
    xp = array_namespace(experts_a)
    sums = shared_sums(experts_a, weights_a, experts_b, weights_b, mask_NT)
    # Both visits at once, (N, 2, ...).
    held = rearrange(chosen(xp.stack([experts_a, experts_b], axis=2), mask_NT, num_experts), "n t ... e -> n ... t e")
    total = reduce(held, "n ... t e -> n ... e", "sum")
    once, pairs = (xp.where(x > 0, x, 1.0) for x in (sums["count"], sums["count"] - 1))
    # Gram matrices (N, 2, ..., E, E) of the indicators with their means over tokens taken out.
    outer = total[..., :, None] * total[..., None, :]
    gram = xp.matrix_transpose(held) @ held - outer / once[:, None, ..., None, None]
    chosen_a, chosen_b = total[:, 0], total[:, 1]
    return sums | {
        "shuffled_overlap": xp.sum(chosen_a * chosen_b, axis=-1) / once,
        "shuffled_variance": xp.sum(gram[:, 0] * gram[:, 1], axis=(-2, -1)) / pairs,
        "chosen_a": chosen_a,
        "chosen_b": chosen_b,
    }


def mean_overlap(sums: Sums) -> Floats:
    """Mean over tokens of the experts kept, 0 to k."""
    return quotient(sums["overlap"], sums["count"])


def mean_jaccard(sums: Sums) -> Floats:
    """Mean over tokens of o / (2k - o), 0 to 1."""
    return quotient(sums["jaccard"], sums["count"])


def mean_weighted_overlap(sums: Sums) -> Floats:
    """Mean over tokens of the sum of the smaller weights."""
    return quotient(sums["weighted"], sums["count"])


def uniform_overlap(top_k: int, num_experts: int) -> float:
    """First null of `mean_overlap`: two uniform sets of k among E share k^2 / E (mean of the hypergeometric law)."""
    return top_k**2 / num_experts


def popularity_overlap(sums: Sums) -> Floats:
    """Second null: sum over experts of p_a(e) p_b(e), p(e) = share of all tokens whose choice holds e."""
    return quotient((sums["chosen_a"] * sums["chosen_b"]).sum(-1), sums["count"] ** 2)


def shuffled_overlap(sums: Sums) -> Floats:
    """Third null: mean overlap with tokens shuffled within their samples."""
    return quotient(sums["shuffled_overlap"], sums["count"])


def shuffled_overlap_z(sums: Sums) -> Floats:
    """Standard deviations of the shuffle by which the observed overlap exceeds it; NaN when the shuffle has none."""
    return quotient(sums["overlap"] - sums["shuffled_overlap"], np.sqrt(sums["shuffled_variance"]))
