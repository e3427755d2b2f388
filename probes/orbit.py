"""Where does the loop take the stream: do its steps shrink, does it turn, and what is the loss after each visit?

x_0 is the stream that enters a loop, x_v the stream after visit v, both divided by the norm with which the token
entered, so that every token counts alike; d_v = x_v - x_(v-1). The network runs more visits than it was built for, over
the same weights, with its loop factor kept or one over their number.

    step length     root mean square of norm(d_v) over tokens
    contraction     step length by that of the visit before; the loop converges where it stays below 1
    angle           in degrees, between d_v and d_(v-1), from their pooled cosine; 0 goes straight on, 180 turns back
    state norm      root mean square of norm(x_v); the loop was entered with 1
    straightness    share of the orbit's variance over visits that its first principal axis has; 1 is a straight line
    loss            of predicting the next token with v visits, in nats, and its change from one visit

Nulls. `orthogonal`: as if all steps, of the same lengths, were at right angles. `shuffled`: the later step of another
token of the sample, the exact mean over all shuffles. `no_loop`: the loss when the looped layers pass the stream on.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.other_visits import Scale, Variant, variants
from probes.running.passes import pass_inputs
from probes.running.probe import Result, answer, no_sites
from probes.statistics.along_steps import predicts
from probes.statistics.arrays import is_token, ratio
from probes.statistics.grid import Place, loop_name
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.sites import hook_name
from smelt_interp.validation import different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel

TITLE = "Orbit"
needs = no_sites
DATA = DataOptions(data=("dyck", "code"), samples=32)
OVERVIEW = ()

STEP, CONTRACTION, ANGLE, NORM, STRAIGHT, LOSS = (
    "step length", "contraction", "angle (degrees)", "state norm", "straightness", "loss",
)  # fmt: skip


@validated
class Options:
    """How far the loop is followed."""

    most_visits: Annotated[int, Field(ge=2, le=64)] = 4
    """Visits of the longest run; a network whose own code fixes its loop is followed over its own."""
    scales: tuple[Literal["kept", "1/r"], ...] = ("kept",)
    """The loop factor of the longer and shorter runs: as it is, or one over the number of visits."""

    def __post_init__(self) -> None:
        different("scales", self.scales)


class Track(NamedTuple):
    """One loop of one run, and the hook names of its states, the entering one first."""

    scale: Scale
    layers: str
    names: tuple[str, ...]

    @property
    def word(self) -> str:
        """Before the names of its sums."""
        return f"{self.scale}, {self.layers}"


class Layout(NamedTuple):
    """The tracks of the longest runs, the visits whose loss is known by scale, and the looped layers."""

    tracks: tuple[Track, ...]
    visits: tuple[tuple[Scale, tuple[int, ...]], ...]
    layers: tuple[int, ...]
    fixed: str
    """Why there are no other numbers of visits."""


def start_on(network: "LoopedModel", options: Options) -> Sums[Layout, Options]:
    """Sums over the tokens of each sample, for every number of visits."""
    runs, fixed = variants(network, range(1, options.most_visits + 1), options.scales)
    return Sums(network.architecture, options, partial(lay_out, runs, fixed), partial(reduce, runs), quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Lengths, angles and losses by visit, and the path as a figure."""
    return answer(sums, figures)


Runs = dict[Variant, "LoopedModel"]


def lay_out(runs: Runs, fixed: str, batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every loop of the longest run of each scale; of a network without one, the layers of the headline."""
    tracks, visits = [], []
    for scale in dict.fromkeys(run.scale for run in runs):
        counts = tuple(run.visits for run in runs if run.scale == scale)
        architecture = runs[Variant(scale, max(counts))].architecture
        visits.append((scale, counts))
        for loop in architecture.loops or loops:
            ends = [max(loop.steps(architecture.steps, visit)) for visit in range(loop.num_visits)]
            entering = hook_name(min(loop.steps(architecture.steps, 0)), "hook_resid_pre")
            names = (entering, *(hook_name(step, "hook_resid_post") for step in ends))
            tracks.append(Track(scale, loop_name(loop, architecture), names))
    layers = tuple(sorted({layer for loop in loops for layer in loop.layers}))
    return Layout(tuple(tracks), tuple(visits), layers, fixed)


def reduce(runs: Runs, batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Inner products of the steps of each track, summed over tokens, and the loss of every run."""
    import torch

    counts_BT, token_BT = predicts(batch), is_token(batch.samples)
    by_sample = {"tokens": token_BT.sum(1), "predicted": counts_BT.sum(1)}
    with torch.no_grad():
        for scale, visits in layout.visits:
            losses = []
            for num in visits:
                tracks = [track for track in layout.tracks if track.scale == scale and num == max(visits)]
                network = runs[Variant(scale, num)]
                tokens_BT, asked = pass_inputs(network, batch)
                names = list(dict.fromkeys(name for track in tracks for name in track.names))
                logits_BTW, seen = network.run_with_cache(
                    tokens_BT, names_filter=names, return_cache_object=False, **asked
                )
                losses.append(loss_sums(logits_BTW, tokens_BT, counts_BT))
                for track in tracks:
                    states_BVTD = torch.stack([seen[name] for name in track.names], 1)
                    gram_BVV, shuffled_BVV = products(states_BVTD, torch.from_numpy(token_BT).to(states_BVTD.device))
                    by_sample |= {f"{track.word}.gram": gram_BVV, f"{track.word}.shuffled": shuffled_BVV}
            by_sample[f"{scale}.loss"] = torch.stack(losses, -1)
            shortest = runs[Variant(scale, min(visits))]
            by_sample[f"{scale}.no_loop"] = without_loop(shortest, batch, layout.layers, counts_BT)
    return Reduced(by_sample=by_sample, defined={"samples": counts_BT.sum(1) > 0})


def loss_sums(logits_BTW: "Tensor", tokens_BT: "Tensor", counts_BT: NDArray[np.bool_]) -> "Tensor":
    """Summed over the positions that predict, in nats. -> (B,)"""
    import torch

    next_BT1 = tokens_BT.roll(-1, 1)[..., None]
    loss_BT = -logits_BTW.double().log_softmax(-1).gather(-1, next_BT1)[..., 0]
    return (loss_BT * torch.from_numpy(counts_BT).to(loss_BT.device)).sum(1)


def products(states_BVTD: "Tensor", token_BT: "Tensor") -> "tuple[Tensor, Tensor]":
    """Inner products of a token's entering state and its steps, in units of the entering norm, summed over tokens: of
    its own with each other, and with another token's, the mean over all shuffles. -> (B, V, V) each"""
    import torch

    x_BVTD = states_BVTD.double()
    token_B1T1 = token_BT[:, None, :, None]  # padding may enter with nothing: 0 / 0
    x_BVTD = torch.where(token_B1T1, x_BVTD / x_BVTD[:, :1].norm(dim=-1, keepdim=True), 0)
    x_BVTD = torch.cat((x_BVTD[:, :1], x_BVTD.diff(dim=1)), 1)
    total_BVD = x_BVTD.sum(2)
    count_B11 = token_BT.sum(1).clamp(min=1)[:, None, None]
    return torch.einsum("butd,bvtd->buv", x_BVTD, x_BVTD), total_BVD @ total_BVD.mT / count_B11


def without_loop(
    network: "LoopedModel", batch: Batch, layers: tuple[int, ...], counts_BT: NDArray[np.bool_]
) -> "Tensor":
    """The loss, summed over predicting positions, when these layers pass the stream on. -> (B,)"""
    from model.hooks.interventions import Sources, skip

    tokens_BT, asked = pass_inputs(network, batch)
    edit = skip([index for index, step in enumerate(network.plan) if step.layer in layers])
    hooks = edit.hooks(Sources(samples=batch.samples, sample_ids=batch.sample_ids))
    return loss_sums(network.run_with_hooks(tokens_BT, fwd_hooks=hooks, **asked), tokens_BT, counts_BT)


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """The geometry of each track, then the losses."""
    found = [each for track in totals.layout.tracks for each in _geometry(totals, track)]
    layers = " and ".join(dict.fromkeys(track.layers for track in totals.layout.tracks))
    for scale, visits in totals.layout.visits:
        places = [Place("headline", {"layers": layers, "visit": num}, [p], []) for p, num in enumerate(visits)]
        value_RV = ratio(totals.sums[f"{scale}.loss"], totals.sums["predicted"][:, None])
        nulls = {"no_loop": float(totals.sums[f"{scale}.no_loop"][0] / totals.sums["predicted"][0])}
        found.append(
            Quantity(
                name=LOSS, value_RLH=value_RV[..., None], places=places, n=totals.n["samples"], nulls=nulls,
                change=not totals.layout.fixed, where={"scale": scale}, note=lambda place: totals.layout.fixed,
            )
        )  # fmt: skip
    return found


def _geometry(totals: Totals[Layout, Options], track: Track) -> list[Quantity]:
    """Each measure after each visit, one along H."""
    tokens_R11 = totals.sums["tokens"][:, None, None]
    steps_RVV = ratio(totals.sums[f"{track.word}.gram"], tokens_R11)[:, 1:, 1:]
    shuffled_VV = totals.sums[f"{track.word}.shuffled"][0, 1:, 1:] / tokens_R11[0]
    states_RVV = between_states(ratio(totals.sums[f"{track.word}.gram"], tokens_R11))
    square_RV, turn_RV = np.diagonal(steps_RVV, 0, -2, -1), np.diagonal(steps_RVV, 1, -2, -1)
    length_RV = np.sqrt(square_RV)
    # The orbit's inner products if its steps, as long as they are, were at right angles.
    reached_V = np.concatenate([[0.0], square_RV[0].cumsum()])
    orthogonal_VV = 1 + np.minimum(reached_V[:, None], reached_V)
    before_RV = length_RV[:, :-1] * length_RV[:, 1:]
    angle_RV = _degrees(ratio(turn_RV, before_RV))
    shuffled_V = _degrees(ratio(np.diagonal(shuffled_VV, 1), before_RV[0]))
    measures: list[tuple[str, NDArray[np.float64], int, dict[str, NDArray[np.float64] | float | None]]] = [
        (STEP, length_RV, 1, {}),
        (CONTRACTION, ratio(length_RV[:, 1:], length_RV[:, :-1]), 2, {}),
        (ANGLE, angle_RV, 2, {"shuffled": shuffled_V[:, None], "orthogonal": 90.0}),
        (NORM, np.sqrt(np.diagonal(states_RVV, 0, -2, -1))[:, 1:], 1,
         {"orthogonal": np.sqrt(1 + reached_V[1:])[:, None]}),
        (STRAIGHT, principal(states_RVV)[0][..., :1], length_RV.shape[-1],
         {"orthogonal": float(principal(orthogonal_VV)[0][0])}),
    ]  # fmt: skip
    return [
        Quantity(
            name=name, value_RLH=value_RV[..., None], n=totals.n["samples"], nulls=nulls, where={"scale": track.scale},
            places=[Place("headline", {"layers": track.layers, "visit": first + p}, [p], [])
                    for p in range(value_RV.shape[-1])],
        )
        for name, value_RV, first, nulls in measures
    ]  # fmt: skip


def between_states(gram_VV: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inner products (..., V, V) of the states, from those of the entering one and the steps."""
    return gram_VV.cumsum(-1).cumsum(-2)


def principal(gram_VV: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """From the inner products (..., V, V) of the states: the share of variance of each principal axis, largest first,
    and the states' coordinates on them (..., V, axes)."""
    centred_VV = gram_VV - gram_VV.mean(-1, keepdims=True)
    centred_VV = centred_VV - centred_VV.mean(-2, keepdims=True)
    defined = np.isfinite(centred_VV).all((-1, -2), keepdims=True)
    values, vectors = np.linalg.eigh(np.where(defined, centred_VV, 0))
    values, vectors = values[..., ::-1].clip(min=0), vectors[..., ::-1]
    return ratio(values, values.sum(-1, keepdims=True)), vectors * np.sqrt(values)[..., None, :]


def _degrees(cosine: NDArray[np.float64]) -> NDArray[np.float64]:
    degrees: NDArray[np.float64] = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    return degrees


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """The path of each track on its first two principal axes, and lengths and losses by visit."""
    from plotly.graph_objects import Figure, Scatter

    path: Figure = Figure()
    for track in totals.layout.tracks:
        _, at_VA = principal(between_states(totals.sums[f"{track.word}.gram"][0] / totals.sums["tokens"][0]))
        labels = ["entering", *(f"visit {visit}" for visit in range(1, len(at_VA)))]
        path.add_trace(
            Scatter(x=at_VA[:, 0], y=at_VA[:, 1], text=labels, name=track.word, mode="lines+markers+text",
                    textposition="top center")
        )  # fmt: skip
    path.update_layout(title=TITLE, xaxis_title="first principal axis", yaxis_title="second", yaxis_scaleanchor="x")
    course: Figure = Figure()
    for quantity in quantities(totals):
        if quantity.name in (STEP, CONTRACTION, NORM, LOSS):
            rows = [row for row in quantity.rows() if isinstance(row["visit"], int)]
            words = ", ".join([quantity.name, *map(str, quantity.where.values()), str(rows[0]["layers"])])
            visits, values = ([row[name] for row in rows] for name in ("visit", "value"))
            course.add_trace(Scatter(x=visits, y=values, name=words, mode="lines+markers"))
    course.update_layout(title=TITLE, xaxis_title="visit", xaxis_dtick=1)
    return {"path": path, "course": course}


def main() -> None:
    """`python -m probes.orbit`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
