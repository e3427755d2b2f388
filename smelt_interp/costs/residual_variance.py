"""How the variance of the residual stream grows along the steps, with the loop's 1/r and without.

Each step adds an update of variance s^2 times the update variance, s the step's scale. Updates of different layers are
independent; the updates of one layer on two visits have correlation rho. After v visits a layer has then added

    Var(sum of v updates) = s^2 (v + v (v - 1) rho) update variance

so that a layer visited r times adds (1 + (r - 1) rho) / r with s = 1/r, never more than a layer visited once, and
r (1 + (r - 1) rho) with s = 1, up to r^2.
"""

from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import pair
from smelt_interp.errors import run_command
from smelt_interp.plan import label, plan, step_scale
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, print_json, print_table
from smelt_interp.validation import Seed, Share, validated

Floats = NDArray[np.float64]

Variance = Annotated[float, Field(ge=0, le=1e100)]


def closed_form(config: ModelConfig, options: "VarianceOptions") -> Floats:
    """Variance of the stream after each step, shape (steps,)."""
    grown = options.start
    after = []
    for step in plan(config):
        # v + v (v - 1) rho rises by 1 + 2 (v - 1) rho at the v-th visit.
        of_a_visit = options.update_variance * (1 + 2 * step.visit * options.correlation)
        grown += step_scale(config, step) ** 2 * of_a_visit
        after.append(grown)
    return np.array(after)


def simulated(config: ModelConfig, options: "VarianceOptions", generator: np.random.Generator) -> Floats:
    """The same variance measured over random normal updates, shape (steps,).

    A layer's update is sqrt(rho) of what it says on every visit and sqrt(1 - rho) of what it says on this one.
    """
    rho, samples = options.correlation, options.samples
    shared_LN = generator.standard_normal((config.num_layers, samples))
    stream_N = np.sqrt(options.start) * generator.standard_normal(samples)
    after = []
    for step in plan(config):
        own_N = generator.standard_normal(samples)
        update_N = np.sqrt(rho) * shared_LN[step.layer] + np.sqrt(1 - rho) * own_N
        stream_N = stream_N + step_scale(config, step) * np.sqrt(options.update_variance) * update_N
        after.append(stream_N.var())
    return np.array(after)


@validated
class VarianceOptions:
    """Compare the closed form with a simulation, with the loop's scale and with scale 1."""

    pair: str = "200M"
    """The pair whose looped network it is."""
    correlation: Share = 0.5
    """Correlation of one layer's updates on two visits, 0 to 1."""
    update_variance: Variance = 1.0
    """Variance of one update before its scale."""
    start: Variance = 1.0
    """Variance of the embedding."""
    samples: Annotated[int, Field(ge=2, le=1_000_000)] = 20_000
    """Random streams."""
    seed: Seed = 0
    json: bool = False
    """Print JSON."""


def main() -> None:
    """Print the variance after each step, closed form and simulation, with and without the loop's scale."""
    options = parse(VarianceOptions, prog="python -m smelt_interp.costs.residual_variance", description=__doc__)
    config = pair(options.pair).smelt
    generator = np.random.default_rng(options.seed)
    columns: dict[str, Floats] = {}
    for name, scaled in (("scaled", config), ("unscaled", replace(config, loop_scale=1.0))):
        columns[name] = closed_form(scaled, options)
        columns[f"{name}_simulated"] = simulated(scaled, options, generator)
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
