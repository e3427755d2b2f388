"""Captures that tests of the dashboard look at: Dyck episodes with a planted start mass on each visit."""

from dataclasses import replace

from cache.batch import Batch
from cache.record import DEFAULT_SITES
from smelt_interp.config import ModelConfig
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from tests.support.planted import LOOPED, planted_batch, random_sites, start_pattern

VISIT_MASS = (0.6, 0.02)
"""Planted start mass on the first and the second visit."""


def episodes(config: ModelConfig = LOOPED, *, seed: int = 0, first_mass: float = VISIT_MASS[0]) -> Batch:
    """Three Dyck episodes; attention has the planted start mass, everything else is random."""
    samples = load_samples(DataOptions(samples=3, length=48, shots=(2,), max_total=6), 48, BYTES)
    batch = planted_batch(config, samples, random_sites(config, samples, DEFAULT_SITES, seed=seed))
    mass = (first_mass, *VISIT_MASS[1:])
    patterns = {
        (index, "attn.hook_pattern"): start_pattern(samples, config.num_heads, mass[step.visit])
        for index, step in enumerate(batch.architecture.steps)
    }
    return replace(batch, sites={**batch.sites, **patterns})
