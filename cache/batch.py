"""What a probe reads: a batch of samples with the sites recorded on them, from a file or from a running model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Samples
from smelt_interp.plan import Plan

SiteKey = tuple[int, str]
"""A step index in the plan, and a hook suffix of `smelt_interp.sites`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B samples with everything recorded on them; every array is numpy, whatever produced it."""

    config: ModelConfig
    plan: Plan
    samples: Samples
    """The B rows: tokens, lengths, roles, segment starts, domain, episode."""
    sample_ids: NDArray[np.int64]
    """Number of each row in the whole data set."""
    logprob_BT: NDArray[np.float32]
    """log p(ids[t + 1] | ids[..t]) in nats; 0 at the last position and on padding."""
    argmax_BT: NDArray[np.int32]
    """The most likely next token at each position."""
    sites: Mapping[SiteKey, NDArray[np.generic]]
    """Arrays with the axes of `smelt_interp.sites.SITES`, B first; the head axis holds the heads that were kept."""
    heads: Mapping[str, tuple[int, ...]]
    """For each suffix with a head axis, the numbers of the heads that were kept, in order."""
    bfloat16: frozenset[str] = frozenset()
    """Suffixes whose values are bfloat16 numbers in the network; the arrays hold them as float32, unchanged."""
