"""What a probe reads: a batch of samples with the sites recorded on them, from a file or from a running model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from smelt_interp.architecture import Architecture
from smelt_interp.arrays import Array, moved
from smelt_interp.data.samples import Samples

SiteKey = tuple[int, str]
"""A step index in the plan, and a hook suffix of `smelt_interp.sites`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B samples with everything recorded on them: numpy arrays from a capture, tensors on its device from a network."""

    architecture: Architecture
    samples: Samples
    """The B rows: tokens, lengths, roles, segment starts, domain, episode."""
    sample_ids: NDArray[np.int64]
    """Number of each row in the whole data set."""
    logprob_BT: Array
    """log p(ids[t + 1] | ids[..t]) in nats, float32; 0 at the last position and on padding."""
    argmax_BT: Array
    """The most likely next token at each position, int32."""
    sites: Mapping[SiteKey, Array]
    """Arrays with the axes of `smelt_interp.sites.SITES`, B first; the head axis holds the heads that were kept. Not
    to be written over: of a network, the stream after a step may be that before the next one, the very tensor."""
    heads: Mapping[str, tuple[int, ...]]
    """For each suffix with a head axis, the numbers of the heads that were kept, in order."""
    bfloat16: frozenset[str] = frozenset()
    """Suffixes whose values are bfloat16 numbers in the network; the arrays hold them as float32, unchanged."""


def take(batch: Batch, which: NDArray[np.intp]) -> Batch:
    """The chosen samples of a batch, with their ids."""
    return replace(
        batch,
        samples=batch.samples.rows(which),
        sample_ids=batch.sample_ids[which],
        logprob_BT=_rows(batch.logprob_BT, which),
        argmax_BT=_rows(batch.argmax_BT, which),
        sites={key: _rows(array, which) for key, array in batch.sites.items()},
    )


def _rows(array: Array, which: NDArray[np.intp]) -> Array:
    chosen: Array = array_namespace(array).take(array, moved(which, array), axis=0)
    return chosen
