"""How the variance of the residual stream grows along the steps, with the loop's 1/r and without (section 3.3).

Each step adds an update of variance s^2 times the update variance, s the step's scale. Updates of different layers are
independent; the updates of one layer on two visits have correlation rho. After v visits a layer has then added

    Var(sum of v updates) = s^2 (v + v (v - 1) rho) update variance

so that a layer visited r times adds (1 + (r - 1) rho) / r with s = 1/r, never more than a layer visited once, and
r (1 + (r - 1) rho) with s = 1, up to r^2.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import pair
from smelt_interp.errors import UserError, run_command
from smelt_interp.plan import label, plan, step_scale
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, print_json, print_table

Floats = NDArray[np.float64]

MOST_SAMPLES = 1_000_000
LARGEST_VARIANCE = 1e100


def closed_form(config: ModelConfig, correlation: float, update_variance: float = 1.0, start: float = 1.0) -> Floats:
    """Variance of the stream after each step, shape (steps,); `start` is the embedding's."""
    _check(correlation, update_variance, start)
    grown = start
    after = []
    for step in plan(config):
        # v + v (v - 1) rho rises by 1 + 2 (v - 1) rho at the v-th visit.
        grown += step_scale(config, step) ** 2 * update_variance * (1 + 2 * step.visit * correlation)
        after.append(grown)
    return np.array(after)


def simulated(
    config: ModelConfig,
    correlation: float,
    generator: np.random.Generator,
    samples: int = 20_000,
    update_variance: float = 1.0,
    start: float = 1.0,
) -> Floats:
    """The same variance measured over random normal updates, shape (steps,).

    A layer's update is sqrt(rho) of what it says on every visit and sqrt(1 - rho) of what it says on this one.
    """
    _check(correlation, update_variance, start)
    if not 2 <= samples <= MOST_SAMPLES:
        raise UserError(f"samples must be from 2 to {MOST_SAMPLES}; got {samples}")
    shared_LN = generator.standard_normal((config.num_layers, samples))
    stream_N = np.sqrt(start) * generator.standard_normal(samples)
    after = []
    for step in plan(config):
        own_N = generator.standard_normal(samples)
        update_N = np.sqrt(correlation) * shared_LN[step.layer] + np.sqrt(1 - correlation) * own_N
        stream_N = stream_N + step_scale(config, step) * np.sqrt(update_variance) * update_N
        after.append(stream_N.var())
    return np.array(after)


def _check(correlation: float, update_variance: float, start: float) -> None:
    if not 0 <= correlation <= 1:
        raise UserError(f"correlation must be from 0 to 1; got {correlation}")
    for name, value in (("update_variance", update_variance), ("start", start)):
        if not 0 <= value <= LARGEST_VARIANCE:
            raise UserError(f"{name} must be from 0 to {LARGEST_VARIANCE:g}; got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare the closed form with a simulation, with the loop's scale and with scale 1."""

    pair: str = "200M"
    """The pair whose looped network it is."""
    correlation: float = 0.5
    """Correlation of one layer's updates on two visits, 0 to 1."""
    update_variance: float = 1.0
    """Variance of one update before its scale."""
    start: float = 1.0
    """Variance of the embedding."""
    samples: int = 20_000
    seed: int = 0
    json: bool = False
    """Print JSON."""


def main() -> None:
    """Print the variance after each step, closed form and simulation, with and without the loop's scale."""
    options = parse(Options, prog="python -m smelt_interp.costs.residual_variance", description=__doc__)
    config = pair(options.pair).smelt
    if options.seed < 0:
        raise UserError(f"--seed must be at least 0; got {options.seed}")
    generator = np.random.default_rng(options.seed)
    columns: dict[str, Floats] = {}
    for name, scaled in (("scaled", config), ("unscaled", replace(config, loop_scale=1.0))):
        columns[name] = closed_form(scaled, options.correlation, options.update_variance, options.start)
        columns[f"{name}_simulated"] = simulated(
            scaled, options.correlation, generator, options.samples, options.update_variance, options.start
        )
    if options.json:
        steps = [step._asdict() for step in plan(config)]
        print_json({"steps": steps, "seed": options.seed} | {name: values.tolist() for name, values in columns.items()})
        return
    rows: list[list[Cell]] = [
        [label(step), *(f"{values[index]:.4f}" for values in columns.values())]
        for index, step in enumerate(plan(config))
    ]
    print_table(
        Table(
            f"Variance of the stream, correlation {options.correlation}, loop scale {config.loop_scale} and 1",
            ["after", *columns],
            rows,
        )
    )


if __name__ == "__main__":
    run_command(main)
