"""Is the first token of a text larger than the others: in the residual stream, in its key and value, in few channels?

The start is the first position of a segment, whatever token stands there. Norms are of what enters a layer, and of its
keys and values, mean over the heads.

    norm, start/other        mean over samples of the mean norm at the starts divided by that of the other tokens
    massive channels         entries of the residual above `floor` and above `times` times the median magnitude of their
                             token's channels (arXiv:2402.17762), a start; beside it the same of the other tokens
    largest channel/median   the largest entry divided by that median, the same way
"""

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import Floats, is_token, like, ratio, recorded_steps, site
from probes.statistics.grid import Grid, Place
from probes.statistics.quantities import Quantity, no_note
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Massive activations"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ({"quantity": "residual norm, start/other"},)

SITES = {"residual": "hook_resid_pre", "key": "attn.hook_k", "value": "attn.hook_v"}
COUNTED = ("massive channels", "largest channel/median")


@validated
class Options:
    """When an entry of the residual stream counts as massive."""

    floor: Annotated[float, Field(ge=0, le=1e12)] = 100.0
    """Least magnitude."""
    times: Annotated[float, Field(ge=0, le=1e12)] = 1000.0
    """Least multiple of the median magnitude of the token's channels."""


def needs(architecture: Architecture) -> tuple[str, ...]:
    """What enters a layer, its keys and its values."""
    return tuple(SITES.values())


def start(architecture: Architecture, options: Options) -> Sums[Grid, Options]:
    """Norms and massive entries at the starts and elsewhere, by sample."""
    return Sums(architecture, options, lay_out, reduce, quantities)


def result(sums: Sums[Grid, Options]) -> Result:
    """Ratios of norms, massive channels, and their course along the steps as a figure."""
    return answer(sums, figures)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grid:
    """The steps on which all three sites were recorded."""
    steps = recorded_steps(batch, tuple(SITES.values()))
    return Grid(architecture=batch.architecture, loops=loops, steps=steps)


def massive(resid_BTD: Floats, options: Options) -> tuple[Floats, Floats]:
    """How many channels of a token are massive, and its largest channel as a multiple of the median. -> (B, T) each"""
    xp = array_namespace(resid_BTD)
    size_BTD = xp.sort(xp.abs(resid_BTD), axis=-1)
    width = size_BTD.shape[-1]
    median_BT = (size_BTD[..., (width - 1) // 2] + size_BTD[..., width // 2]) / 2
    median_BT = xp.where(median_BT > 0, median_BT, xp.full_like(median_BT, float(np.finfo(np.float32).tiny)))
    is_massive_BTD = (size_BTD > options.floor) & (size_BTD > options.times * median_BT[..., None])
    return xp.sum(xp.astype(is_massive_BTD, size_BTD.dtype), axis=-1), size_BTD[..., -1] / median_BT


def reduce(batch: Batch, grid: Grid, options: Options) -> Reduced:
    """Ratios of norms and counts of each sample, at each step and then for each headline group of steps."""
    samples, token_BT = batch.samples, is_token(batch.samples)
    is_start_BT = token_BT & (np.arange(token_BT.shape[1]) == samples.segment_start_NT)
    kinds_BTk = np.stack([is_start_BT, token_BT & ~is_start_BT], -1)
    found_LBXk, channel_LD = [], []
    for step in grid.steps:
        assert isinstance(step, int)  # `lay_out` measures single steps
        arrays = [site(batch, step, suffix) for suffix in SITES.values()]
        xp = array_namespace(arrays[0])
        norms = [xp.linalg.vector_norm(x, axis=-1) for x in arrays]
        norms_BT = [norm if len(norm.shape) == 2 else xp.mean(norm, axis=-1) for norm in norms]
        each_BXT = xp.stack([*norms_BT, *massive(arrays[0], options)], axis=1)
        found_LBXk.append(each_BXT @ like(kinds_BTk, each_BXT))
        largest_B = xp.argmax(xp.abs(arrays[0][:, 0]), axis=-1)
        width_D = xp.arange(batch.architecture.width, device=largest_B.device)
        channel_LD.append(xp.sum(xp.astype(largest_B[:, None] == width_D, xp.float64), axis=0))
    sum_BLXk = xp.stack(found_LBXk, axis=1)
    groups = [xp.mean(sum_BLXk[:, inside], axis=1) for _, _, inside in grid.groups()]
    sum_BPXk = xp.concat([sum_BLXk, xp.stack(groups, axis=1)], axis=1) if groups else sum_BLXk
    kinds_Bk = kinds_BTk.sum(1)
    number_Bk = like(kinds_Bk, sum_BPXk)
    norm_BPXk = sum_BPXk[:, :, : len(SITES)]
    elsewhere_BPX = norm_BPXk[..., 1] * number_Bk[:, None, None, 0]
    there_BPX = elsewhere_BPX > 0
    ones_BPX = xp.ones_like(elsewhere_BPX)
    ratio_BPX = norm_BPXk[..., 0] * number_Bk[:, None, None, 1] / xp.where(there_BPX, elsewhere_BPX, ones_BPX)
    return Reduced(
        by_sample={
            "norm": xp.where(there_BPX, ratio_BPX, 0 * ones_BPX),
            "there": xp.astype(there_BPX, ones_BPX.dtype),
            "counted": sum_BPXk[:, :, len(SITES) :],
            "kinds": kinds_Bk,
        },
        whole={"channel": xp.stack(channel_LD, axis=0)},
        defined={"samples": kinds_Bk.all(-1)},
    )


def quantities(totals: Totals[Grid, Options]) -> list[Quantity]:
    """Ratios of norms and massive channels, at each step and over the looped layers."""
    grid, sums = totals.layout, totals.sums
    norm_RPX = ratio(sums["norm"], sums["there"])
    counted_RPXk = ratio(sums["counted"], sums["kinds"][:, None, None])
    # Sums hold the headline's groups of steps after the steps themselves.
    groups, num_steps = grid.places(("headline",)), len(grid.steps)
    moved = [place._replace(positions=[num_steps + index]) for index, place in enumerate(groups)]
    common = Quantity(name="", value_RLH=norm_RPX, places=[*moved, *grid.places(("layer",))], n=totals.n["samples"])
    found = [
        replace(common, name=f"{name} norm, start/other", value_RLH=norm_RPX[:, :, x, None],
                nulls={"other_tokens": 1.0})
        for x, name in enumerate(SITES)
    ]  # fmt: skip
    inside = [*range(num_steps)], *(place.positions for place in groups)
    note = partial(_largest_channel, totals.whole["channel"], [[p] for p in inside[0]] + list(inside[1:]))
    return found + [
        replace(
            common,
            name=name,
            value_RLH=counted_RPXk[:, :, x, 0, None],
            nulls={"other_tokens": counted_RPXk[0, :, x, 1, None]},
            note=note if name == COUNTED[1] else no_note,
        )
        for x, name in enumerate(COUNTED)
    ]


def _largest_channel(channel_LD: NDArray[np.float64], inside: list[list[int]], place: Place) -> str:
    """Which channel is the largest at a sample's first token, and how often."""
    count_D = channel_LD[inside[place.positions[0]]].sum(0)
    return f"channel {int(count_D.argmax()) + 1} in {count_D.max() / count_D.sum():.0%}"


def figures(totals: Totals[Grid, Options]) -> "dict[str, Figure]":
    """Each ratio along the steps."""
    from plotly.graph_objects import Figure, Scatter

    grid = totals.layout
    drawn: Figure = Figure()
    for quantity in quantities(totals):
        value_L = quantity.value_RLH[0, : len(grid.steps), 0]
        drawn.add_trace(Scatter(x=grid.labels(), y=value_L, name=quantity.name, mode="lines+markers"))
    drawn.update_yaxes(type="log", title_text="start, by the other tokens or the median channel")
    drawn.update_layout(title=TITLE, height=480)
    return {"along the steps": drawn}


def main() -> None:
    """`python -m probes.massive_activations`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
