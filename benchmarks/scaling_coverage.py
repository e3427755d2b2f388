"""How often the 95% intervals of the scaling fit hold a truth that was planted.

Each grid has, for the Baseline and for SMELT, 72 points: the four budgets of the paper's grid at three sparsity levels
(12 cells), six horizons each, drawn from the printed laws with 0.3% of independent log-normal noise.
"""

import sys
import time
from dataclasses import dataclass

import numpy as np
import tyro

from smelt_interp.costs.budget import budget
from smelt_interp.costs.presets import PAPER_ATTENDED_TOKENS, PAPER_PAIRS
from smelt_interp.scaling.fit import Grid, bootstrap, fit
from smelt_interp.scaling.law import Architecture, ScalingLaw, compute_gain, printed_law
from smelt_interp.scaling.robust_fit import interval

SPARSITIES = (0.85, 0.95, 0.97)
HORIZONS = np.geomspace(1.2e10, 2.16e11, 6)
"""Tokens; the last is the paper's whole stable phase and one decay branch."""
NOISE = 0.003
GAIN_COMPUTE, GAIN_SPARSITY = 1e21, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Plant grids, fit them, and count the intervals that hold the truth."""

    grids: int = 40
    draws: int = 200
    seed: int = 0
    """The first grid's; each further grid has the next."""


def planted(law: ScalingLaw, architecture: Architecture, generator: np.random.Generator) -> Grid:
    """A noisy grid of one architecture."""
    configs = [pair.baseline if architecture == "baseline" else pair.smelt for pair in PAPER_PAIRS.values()]
    flops = [budget(config, PAPER_ATTENDED_TOKENS).flops.training for config in configs]
    compute_N, sparsity_N, tokens_N = (axis.ravel() for axis in np.meshgrid(flops, SPARSITIES, HORIZONS, indexing="ij"))
    exact_N = np.asarray(law.loss(compute_N, sparsity_N, tokens_N))
    noise_N = np.exp(NOISE * generator.standard_normal(len(exact_N)))
    return Grid(flops_per_token=compute_N, sparsity=sparsity_N, tokens=tokens_N, loss=exact_N * noise_N)


def covered(seed: int, draws: int) -> dict[str, bool]:
    """Whether each quantity's interval of one planted pair of grids holds the truth."""
    generator = np.random.default_rng(seed)
    truth: dict[Architecture, ScalingLaw] = {}
    drawn: dict[Architecture, ScalingLaw] = {}
    held: dict[str, bool] = {}
    architectures: tuple[Architecture, ...] = ("baseline", "smelt")
    for architecture in architectures:
        truth[architecture] = printed_law(architecture)
        grid = planted(truth[architecture], architecture, generator)
        drawn[architecture] = bootstrap(grid, fit(grid), draws, generator, lambda _: None)
        actual, spread = truth[architecture].figures(), drawn[architecture].figures()
        for name in actual:
            low, high = interval(np.asarray(spread[name]))
            held[f"{name} {architecture}"] = bool(low <= actual[name] <= high)
    low, high = interval(compute_gain(drawn["baseline"], drawn["smelt"], GAIN_COMPUTE, GAIN_SPARSITY))
    gain = compute_gain(truth["baseline"], truth["smelt"], GAIN_COMPUTE, GAIN_SPARSITY)
    held["gain at 1e21, 95% sparse"] = bool(low <= gain <= high)
    return held


def main() -> None:
    """Print, for each quantity, in how many grids its interval held the truth."""
    options = tyro.cli(Options, description=__doc__)
    counts: dict[str, int] = {}
    start = time.monotonic()
    for index in range(options.grids):
        for name, holds in covered(options.seed + index, options.draws).items():
            counts[name] = counts.get(name, 0) + holds
        left = (time.monotonic() - start) / (index + 1) * (options.grids - index - 1)
        print(f"grid {index + 1} of {options.grids}, {left:.0f} s left", file=sys.stderr)
    print(
        f"{options.grids} planted grids a side, {options.draws} draws each, seeds {options.seed} to "
        f"{options.seed + options.grids - 1}, {NOISE:.1%} noise"
    )
    for name, count in counts.items():
        print(f"{name:28s} {count} of {options.grids}")


if __name__ == "__main__":
    main()
