"""After which visit or step does the answer stand, and what would stopping there have cost?

An exit reads the network early. By `visit` it is the same network run with fewer visits; where its own code fixes them,
the stream after the last step of each visit, read by the final norm and the unembedding. By `step` it is the stream
after each step, so read. A token's answer is the most likely next token, its confidence that token's probability. By
exit, shares of tokens:

    stands    the answer is the last exit's, here and at every later exit
    right     the answer is the token that really follows
    lost      right here and wrong at the last exit: what going on has cost
    gained    wrong here and right at the last exit; these two say nothing of the last exit itself

and for a rule that picks an exit for each token, `right` and the mean number of the exit it takes, from 1:

    oracle          the first exit that is right, the last where none is
    confidence x    the first whose confidence is at least x
    gate            the first visit by which the network's own halting gate has stopped it, where it has one

Nulls. `shuffled`: the same answer held against another token of the sample, the exact mean over all shuffles.
`independent`: right here and at the end as if one said nothing of the other. `random`: exits taken as often as the rule
takes them, by other tokens.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.other_visits import Variant, own_visits, variants
from probes.running.passes import pass_inputs, tensor
from probes.running.probe import Result, answer
from probes.statistics.along_steps import lines, predicts, step_grid
from probes.statistics.arrays import ratio
from probes.statistics.grid import STEPS, Grid, Place, loop_name
from probes.statistics.named_sums import under
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.validation import Share, different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel

TITLE = "Early exit"
DATA = DataOptions(data=("dyck", "code"), samples=32)
OVERVIEW = ()

AFTER = "hook_resid_post"
Exits = Literal["visit", "step"]
STANDS, RIGHT, LOST, GAINED = "stands", "right", "lost", "gained"
ORACLE, GATE = "oracle", "gate"


@validated
class Options:
    """Where tokens may exit, and by which rules."""

    exits: tuple[Exits, ...] = ("visit", "step")
    """After each visit of the loop, or after each step."""
    confidences: Annotated[tuple[Share, ...], Field(min_length=1, max_length=20)] = (0.5, 0.8, 0.95)
    """Thresholds, each a rule."""
    gate_chance: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With a halting gate: a token exits at the first visit by which its chances to stop add up to this."""

    def __post_init__(self) -> None:
        different("exits", self.exits)
        different("confidences", self.confidences)


class Layout(NamedTuple):
    """The steps, and the loop whose visits are exits."""

    grid: Grid
    loop: Loop


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The stream after each step."""
    return (AFTER,)


def start_on(network: "LoopedModel", options: Options) -> Sums[Layout, Options]:
    """Sums over the tokens of each sample, for every exit and rule."""
    runs, fixed = variants(network, range(1, own_visits(network) + 1), ("kept",))
    shorter = [] if fixed else [runs[Variant("kept", num)] for num in range(1, own_visits(network) + 1)]
    return Sums(network.architecture, options, lay_out, partial(reduce, network, shorter), quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Shares by exit and by rule, and a figure of them."""
    return answer(sums, figures)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every step; of several loops the one that ends last."""
    grid = step_grid(batch, (AFTER,), loops)
    steps = batch.architecture.steps
    return Layout(grid, max(loops, key=lambda loop: max(loop.steps(steps, loop.num_visits - 1))))


# Exits


def reduce(
    network: "LoopedModel", shorter: "list[LoopedModel]", batch: Batch, layout: Layout, options: Options
) -> Reduced:
    """What is read at each exit, and what each rule makes of it."""
    import torch

    counts_BT = predicts(batch)
    tokens_BT, asked = pass_inputs(network, batch)
    counted_BT = torch.from_numpy(counts_BT).to(network.device)
    by_sample: dict[str, Tensor] = {"tokens": counted_BT.sum(1)}
    plan, loop = batch.architecture.steps, layout.loop
    ends = [max(loop.steps(plan, visit)) for visit in range(loop.num_visits)]
    with torch.no_grad():
        for exits in options.exits:
            # The logits of each exit, one after the other: of all, only answers and confidences are kept.
            gate_VBT = None
            if exits == "visit":
                gate_VBT = gate_chances(network, batch)
                logits = (run(tokens_BT, **asked) for run in shorter) if shorter else (
                    network.readout(tensor(batch, step, AFTER)) for step in ends)  # fmt: skip
            else:
                logits = (network.readout(tensor(batch, step, AFTER)) for step in range(len(plan)))
            read = [logits_BTW.softmax(-1).max(-1) for logits_BTW in logits]
            answers_XBT, sure_XBT = (
                torch.stack(each) for each in ([x.indices for x in read], [x.values for x in read])
            )
            # By exit, then by rule.
            found = measured(answers_XBT, tokens_BT.roll(-1, 1), counted_BT)
            right_XBT = answers_XBT == tokens_BT.roll(-1, 1)
            for rule, at_XBT in rules(right_XBT, sure_XBT, gate_VBT, options).items():
                taken_BTX = chosen(at_XBT) * counted_BT[..., None]
                found[f"{rule}.used"] = taken_BTX.sum(1)
                found[f"{rule}.right"] = (taken_BTX * right_XBT.movedim(0, -1)).sum((1, 2))
            by_sample |= {f"{exits}.{name}": x for name, x in found.items()}
    return Reduced(by_sample=by_sample, defined={"samples": counts_BT.sum(1) > 0})


def gate_chances(network: "LoopedModel", batch: Batch) -> "Tensor | None":
    """The chance with which the network's halting gate stops each token, if it has one. -> (V, B, T)"""
    import torch

    if network.halting is None:
        return None
    seen: list[Tensor] = []
    tokens_BT, asked = pass_inputs(network, batch)
    handle = network.halting.register_forward_hook(lambda module, args, given: seen.append(given))
    try:
        network(tokens_BT, **asked)
    finally:
        handle.remove()
    return network.stops(torch.stack(seen))


def measured(answers_XBT: "Tensor", next_BT: "Tensor", counted_BT: "Tensor") -> "dict[str, Tensor]":
    """By exit (axis X), summed over the tokens that count: shares and their shuffled nulls. -> (B, X) each"""
    import torch

    same_XBT, right_XBT = answers_XBT == answers_XBT[-1], answers_XBT == next_BT
    stands_XBT = same_XBT.flip(0).cumprod(0).flip(0)

    def total(x_XBT: "Tensor") -> "Tensor":
        return (x_XBT * counted_BT).double().sum(-1).T

    def elsewhere(held_BT: "Tensor") -> "Tensor":
        """How many of a token's answers are another's `held_BT`, the mean over the tokens of its sample."""
        pairs_BTT = counted_BT[:, :, None] & counted_BT[:, None]
        alike = [((x_BT[:, :, None] == held_BT[:, None]) & pairs_BTT).sum((1, 2)) for x_BT in answers_XBT]
        return torch.stack(alike, 1) / counted_BT.sum(1, keepdim=True).clamp(min=1)

    return {
        STANDS: total(stands_XBT),
        RIGHT: total(right_XBT),
        LOST: total(right_XBT & ~right_XBT[-1]),
        GAINED: total(~right_XBT & right_XBT[-1]),
        f"shuffled {STANDS}": elsewhere(answers_XBT[-1]),
        f"shuffled {RIGHT}": elsewhere(next_BT),
    }


def rules(right_XBT: "Tensor", sure_XBT: "Tensor", gate_VBT: "Tensor | None", options: Options) -> "dict[str, Tensor]":
    """For each rule the exits at which it would let a token go. -> (X, B, T) each"""
    found = {ORACLE: right_XBT}
    found |= {f"confidence {threshold:g}": sure_XBT >= threshold for threshold in options.confidences}
    if gate_VBT is not None:
        found[GATE] = gate_VBT.cumsum(0) >= options.gate_chance
    return found


def chosen(at_XBT: "Tensor") -> "Tensor":
    """The first exit at which a token may go, the last where there is none, as a one among zeros. -> (B, T, X)"""
    from torch.nn.functional import one_hot

    goes_XBT = at_XBT.int()
    goes_XBT[-1] = 1
    return one_hot(goes_XBT.argmax(0), len(goes_XBT))


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """By exit, then by rule."""
    layout, architecture = totals.layout, totals.architecture
    name = loop_name(layout.loop, architecture)
    found: list[Quantity] = []
    for exits in totals.options.exits:
        places = layout.grid.places(STEPS)
        layers = "all steps"
        if exits == "visit":
            visits = range(layout.loop.num_visits)
            places = tuple(Place("headline", {"layers": name, "visit": visit + 1}, [visit], []) for visit in visits)
            layers = name
        found += [*_by_exit(totals, exits, places), *_by_rule(totals, exits, layers)]
    return found


def _by_exit(totals: Totals[Layout, Options], exits: Exits, places: tuple[Place, ...]) -> list[Quantity]:
    """Shares of tokens at each exit."""
    tokens_R1, sums = totals.sums["tokens"][:, None], under(totals.sums, exits)
    share_RX = {name: ratio(sums[name], tokens_R1) for name in (STANDS, RIGHT, LOST, GAINED)}
    right_X = share_RX[RIGHT][0]
    nulls = {
        STANDS: ("shuffled", sums[f"shuffled {STANDS}"][0] / tokens_R1[0]),
        RIGHT: ("shuffled", sums[f"shuffled {RIGHT}"][0] / tokens_R1[0]),
        LOST: ("independent", right_X * (1 - right_X[-1])),
        GAINED: ("independent", (1 - right_X) * right_X[-1]),
    }
    # At the last exit nothing is lost or gained.
    before = [place._replace(positions=[at for at in place.positions if at != len(right_X) - 1]) for place in places]
    before = [place for place in before if place.positions]
    return [
        Quantity(name=name, value_RLH=value_RX[..., None], places=before if name in (LOST, GAINED) else places,
                 n=totals.n["samples"], nulls={nulls[name][0]: nulls[name][1][:, None]}, where={"exits": exits})
        for name, value_RX in share_RX.items()
    ]  # fmt: skip


def _by_rule(totals: Totals[Layout, Options], exits: Exits, layers: str) -> list[Quantity]:
    """What each rule gets right, and which exits it takes."""
    tokens_R, sums = totals.sums["tokens"], under(totals.sums, exits)
    right_X = sums[RIGHT][0] / tokens_R[0]
    places = [Place("headline", {"layers": layers, "visit": "all"}, [0], [])]
    found = []
    for name in sums:
        if not name.endswith(".used"):
            continue
        rule = name.removesuffix(".used")
        used_RX = ratio(sums[name], tokens_R[:, None])
        mean_R = used_RX @ np.arange(1, used_RX.shape[-1] + 1)
        nulls: dict[str, NDArray[np.float64] | float | None] = {"random": float(used_RX[0] @ right_X)}
        for word, value_R, null in ((RIGHT, ratio(sums[f"{rule}.right"], tokens_R), nulls), ("exit", mean_R, {})):
            found.append(Quantity(name=word, value_RLH=value_R[:, None, None], places=places, n=totals.n["samples"],
                                  nulls=null, where={"exits": exits, "rule": rule}))  # fmt: skip
    return found


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Shares along the steps, and what each rule gets right by the exits it takes."""
    from plotly.graph_objects import Figure, Scatter

    every = quantities(totals)
    stepwise = [each for each in every if any(place.level == "layer" for place in each.places)]
    drawn: Figure = Figure()
    for exits in totals.options.exits:
        ruled = [each for each in every if "rule" in each.where and each.where["exits"] == exits]
        right, taken = (
            [float(each.value_RLH[0, 0, 0]) for each in ruled if each.name == name] for name in (RIGHT, "exit")
        )
        words = [str(each.where["rule"]) for each in ruled if each.name == RIGHT]
        drawn.add_trace(Scatter(x=taken, y=right, text=words, name=f"exits by {exits}", mode="markers+text"))
    drawn.update_layout(title=TITLE, xaxis_title="mean exit", yaxis_title="right", yaxis_tickformat=".0%")
    return {"steps": lines(TITLE, totals.layout.grid, stepwise, "share of tokens"), "rules": drawn}


def main() -> None:
    """`python -m probes.early_exit`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
