"""What does each visit contribute to the gradient of the weights that all visits share?

The gradient of a shared weight is the sum of its visits' shares. It is taken of one sample's loss (mean over its
tokens), over all weights of a layer and over each part of it, with the loop factor as 1/r and as 1: a reason for 1/r is
that r visits would otherwise add up to a gradient r times that of other layers.

    gradient norm     norm of a step's share, mean over samples
    share             <share, whole gradient> / norm(whole gradient)^2; the visits of a layer add up to 1
    cosine            between the shares of two visits
    gradient ratio    norm of a looped layer's whole gradient, by that of the layers that run once, means over samples

Nulls. `unlooped`: the norm of the layers that run once; the cosine between two of them that are neighbours.
`equal`: 1/r. `orthogonal`: what the ratio were if the shares were at right angles.
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch, take
from probes.running import command
from probes.running.other_visits import Scale, Variant, own_visits, variants
from probes.running.passes import pass_inputs
from probes.running.probe import Result, answer, no_sites
from probes.statistics.along_steps import lines, predicts, step_grid
from probes.statistics.arrays import ratio
from probes.statistics.grid import STEPS, Grid, Place, loop_name
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.visit_pairs import check_visits, consecutive_once, not_compared, once_visited, visit_pairs
from smelt_interp.architecture import Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.plan import visits_of
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel

TITLE = "Weight gradients"
needs = no_sites
DATA = DataOptions(data=("dyck", "code"), samples=32)
OVERVIEW = ()

NORM, SHARE, COSINE, RATIO = "gradient norm", "share", "cosine", "gradient ratio"
ALL = "all"


@validated
class Options:
    """Under which loop factor, and between which visits."""

    scales: tuple[Scale, ...] = ("1/r", "1")
    """The loop factor; kept is the network's own, and all that one whose code fixes its loop has."""
    compare: Indices = (0, 1)
    """Visits to compare: every pair of them."""

    def __post_init__(self) -> None:
        different("scales", self.scales)
        check_visits(self.compare)


class Layout(NamedTuple):
    """The steps, the pairs of steps whose gradients are compared, and the parts of a layer."""

    grid: Grid
    scales: tuple[Scale, ...]
    visits: Grid
    """Pairs of visits."""
    neighbours: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    """All weights, then those of each of the layer's modules that has a matrix."""


def start_on(network: "LoopedModel", options: Options) -> Sums[Layout, Options]:
    """Norms and inner products of gradients by sample."""
    runs, _ = variants(network, [own_visits(network)], options.scales)
    return Sums(network.architecture, options, partial(lay_out, runs), partial(reduce, runs), quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Norms, shares and cosines under each loop factor, and norms along the steps as a figure."""
    return answer(sums, figures)


def lay_out(runs: "dict[Variant, LoopedModel]", batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every step, every pair of visits of a layer, and neighbours that run once."""
    grid = step_grid(batch, (), loops)
    steps = [step for step in grid.steps if isinstance(step, int)]
    pairs = visit_pairs(batch.architecture, steps, options.compare)
    layer = next(iter(runs.values())).layer_modules()[0]
    modules = {name.partition(".")[0]: None for name, weight in layer.named_parameters() if weight.ndim > 1}
    visits = Grid(architecture=batch.architecture, loops=loops, steps=pairs)
    scales = tuple(dict.fromkeys(run.scale for run in runs))
    return Layout(grid, scales, visits, consecutive_once(batch.architecture.steps, steps), (ALL, *modules))


# Gradients


def reduce(runs: "dict[Variant, LoopedModel]", batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Everything of each sample's own gradient."""
    counts_BT = predicts(batch)
    found: dict[str, list[NDArray[np.float64]]] = {}
    for (scale, _), network in runs.items():
        for row in range(len(batch.samples)):
            products_PSS = gradient_products(network, take(batch, np.array([row])), counts_BT[row], layout)
            for name, x in measured(products_PSS, layout).items():
                found.setdefault(f"{scale}.{name}", []).append(x)
    defined_B = counts_BT.sum(1) > 0
    by_sample = {"samples": defined_B, **{name: np.stack(each) for name, each in found.items()}}
    return Reduced(by_sample=by_sample, defined={"samples": defined_B})


def gradient_products(
    network: "LoopedModel", batch: Batch, counts_T: NDArray[np.bool_], layout: Layout
) -> NDArray[np.float64]:
    """Inner products in float64 between the gradients of all steps that are compared (each layer's visits, and
    neighbours), by part; 0 elsewhere, and everywhere for a sample that predicts nothing. -> (P, L, L)"""
    num_steps = len(layout.grid.steps)
    products_PSS = np.zeros((len(layout.parts), num_steps, num_steps))
    if not counts_T.any():
        return products_PSS
    plan = batch.architecture.steps
    visits = [visits_of(plan, layer) for layer in range(batch.architecture.num_layers)]
    pairs = {(step, step) for step in range(num_steps)} | {*layout.neighbours}
    pairs |= {pair for each in visits for pair in combinations(each, 2)}
    gradients = step_gradients(network, batch, counts_T)
    for index, part in enumerate(layout.parts):
        of_steps = [[g for name, g in step.items() if part in (ALL, name.partition(".")[0])] for step in gradients]
        for first, second in pairs:
            products_PSS[index, first, second] = products_PSS[index, second, first] = _dot(
                of_steps[first], of_steps[second]
            )
    return products_PSS


def step_gradients(network: "LoopedModel", batch: Batch, counts_T: NDArray[np.bool_]) -> "list[dict[str, Tensor]]":
    """Of the loss of one sample, for each step the gradient of its layer's weights by name: that visit's share."""
    import torch
    from torch.nn.functional import cross_entropy

    from model.hooks.visit_weights import weights_by_visit

    tokens_BT, asked = pass_inputs(network, batch)
    counted_T = torch.from_numpy(counts_T).to(network.device)
    with torch.enable_grad(), weights_by_visit(network) as leaves:
        logits_BTW = network(tokens_BT, **asked)
        loss = cross_entropy(logits_BTW[0, counted_T], tokens_BT[0].roll(-1)[counted_T])
    flat = [leaf for step in leaves for leaf in step.values()]
    found = iter(torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True))
    return [{name: next(found) for name in step} for step in leaves]


def _dot(one: "Sequence[Tensor]", other: "Sequence[Tensor]") -> float:
    """The inner product; of no meaning, and NaN, where the layers are not alike."""
    if [x.shape for x in one] != [x.shape for x in other]:
        return np.nan
    return sum(float(x.double().flatten() @ y.double().flatten()) for x, y in zip(one, other, strict=True))


def measured(products_PSS: NDArray[np.float64], layout: Layout) -> dict[str, NDArray[np.float64]]:
    """Norms, shares and cosines of one sample: axes along the plan, or along pairs, or along layers; then parts."""
    plan = layout.grid.architecture.steps
    norm_PS = np.sqrt(np.diagonal(products_PSS, 0, -2, -1))
    share_PS, whole, apart = np.ones_like(norm_PS), [], []
    for layer in range(layout.grid.architecture.num_layers):
        steps = list(visits_of(plan, layer))
        own_PVV = products_PSS[:, steps][:, :, steps]
        whole_P = own_PVV.sum((-2, -1)).clip(min=0)
        share_PS[:, steps] = np.nan_to_num(ratio(own_PVV.sum(-1), whole_P[:, None]))
        whole.append(np.sqrt(whole_P))
        apart.append(np.sqrt(np.trace(own_PVV, axis1=-2, axis2=-1)))

    def cosines(pairs: Sequence[object]) -> NDArray[np.float64]:
        at = np.array(pairs, np.int64).reshape(-1, 2).T
        product_PU, norms_PU = products_PSS[:, at[0], at[1]], norm_PS[:, at[0]] * norm_PS[:, at[1]]
        return np.where(norms_PU > 0, ratio(product_PU, norms_PU), 0.0).T  # layers that are not alike have NaN

    return {
        "norm": norm_PS.T,
        "share": share_PS.T,
        "cosine": cosines(layout.visits.steps),
        "neighbours": cosines(layout.neighbours),
        "whole": np.stack(whole),
        "apart": np.stack(apart),
    }


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Of all weights at every step, then of each part of the layers at the headline's places."""
    layout = totals.layout
    return [
        each for scale in layout.scales for index in range(len(layout.parts)) for each in _of_part(totals, scale, index)
    ]


def _of_part(totals: Totals[Layout, Options], scale: Scale, part: int) -> list[Quantity]:
    """One part of the layers under one loop factor; only all weights are in the headline."""
    layout, n = totals.layout, totals.n["samples"]
    grid, plan = layout.grid, layout.grid.architecture.steps
    where: dict[str, str | int | float | None] = {"weights": layout.parts[part], "scale": scale}

    def mean(name: str) -> NDArray[np.float64]:
        sum_RL = totals.sums[f"{scale}.{name}"][..., part]
        return ratio(sum_RL, totals.sums["samples"][:, None])

    def places(of: Grid) -> list[Place]:
        if part == 0:
            return list(of.places(STEPS))
        return [place._replace(level="split") for place in of.places(("headline",))]

    # Norms and shares of each step, cosines of visits beside those of neighbours that run once.
    norm_RS, once = mean("norm"), list(once_visited(plan))
    unlooped = float(norm_RS[0, once].mean()) if once else None
    counts = np.array([len(visits_of(plan, step.layer)) for step in plan])
    found = [
        Quantity(name=NORM, value_RLH=norm_RS[..., None], places=places(grid), n=n, nulls={"unlooped": unlooped},
                 where=where, change=part == 0),
        Quantity(name=SHARE, value_RLH=mean("share")[..., None], places=places(grid), n=n,
                 nulls={"equal": (1 / counts)[:, None]}, where=where),
    ]  # fmt: skip
    if layout.visits.steps:
        beside_U = mean("neighbours")[0]
        alike_U = beside_U[np.isfinite(beside_U)]
        null = float(alike_U.mean()) if len(alike_U) else None
        found.append(
            Quantity(name=COSINE, value_RLH=mean("cosine")[..., None], places=places(layout.visits), n=n,
                     nulls={"unlooped": null}, where=where)
        )  # fmt: skip
    elif part == 0:
        found += not_compared([COSINE], grid, totals.options.compare, {"weights": ALL, "scale": scale})
    # A looped layer's whole gradient by that of the layers outside every loop, and its null.
    whole_RN, apart_RN = mean("whole"), mean("apart")
    looped = {layer for loop in grid.loops for layer in loop.layers}
    outside = [layer for layer in range(whole_RN.shape[-1]) if layer not in looped]
    beside_R = whole_RN[:, outside].mean(-1) if outside else np.full(len(whole_RN), np.nan)
    found.append(
        Quantity(
            name=RATIO, value_RLH=ratio(whole_RN, beside_R[:, None])[..., None], n=n, where=where,
            nulls={"orthogonal": ratio(apart_RN[0], beside_R[0])[:, None]},
            places=[Place("split" if part else "headline",
                          {"layers": loop_name(loop, grid.architecture), "visit": ALL}, list(loop.layers), [])
                    for loop in grid.loops],
            undefined="" if outside else "no layer runs outside the loop",
        )
    )  # fmt: skip
    return found


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """The norm of each step's share along the steps."""
    norms = [each for each in quantities(totals) if each.name == NORM and each.where["weights"] == ALL]
    return {"norms": lines(TITLE, totals.layout.grid, norms, "norm")}


def main() -> None:
    """`python -m probes.weight_gradients`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
