"""After which step, on which visit, does the network know its answer, when each state is read as if it were the last?

The state after every step goes through the final norm and the unembedding. The `coda` lens runs the layers after the
loop on it first: an early visit's state is then read by the layers that were trained to read the last one's.

    answer rank          rank, from 1, of the network's own answer among the lens's tokens, mean over tokens
    answer is first      share of tokens at which the lens's most likely token is that answer
    KL to the end        KL divergence of the lens's distribution from the network's, in nats, mean over tokens
    next token rank      rank of the token that really follows
    next token is first  share of tokens at which the lens is right
    loss                 mean cross-entropy of the lens, in nats
    flips                share of tokens at which the lens's most likely token is another than one step before

Beside each stands the same lens on the state that enters the first step (`entering`).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np

from cache.batch import Batch
from probes.running import command
from probes.running.passes import pass_inputs, tensor
from probes.running.probe import Result, answer
from probes.statistics.along_steps import lines, mean_at_steps, predicts, step_grid
from probes.statistics.grid import STEPS, Grid
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.validation import different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel

TITLE = "Logit lens"
DATA = DataOptions(data=("dyck", "code"), samples=32)
OVERVIEW = ()

Lens = Literal["stream", "coda"]
ENTERING, AFTER = "hook_resid_pre", "hook_resid_post"
RANK, FIRST, KL, NEXT_RANK, NEXT_FIRST, LOSS, FLIPS = MEASURES = (
    "answer rank", "answer is first", "KL to the end", "next token rank", "next token is first", "loss", "flips",
)  # fmt: skip


@validated
class Options:
    """How states are read."""

    lenses: tuple[Lens, ...] = ("stream", "coda")
    """stream: final norm and unembedding. coda: the layers after the loop first, where a pass can start at one."""

    def __post_init__(self) -> None:
        different("lenses", self.lenses)


class Layout(NamedTuple):
    """The steps, and the first step after the last loop; the number of steps where none is."""

    grid: Grid
    coda: int


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The stream before and after each step."""
    return (ENTERING, AFTER)


def start_on(network: "LoopedModel", options: Options) -> Sums[Layout, Options]:
    """Sums over the tokens of each sample, after every step."""
    return Sums(network.architecture, options, lay_out, partial(reduce, network), quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Ranks, divergences and flips, and figures of them along the steps."""
    return answer(sums, figures)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every step, and where the coda starts."""
    grid = step_grid(batch, (AFTER,), loops)
    looped = [p for p in range(len(grid.steps)) if any(grid.layer(p) in loop.layers for loop in loops)]
    return Layout(grid, looped[-1] + 1)


def reduce(network: "LoopedModel", batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Every measure of both lenses on the entering state and after each step, summed over tokens."""
    import torch

    tokens_BT, _ = pass_inputs(network, batch)
    counts_BT = predicts(batch)
    counted_BT, answer_BT = torch.from_numpy(counts_BT).to(network.device), cast("Tensor", batch.argmax_BT).long()
    by_sample = {"tokens": counted_BT.sum(1)}
    with torch.no_grad():
        end_BTW = network.readout(tensor(batch, len(layout.grid.steps) - 1, AFTER)).log_softmax(-1)
        for lens in options.lenses:
            found = []
            before_BT: Tensor | None = None
            for lens_BTW in readings(network, batch, layout, lens):
                top_BT = lens_BTW.argmax(-1)
                measures = measured(lens_BTW, end_BTW, answer_BT, tokens_BT.roll(-1, 1))
                measures.append(top_BT != (top_BT if before_BT is None else before_BT))
                found.append(torch.stack([(each * counted_BT).double().sum(1) for each in measures], -1))
                before_BT = top_BT
            if found:
                by_sample[lens] = torch.stack(found, 1)
    return Reduced(by_sample=by_sample, defined={"samples": counts_BT.sum(1) > 0})


def readings(network: "LoopedModel", batch: Batch, layout: Layout, lens: Lens) -> "Iterator[Tensor]":
    """What a lens reads in the state that enters the first step, then after each: log-probabilities, (B, T, W) each.

    The coda lens ends with the state that enters the coda, and reads nothing where no pass can start there.
    """
    num_steps = len(layout.grid.steps)
    read: Callable[[Tensor], Tensor] = network.readout
    if lens == "coda":
        if layout.coda == num_steps or not network.restarts:
            return
        asked = pass_inputs(network, batch)[1]
        asked["start_at"] = network.plan[layout.coda]
        read, num_steps = partial(network, **asked), layout.coda
    yield read(tensor(batch, 0, ENTERING)).log_softmax(-1)
    for step in range(num_steps):
        yield read(tensor(batch, step, AFTER)).log_softmax(-1)


def measured(lens_BTW: "Tensor", end_BTW: "Tensor", answer_BT: "Tensor", next_BT: "Tensor") -> "list[Tensor]":
    """All measures but the flips, from log-probabilities of the lens and of the network. -> (B, T) each"""
    found = []
    for token_BT in (answer_BT, next_BT):
        chosen_BT1 = lens_BTW.gather(-1, token_BT[..., None])
        rank_BT = 1 + (lens_BTW > chosen_BT1).sum(-1)
        found.append((rank_BT, rank_BT == 1, -chosen_BT1[..., 0]))
    (rank_BT, first_BT, _), (next_rank_BT, next_first_BT, loss_BT) = found
    kl_BT = (end_BTW.exp() * (end_BTW - lens_BTW)).sum(-1)
    return [rank_BT, first_BT, kl_BT, next_rank_BT, next_first_BT, loss_BT]


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Each measure of each lens after each step that it reads."""
    (grid, coda), n = totals.layout, totals.n["samples"]
    found: list[Quantity] = []
    for lens in totals.options.lenses:
        places = grid.places(STEPS)
        if lens == "coda":
            places = tuple(place for place in places if max(place.positions) < coda)
        for index, name in enumerate(MEASURES):
            sum_RLM = totals.sums.get(lens)
            if sum_RLM is None:
                nothing = totals.sums["tokens"][:, None, None] * np.full((1, len(grid.steps), 1), np.nan)
                why = "no layer runs after the loop, or no pass can start at one"
                found.append(Quantity(name=name, value_RLH=nothing, n=n, where={"lens": lens}, undefined=why,
                                      places=[place for place in places if place.level == "headline"]))  # fmt: skip
                continue
            sum_RL, count_R, where = sum_RLM[..., index], totals.sums["tokens"], {"lens": lens}
            found.append(mean_at_steps(name, sum_RL, count_R, grid, n, places=places, where=where, entering=True))
    return found


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Shares in one figure, divergence and loss in another."""
    grid, every = totals.layout.grid, quantities(totals)
    shares = [each for each in every if each.name in (FIRST, NEXT_FIRST, FLIPS)]
    nats = [each for each in every if each.name in (KL, LOSS)]
    return {
        "answers": lines(TITLE, grid, shares, "share of tokens"),
        "divergence": lines(TITLE, grid, nats, "nats"),
    }


def main() -> None:
    """`python -m probes.logit_lens`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
