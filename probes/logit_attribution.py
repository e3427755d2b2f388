"""Which step, head and expert writes the right next token's logit, on which visit?

With the final norm's scale frozen at what it is, a logit is linear in the stream, and the stream is what entered plus
every update. So each update contributes (update * gain / scale) . unembedding of the token that really follows, and

    logit = contribution of what entered + sum of the contributions of all steps + bias + remainder

where the bias is that of the final norm, if it has one (a LayerNorm, which takes the mean off each update too), and the
remainder is what the network does beside adding updates to its stream (ours, Llama and its kin: nothing). A
step's contribution is the sum of its heads' and its experts', and of what a bias of its attention adds. `direct`
effects alone: what a later layer makes of an update is that layer's contribution. Means over the tokens that are
followed by another of their document; the headline has the sum over the steps of each part of the network.

Nulls. `shuffled`: the same update asked for the next token of another position of its sample, the exact mean over all
shuffles.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running import command
from probes.running.passes import pass_inputs, tensor
from probes.running.probe import Result, answer
from probes.statistics.along_steps import lines, predicts, step_grid
from probes.statistics.arrays import ratio
from probes.statistics.grid import Grid, Place
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.sites import hook_name
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel

TITLE = "Logit attribution"
DATA = DataOptions(data=("dyck", "code"), samples=32)
OVERVIEW = ()

BEFORE, AFTER = "hook_resid_pre", "hook_resid_post"
UPDATES = ("hook_attn_out", "hook_mlp_out")
HEADS, SLOTS, CHOSEN = "attn.hook_result", "mlp.hook_expert_result", "mlp.hook_expert_indices"
CONTRIBUTION, ENTERED, BIAS, REMAINDER, LOGIT = "contribution", "entered", "bias", "remainder", "logit"


@validated
class Options:
    """Which logit is attributed."""

    centre: bool = True
    """Take the mean logit of all tokens off, which changes no probability."""


class Layout(NamedTuple):
    """The steps, and what of each is known apart."""

    grid: Grid
    updates: tuple[str, ...]
    """attention and experts (in a dense network MLP), or layer where only their sum is known."""
    heads: bool
    experts: int
    """How many there are; 0 where they are not known apart."""


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The stream, and the updates that the network adds to it."""
    return (BEFORE, AFTER, *(site for site in UPDATES if site in architecture.sites))


def start_on(network: "LoopedModel", options: Options) -> Sums[Layout, Options]:
    """Contributions by sample."""
    return Sums(network.architecture, options, lay_out, partial(reduce, network), quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Contributions by part, step, head and expert, and the steps' as a figure."""
    return answer(sums, figures)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every step, and what is known of its update."""
    sites = batch.architecture.sites
    apart, num_experts = all(site in sites for site in UPDATES), batch.architecture.num_experts
    updates = ("attention", "experts" if num_experts else "MLP") if apart else ("layer",)
    return Layout(step_grid(batch, (), loops), updates, HEADS in sites, num_experts if SLOTS in sites else 0)


# Arithmetic


def reduce(network: "LoopedModel", batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Contributions in float64, summed over tokens: to the token that follows, and to one that follows elsewhere."""
    import torch

    counts_BT = predicts(batch)
    steps = range(len(layout.grid.steps))
    with torch.no_grad():
        end_BTD = tensor(batch, steps[-1], AFTER)
        next_BTD, logit_BT = wanted(network, batch, end_BTD, options)
        counted_BT1 = torch.from_numpy(counts_BT).to(end_BTD.device)[..., None]
        worth_BTD, bias_D = norm_at(network, end_BTD)
        elsewhere_B1D = (next_BTD * counted_BT1).sum(1, keepdim=True) / counted_BT1.sum(1, keepdim=True).clamp(min=1)
        directions = {}
        by_sample: dict[str, Tensor] = {
            "tokens": counted_BT1.sum((1, 2)),
            LOGIT: (logit_BT * counted_BT1[..., 0]).sum(1),
        }
        for word, asked_BTD in (("", next_BTD), ("shuffled ", elsewhere_B1D)):
            by_sample[word + BIAS] = (asked_BTD * bias_D * counted_BT1).sum((1, 2))
            direction_BTD = worth_BTD * asked_BTD * counted_BT1
            if has_mean(network):  # an update counts without its mean: so does the direction, instead of each update
                direction_BTD = direction_BTD - direction_BTD.mean(-1, keepdim=True)
            by_sample[word + ENTERED] = (tensor(batch, 0, BEFORE) * direction_BTD).sum((1, 2))
            found = [updates_along(batch, step, layout, direction_BTD) for step in steps]
            by_sample[word + "updates"] = torch.stack(found, 1)
            directions[word] = direction_BTD
        by_sample |= parts_along(network, batch, layout, directions)
    return Reduced(by_sample=by_sample, defined={"samples": counts_BT.sum(1) > 0})


def norm_at(network: "LoopedModel", end_BTD: "Tensor") -> "tuple[Tensor, Tensor]":
    """What a unit of the stream is worth behind the final norm, its gain by its scale there, and the norm's bias, in
    float64. -> (B, T, D), (D,)"""
    import torch

    gain_D = network.ln_final.weight.double()
    bias = getattr(network.ln_final, "bias", None)
    bias_D = torch.zeros_like(gain_D) if bias is None else bias.double()
    given_BTD = end_BTD.double()
    if has_mean(network):
        given_BTD = given_BTD - given_BTD.mean(-1, keepdim=True)
    gained_BTD = network.ln_final(end_BTD).double() - bias_D
    scale_BT1 = (gain_D * given_BTD).norm(dim=-1, keepdim=True) / gained_BTD.norm(dim=-1, keepdim=True)
    return gain_D / scale_BT1, bias_D


def has_mean(network: "LoopedModel") -> bool:
    """Whether the final norm takes a mean off."""
    return str(network.cfg.normalization_type) == "LN"


def wanted(network: "LoopedModel", batch: Batch, end_BTD: "Tensor", options: Options) -> "tuple[Tensor, Tensor]":
    """The unembedding of the token after each, and its logit, in float64. -> (B, T, D), (B, T)"""
    next_BT = pass_inputs(network, batch)[0].roll(-1, 1)
    unembed_WD = network.W_U.T.double()
    logit_BTW = network.readout(end_BTD).double()
    logit_BT = logit_BTW.gather(-1, next_BT[..., None])[..., 0]
    if options.centre:
        return unembed_WD[next_BT] - unembed_WD.mean(0), logit_BT - logit_BTW.mean(-1)
    return unembed_WD[next_BT], logit_BT


def updates_along(batch: Batch, step: int, layout: Layout, direction_BTD: "Tensor") -> "Tensor":
    """What a step's updates are worth along a direction, over all tokens. -> (B, U)"""
    import torch

    if layout.updates == ("layer",):
        updates = [tensor(batch, step, AFTER).double() - tensor(batch, step, BEFORE)]
    else:
        updates = [tensor(batch, step, site).double() for site in UPDATES]
    return torch.stack([(update * direction_BTD).sum((1, 2)) for update in updates], -1)


def parts_along(
    network: "LoopedModel", batch: Batch, layout: Layout, directions: "dict[str, Tensor]"
) -> "dict[str, Tensor]":
    """What each step's heads (B, S, Q) and experts (B, S, E) are worth along each direction, over all tokens.

    A second pass, in which each step's parts are summed as they come: those of all steps, a width each, do not fit.
    """
    import torch

    found: dict[str, list[Tensor]] = {}
    chosen: dict[str, Tensor] = {}

    def add_heads(result_BTQD: "Tensor", hook: object) -> None:
        for word, direction_BTD in directions.items():
            heads_BQ = torch.einsum("btqd,btd->bq", result_BTQD.double(), direction_BTD)
            found.setdefault(f"{word}heads", []).append(heads_BQ)

    def choose(indices_BTK: "Tensor", hook: object) -> None:
        chosen["now"] = indices_BTK.flatten(1).long()

    def add_experts(result_BTKD: "Tensor", hook: object) -> None:
        for word, direction_BTD in directions.items():
            slots_BTK = torch.einsum("btkd,btd->btk", result_BTKD.double(), direction_BTD)
            experts_BE = slots_BTK.new_zeros(len(slots_BTK), layout.experts)
            experts_BE.scatter_add_(1, chosen["now"], slots_BTK.flatten(1))
            found.setdefault(f"{word}experts", []).append(experts_BE)

    has_experts = layout.experts > 0
    sites = [*([(HEADS, add_heads)] if layout.heads else []),
             *([(CHOSEN, choose), (SLOTS, add_experts)] if has_experts else [])]  # fmt: skip
    if sites:
        hooks = [(hook_name(step, site), add) for step in range(len(layout.grid.steps)) for site, add in sites]
        tokens_BT, options = pass_inputs(network, batch)
        options |= {"head_results": layout.heads, "expert_results": has_experts}
        network.run_with_hooks(tokens_BT, fwd_hooks=hooks, **options)
    return {name: torch.stack(each, 1) for name, each in found.items()}


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """The whole sum by parts of the network and by step, then heads and experts."""
    layout, n = totals.layout, totals.n["samples"]
    grid = layout.grid

    def mean(name: str) -> NDArray[np.float64]:
        x = totals.sums[name]
        return ratio(x, totals.sums["tokens"].reshape(-1, *[1] * (x.ndim - 1)))

    def whole(name: str, value_R: NDArray[np.float64], layers: str = "all", null: float | None = None) -> Quantity:
        nulls = {"shuffled": null} if null is not None else {}
        places = [Place("headline", {"layers": layers}, [0], [])]
        return Quantity(name=name, value_RLH=value_R[:, None, None], places=places, n=n, nulls=nulls)

    parts = [part for _, part in grid.parts()]
    steps_RSU, shuffled_SU = mean("updates"), mean("shuffled updates")[0]
    found = [
        whole(CONTRIBUTION, mean(part), part, float(mean(f"shuffled {part}")[0]))
        for part in (ENTERED, BIAS)
        if part == ENTERED or totals.sums[part].any()
    ]
    for index, update in enumerate(layout.updates):
        # Along L the steps, then the parts of the network, each the sum over its steps.
        value_RL, null_L = (
            np.concatenate([x_S, np.stack([x_S[..., part.positions].sum(-1) for part in parts], -1)], -1)
            for x_S in (steps_RSU[..., index], shuffled_SU[..., index])
        )
        at = [part._replace(positions=[len(grid.steps) + p]) for p, part in enumerate(parts)]
        found.append(
            Quantity(name=CONTRIBUTION, value_RLH=value_RL[..., None], places=[*at, *grid.places(("layer",))], n=n,
                     nulls={"shuffled": null_L[:, None]}, where={"of": update})
        )  # fmt: skip
    total_R = mean(ENTERED) + mean(BIAS) + steps_RSU.sum((1, 2))
    found += [whole(LOGIT, mean(LOGIT)), whole(REMAINDER, mean(LOGIT) - total_R)]
    for name, unit, known in (("heads", "head", layout.heads), ("experts", "expert", layout.experts > 0)):
        if known:
            value_RSH, null_SH = mean(name), mean("shuffled " + name)[0]
            places = [Place("head", {**at.where, unit: index + 1}, at.positions, [index])
                      for at in grid.places(("layer",)) for index in range(value_RSH.shape[-1])]  # fmt: skip
            of = "attention" if name == "heads" else "experts"
            found.append(Quantity(name=CONTRIBUTION, value_RLH=value_RSH, places=places, n=n,
                                  nulls={"shuffled": null_SH}, where={"of": of}))  # fmt: skip
    return found


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Contributions along the steps."""
    shown = [each for each in quantities(totals) if any(place.level == "layer" for place in each.places)]
    return {"steps": lines(TITLE, totals.layout.grid, shown, "logit")}


def main() -> None:
    """`python -m probes.logit_attribution`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
