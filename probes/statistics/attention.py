"""What is read off attention patterns: sums over the keys that a query sees, its segment's start, entropy.

Arrays are numpy or torch; B samples, Q query heads, T query positions, S key positions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from probes.statistics.arrays import Floats, Mask, is_token, like
from smelt_interp.data.samples import Samples

BLOCK_ROWS = 64
"""Queries that are taken together: their rows stay in a processor's cache while everything is read off them."""


class Keys(NamedTuple):
    """Which queries are averaged, and what the keys are that each can see: 1 where it holds, 0 elsewhere."""

    averaged_BT: Floats
    token_BT: Floats
    seen_BTS: Floats
    """Keys of the query's own segment; up to itself where attention is causal."""
    content_BS: Floats
    apart_BT: Floats
    """Whether a query is not its segment's start, whose mass on itself is start mass."""
    start_BT: NDArray[np.integer]
    """s(t)."""
    packed: bool
    """Whether any segment starts after the first position."""
    causal: bool

    def moved(self, x: Floats) -> "Keys":
        """The same where `x` is, and of its type."""
        masks = (self.averaged_BT, self.token_BT, self.seen_BTS, self.content_BS, self.apart_BT)
        start_BT = array_namespace(x).asarray(self.start_BT, device=device(x))
        averaged_BT, token_BT, seen_BTS, content_BS, apart_BT = (like(mask, x) for mask in masks)
        return Keys(averaged_BT, token_BT, seen_BTS, content_BS, apart_BT, start_BT, self.packed, self.causal)


def seen_keys(samples: Samples, *, causal: bool) -> Mask:
    """Which keys each query can see: those of its own segment, later ones too unless causal; padding neither sees nor
    is seen. -> (B, T, S)"""
    start_BT, token_BT = samples.segment_start_NT, is_token(samples)
    position_S = np.arange(start_BT.shape[1])
    if causal:
        seen_BTS = (position_S <= position_S[:, None]) & (position_S >= start_BT[:, :, None])
    else:
        seen_BTS = start_BT[:, :, None] == start_BT[:, None]
    found: Mask = seen_BTS & token_BT[:, :, None] & token_BT[:, None]
    return found


def at_start(x_BQTS: Floats, found: Keys) -> Floats:
    """The entry of each query's segment start; an axis Q or T of length one stands for all. -> (B, Q, T)"""
    if not found.packed:
        return x_BQTS[..., 0]
    xp = array_namespace(x_BQTS)
    rows_BQTS = xp.broadcast_to(x_BQTS, (*x_BQTS.shape[:2], found.start_BT.shape[1], x_BQTS.shape[3]))
    index_BQT1 = xp.broadcast_to(found.start_BT[:, None, :, None], (*rows_BQTS.shape[:3], 1))
    entries: Floats = xp.take_along_axis(rows_BQTS, index_BQT1, axis=-1)[..., 0]
    return entries


def key_masses(pattern_BQTS: Floats, averaged_BT: Floats) -> Floats:
    """The mass that each key takes from the averaged queries together. -> (B, Q, S)"""
    num_samples, num_heads, length = pattern_BQTS.shape[:3]
    averaged_BQ1T = array_namespace(pattern_BQTS).broadcast_to(
        averaged_BT[:, None, None], (num_samples, num_heads, 1, length)
    )
    masses_BQS: Floats = (averaged_BQ1T @ pattern_BQTS)[..., 0, :]
    return masses_BQS


def seen_total(x_BQS: Floats, found: Keys) -> Floats:
    """Numbers of keys, summed over those that each query can see. -> (B, Q, T)"""
    xp = array_namespace(x_BQS)
    if not found.causal:
        total_BQT: Floats = x_BQS @ found.seen_BTS.mT
        return total_BQT
    running_BQT: Floats = xp.cumulative_sum(x_BQS, axis=-1)
    if not found.packed:
        return running_BQT
    return running_BQT - at_start((running_BQT - x_BQS)[:, :, None], found)


def share(part: Floats, whole: Floats) -> Floats:
    """part / whole, 0 where the whole is 0."""
    xp = array_namespace(whole)
    quotient: Floats = part / xp.where(whole > 0, whole, xp.ones_like(whole))
    return quotient


def seen_rows(pattern_BQTS: Floats, found: Keys) -> Iterator[tuple[slice, Floats]]:
    """The pattern in blocks of queries: which, and their rows (B, Q, T, S), 0 for a key that a query cannot see. Keys
    that lie ahead of a whole block are left out."""
    length = pattern_BQTS.shape[2]
    for first in range(0, length, BLOCK_ROWS):
        stop = min(first + BLOCK_ROWS, length)
        keys = slice(0, stop if found.causal else length)
        yield slice(first, stop), pattern_BQTS[:, :, first:stop, keys] * found.seen_BTS[:, None, first:stop, keys]


def entropy(rows_BQTS: Floats) -> Floats:
    """Entropy of each query's attention, in nats. -> (B, Q, T)"""
    xp = array_namespace(rows_BQTS)
    tiny = 1e-30  # counts for nothing beside a mass, and the logarithm of 0 or a denormal takes ten times as long
    nats_BQT: Floats = -xp.sum(xp.log(rows_BQTS + tiny) * rows_BQTS, axis=-1)
    return nats_BQT


def by_position(key_BQS: Floats, found: Keys) -> Floats:
    """Numbers of keys by their position in their segment, whichever segment that is. -> (B, Q, positions)"""
    if not found.packed:
        return key_BQS
    position_S = np.arange(found.start_BT.shape[1])
    moves_BSP = (position_S - found.start_BT)[..., None] == position_S
    moved: Floats = key_BQS @ like(moves_BSP, key_BQS)
    return moved
