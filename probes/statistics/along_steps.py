"""Means over a sample's tokens at each step: the sums of many probes, the quantities made of them, their figure.

Position 0 of such a sum may be the state that enters the first step; it is then the null `entering` of every step.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.statistics.arrays import ratio, recorded_steps
from probes.statistics.grid import STEPS, Cell, Grid, Place
from probes.statistics.quantities import Quantity
from smelt_interp.architecture import Loop

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def predicts(batch: Batch) -> NDArray[np.bool_]:
    """Which positions predict a token of their own document that follows them. -> (B, T)"""
    samples = batch.samples
    start_BT, length = samples.segment_start_NT, samples.ids_NT.shape[1]
    inside_BT = np.arange(1, length + 1) < samples.length_N[:, None]
    inside_BT[:, :-1] &= start_BT[:, 1:] == start_BT[:, :-1]
    return inside_BT


def step_grid(batch: Batch, suffixes: Sequence[str], loops: tuple[Loop, ...]) -> Grid:
    """Every step on which these sites were recorded; every step of the plan for none."""
    steps = recorded_steps(batch, suffixes) if suffixes else tuple(range(len(batch.architecture.steps)))
    return Grid(architecture=batch.architecture, loops=loops, steps=steps)


def mean_at_steps(
    name: str,
    sum_RL: NDArray[np.float64],
    count_R: NDArray[np.float64],
    grid: Grid,
    n: int,
    *,
    entering: bool = False,
    places: Sequence[Place] = (),
    nulls: Mapping[str, float] | None = None,
    where: Mapping[str, Cell] | None = None,
) -> Quantity:
    """A mean at each step and over the looped layers, with the change from visit to visit."""
    value_RL = ratio(sum_RL, count_R[:, None])
    null = {**(nulls or {}), **({"entering": float(value_RL[0, 0])} if entering else {})}
    return Quantity(
        name=name,
        value_RLH=value_RL[:, int(entering) :, None],
        places=places or grid.places(STEPS),
        n=n,
        nulls=null,
        change=True,
        where=dict(where or {}),
    )


def lines(title: str, grid: Grid, quantities: Sequence[Quantity], y: str) -> "Figure":
    """A line for each quantity along the steps, each null dotted."""
    from plotly.graph_objects import Figure, Scatter

    drawn: Figure = Figure()
    labels = grid.labels()
    for quantity in quantities:
        places = [place for place in quantity.places if place.level == "layer" and not quantity.undefined]
        words = ", ".join([quantity.name, *map(str, quantity.where.values())])
        at = [labels[place.positions[0]] for place in places]
        values = [quantity.at(place)[0] for place in places]
        drawn.add_trace(Scatter(x=at, y=values, name=words, legendgroup=words, mode="lines+markers"))
        for null in quantity.nulls if places else ():
            values = [quantity.null_at(place)[null] for place in places]
            style = {"legendgroup": words, "mode": "lines", "line": {"dash": "dot"}, "visible": "legendonly"}
            drawn.add_trace(Scatter(x=at, y=values, name=f"{words}: {null}", **style))
    drawn.update_layout(title=title, height=520, yaxis_title=y)
    return drawn
