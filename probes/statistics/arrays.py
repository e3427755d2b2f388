"""Arrays of a batch as probes read them: numpy from a capture, torch tensors on the network's device while it runs.

Both are annotated as numpy arrays. What probes call on them is what both share: einops, operators, and the functions
of `array_namespace(x)`. Each batch is reduced to small sums where its tensors are; only those become numpy arrays.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array
from einops import rearrange
from numpy.typing import NDArray

from cache.batch import Batch
from smelt_interp.architecture import Architecture
from smelt_interp.arrays import Array, measured
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, hook_name

Floats = NDArray[np.floating]
Mask = NDArray[np.bool_]


def to_numpy(x: Array) -> NDArray[np.float64]:
    """The array in float64 on the CPU."""
    return np.asarray(x.detach().cpu() if is_torch_array(x) else x, np.float64)


def like(values: NDArray[np.generic], x: Floats) -> Floats:
    """A numpy array as one of the kind, the type and the device of `x`."""
    made: Floats = array_namespace(x).asarray(values, dtype=x.dtype, device=device(x))
    return made


def site(batch: Batch, step: int, suffix: str) -> Floats:
    """A site's array where it is, in single precision or better."""
    x = cast("Floats", batch.sites[step, suffix])
    xp = array_namespace(x)
    if x.dtype in (xp.float32, xp.float64):
        return x
    single: Floats = xp.astype(x, xp.float32)
    return single


def token_values(batch: Batch, step: int, suffix: str) -> NDArray[np.float64]:
    """A site's numbers (B, T, ...) in float64 where it is, 0 on padding, whatever stood there; a pattern's axes are
    (B, T, Q, S).

    Raises UserError for a token with one that is no number, or infinite.
    """
    x = batch.sites[step, suffix]
    values = measured(
        rearrange(x, "b q t s -> b t q s") if SITES[suffix].axes == "BQTS" else x, is_token(batch.samples)
    )
    xp = array_namespace(values)
    if not bool(xp.isfinite(xp.sum(values))):
        worst = float(values[~xp.isfinite(values)][0])
        raise UserError(
            f"{hook_name(step, suffix)} must hold finite numbers; got {worst} among samples "
            f"{batch.sample_ids[0]} to {batch.sample_ids[-1]}: mend the network, or record it with --dtype float32"
        )
    return values


def values_of_steps(batch: Batch, steps: Sequence[int], suffix: str) -> NDArray[np.float64]:
    """`token_values` of several steps at once, side by side: (B, T, L, ...). Of no pattern: its axes begin B, Q."""
    recorded = [batch.sites[step, suffix] for step in steps]
    xp = array_namespace(recorded[0])
    values = measured(xp.stack(recorded, axis=2), is_token(batch.samples))
    if not bool(xp.isfinite(xp.sum(values))):
        for step in steps:
            token_values(batch, step, suffix)  # which says where
    return values


def query_heads(x: Floats, axis: int, kept: Sequence[int], heads: Sequence[int], architecture: Architecture) -> Floats:
    """A site's array with the query heads `heads` on its head axis, which holds the heads `kept`.

    Where the kept ones are key/value heads, each is repeated for the queries that it serves. Raises UserError for a
    head that was not kept.
    """
    group = architecture.num_heads // architecture.num_kv_heads if axis == 2 else 1
    wanted = [head // group for head in heads]
    if missing := set(wanted) - set(kept):
        raise UserError(f"the measured heads must have been recorded; head {min(missing) + 1} of {len(kept)} was not")
    if wanted == list(kept):
        return x
    xp = array_namespace(x)
    index = xp.asarray([kept.index(head) for head in wanted], device=device(x))
    chosen: Floats = xp.take(x, index, axis=axis)
    return chosen


def is_token(samples: Samples) -> Mask:
    """Which positions hold a token and not padding. -> (B, T)"""
    real_BT = np.arange(samples.ids_NT.shape[1]) < samples.length_N[:, None]
    return np.asarray(real_BT & (samples.role_NT != Role.PAD))


def recorded_steps(batch: Batch, suffixes: Sequence[str]) -> tuple[int, ...]:
    """The steps on which every one of these suffixes was recorded. Raises UserError when there is none."""
    steps = tuple(
        step for step in range(len(batch.architecture.steps)) if all((step, s) in batch.sites for s in suffixes)
    )
    if not steps:
        have = ", ".join(sorted({suffix for _, suffix in batch.sites})) or "no site"
        raise UserError(
            f"a capture must hold {', '.join(suffixes)} on the same steps; got {have}: record it again with those sites"
        )
    return steps


def ratio(top: Floats, bottom: Floats) -> NDArray[np.float64]:
    """top / bottom of numpy arrays, NaN where the bottom is 0."""
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    quotient: NDArray[np.float64] = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
    return quotient
