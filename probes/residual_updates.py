"""What does each visit add to the residual stream: how large, in which direction, and what does the stream become?

D is what one execution adds, as added (the loop factor is inside): the attention sublayer, the expert sublayer (in a
dense network its feed-forward one), the layer (their sum), or the whole visit (the sum over the looped layers). For two
visits of the same layer:

    norm ratio, median   median over tokens of norm(D_late) / norm(D_early), in constant memory (`ratio_histogram`)
    norm ratio, RMS      root mean square norm over tokens of D_late, by that of D_early
    cosine               mean over tokens of cos(D_early, D_late)

Nulls. `shuffled`: the later visit's tokens shuffled within their sample (of the cosine the exact mean over all
shuffles; the RMS ratio has none, since a shuffle leaves it as it is). `unlooped`: the same between a layer that runs
once and the next one that does, mean over all such pairs of this network; a Baseline has it as a row, `next layer`.

The loop factor is on both visits, so it cancels between them; it does not cancel against prelude and coda.

    update norm          root mean square norm over tokens of what a step adds, mean over the steps of a part; beside it
                         that of the layers that run once
    undamped norm        the same with each looped update divided by the loop factor, to compare with prelude and coda
    stream variance      mean over tokens of the variance over channels, after a step, or at the end of a part
    undamped variance    the same of the stream that enters the first step plus every recorded update divided by its
                         loop factor. Not a run at scale 1: each update is what the network wrote while reading its own,
                         damped stream
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import is_token, ratio, recorded_steps, to_numpy, token_values
from probes.statistics.grid import STEPS, Grid, Place, loop_name
from probes.statistics.named_sums import stacked, under
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity, no_note
from probes.statistics.ratio_histogram import count, median
from probes.statistics.shuffles import MOST_SHUFFLES, shuffled_positions
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.visit_pairs import check_visits, consecutive_once, not_compared, once_visited, visit_pairs
from smelt_interp import similarity
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.arrays import Array, Floats
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Residual updates"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ({"quantity": "norm ratio, median", "update": "layer"}, {"quantity": "cosine", "update": "layer"})

Update = Literal["attention", "experts", "layer", "visit"]
ATTENTION, EXPERTS, ENTERING = "hook_attn_out", "hook_mlp_out", "hook_resid_pre"
Between = Literal["visits", "next layer"]
OF_ONE_STEP: tuple[Update, ...] = ("attention", "experts", "layer")
"""The updates that a single step makes, in the order of axis U."""
MEDIAN, RMS, COSINE = QUANTITIES = ("norm ratio, median", "norm ratio, RMS", "cosine")
NEXT_LAYER: Between = "next layer"


@validated
class Options:
    """Which updates are compared, between which visits."""

    compare: Indices = (0, 1)
    """Visits to compare: every pair of them."""
    updates: tuple[Update, ...] = ("attention", "experts", "layer", "visit")
    """What a visit adds: by the attention sublayer, the expert sublayer, a layer, or the whole visit."""
    shuffles: Annotated[int, Field(ge=1, le=MOST_SHUFFLES)] = 4
    """Shuffles of tokens behind the null of the median ratio; the cosine's null needs none."""
    resample_seed: Seed = 0
    """Seed of the bootstrap and of shuffles."""

    def __post_init__(self) -> None:
        check_visits(self.compare)
        if not self.updates or len(set(self.updates)) < len(self.updates):
            raise UserError(f"updates must be one or more different kinds; got {' '.join(self.updates) or 'none'}")


class Comparison(NamedTuple):
    """Pairs of updates that are compared token by token, of one kind."""

    update: Update
    between: Between
    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Along L: the step indices whose additions are summed, of the earlier and of the later."""
    places: tuple[Place, ...]

    @property
    def word(self) -> str:
        """Before the names of its sums."""
        return f"{self.update}, {self.between}"


class Layout(NamedTuple):
    """What is compared, and the steps whose updates are followed."""

    grid: Grid
    comparisons: tuple[Comparison, ...]
    partial: bool
    """Whether the whole visit is asked for, and a looped layer was not recorded."""


def needs(architecture: Architecture) -> tuple[str, ...]:
    """What both sublayers add, and the stream they add it to."""
    return (ENTERING, ATTENTION, EXPERTS)


def start(architecture: Architecture, options: Options) -> Sums[Layout, Options]:
    """Sums over the tokens of each sample, at every step and for every pair of updates."""
    return Sums(architecture, options, lay_out, reduce, quantities, seed=options.resample_seed)


def result(sums: Sums[Layout, Options]) -> Result:
    """Ratios, cosines, norms and variances, with a figure of them."""
    return answer(sums, figures)


# What is compared


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every pair of visits of every looped layer and of each loop, and consecutive layers that run once."""
    architecture = batch.architecture
    steps = recorded_steps(batch, needs(architecture))
    grid = Grid(architecture=architecture, loops=loops, steps=steps)
    pairs = Grid(architecture=architecture, loops=loops, steps=visit_pairs(architecture, steps, options.compare))
    alone = consecutive_once(architecture.steps, steps)
    found: list[Comparison] = []
    partial = False
    for update in options.updates:
        if update == "visit":
            whole = _whole_visits(pairs)
            partial = bool(pairs.steps) and not whole.steps
            found += [whole] if whole.steps else []
            continue
        if pairs.steps:
            of_visits = tuple(((at[0],), (at[1],)) for at in pairs.steps if not isinstance(at, int))
            found.append(Comparison(update, "visits", of_visits, pairs.places(STEPS)))
        if alone:
            # Beside a comparison of visits this is its null; on a Baseline it is what there is to compare.
            every = Place("layer" if pairs.steps else "headline", {"layers": "unlooped", "visit": 1},
                          list(range(len(alone))), [])  # fmt: skip
            names = [", ".join(str(architecture.steps[step].layer + 1) for step in pair) for pair in alone]
            each = [Place("layer", {"layers": name, "visit": 1}, [p], []) for p, name in enumerate(names)]
            of_layers = tuple(((first,), (second,)) for first, second in alone)
            found.append(Comparison(update, NEXT_LAYER, of_layers, (every, *each)))
    return Layout(grid, tuple(found), partial)


def _whole_visits(pairs: Grid) -> Comparison:
    """Each pair of visits of a loop whose every layer was recorded on both, as one update."""
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    places = []
    for layers, visit, inside in pairs.groups():
        found = [at for p in inside if not isinstance(at := pairs.steps[p], int)]
        if layers in (loop_name(loop, pairs.architecture) for loop in pairs.loops):
            places.append(Place("headline", {"layers": layers, "visit": visit}, [len(steps)], []))
            steps.append((tuple(early for early, _ in found), tuple(late for _, late in found)))
    return Comparison("visit", "visits", tuple(steps), tuple(places))


# Arithmetic


def reduce(batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Sums over tokens: norms and variances along the steps, and what pairs of updates have in common."""
    token_BT = is_token(batch.samples)
    steps = [step for step in layout.grid.steps if isinstance(step, int)]
    added = {step: (token_values(batch, step, ATTENTION), token_values(batch, step, EXPERTS)) for step in steps}
    sums: dict[str, Array] = {"tokens": token_BT.sum(-1), **_along_steps(batch, steps, added)}
    counts: dict[str, Array] = {}
    whole: dict[str, Array] = {}
    largest: dict[str, Array] = {}
    orders_XBT = shuffled_positions(token_BT, batch.sample_ids, options.resample_seed, options.shuffles)
    for compared in layout.comparisons:
        cosines, ratios = [], []
        for pair in compared.steps:
            early_BTD, late_BTD = (_sum([_update(added[step], compared.update) for step in of]) for of in pair)
            cosines.append(_cosine(early_BTD, late_BTD, token_BT))
            ratios.append(_ratios(early_BTD, late_BTD, token_BT, orders_XBT))
        sums |= stacked(compared.word, cosines)
        for name, into in (("counts", counts), ("shuffled", whole), ("ends", largest), ("shuffled ends", largest)):
            into[f"{compared.word}.{name}"] = np.stack([each[name] for each in ratios], 1 if name == "counts" else 0)
    return Reduced(
        by_sample=sums, counts=counts, whole=whole, largest=largest, defined={"tokens": batch.samples.length_N > 0}
    )


def _update(added: tuple[Floats, Floats], update: Update) -> Floats:
    attention_BTD, experts_BTD = added
    return {"attention": attention_BTD, "experts": experts_BTD}.get(update, attention_BTD + experts_BTD)


def _sum(updates: list[Floats]) -> Floats:
    total = updates[0]
    for update in updates[1:]:
        total = total + update
    return total


def _along_steps(batch: Batch, steps: Sequence[int], added: dict[int, tuple[Floats, Floats]]) -> dict[str, Array]:
    """Squares (B, L, U) of each update, variances over channels (B, L) of the stream after each step, as it is and
    undamped, and (B,) of the stream that enters the first one."""
    squares, variances, undamped_variances = [], [], []
    entering_BTD = token_values(batch, steps[0], ENTERING)
    xp = array_namespace(entering_BTD)
    undamped_BTD = entering_BTD
    for step in steps:
        attention_BTD, experts_BTD = added[step]
        layer_BTD = attention_BTD + experts_BTD
        squares.append(xp.stack([xp.sum(x**2, axis=(1, 2)) for x in (attention_BTD, experts_BTD, layer_BTD)], axis=-1))
        undamped_BTD = undamped_BTD + layer_BTD / batch.architecture.loop_factors[step]
        after_BTD = token_values(batch, step, ENTERING) + layer_BTD
        variances.append(xp.sum(xp.var(after_BTD, axis=-1), axis=1))
        undamped_variances.append(xp.sum(xp.var(undamped_BTD, axis=-1), axis=1))
    return {
        "square": xp.stack(squares, axis=1),
        "variance": xp.stack(variances, axis=1),
        "undamped": xp.stack(undamped_variances, axis=1),
        "entering": xp.sum(xp.var(entering_BTD, axis=-1), axis=1),
    }


def _cosine(early_BTD: Floats, late_BTD: Floats, token_BT: NDArray[np.bool_]) -> dict[str, Array]:
    found = similarity.cosine_sums(early_BTD, late_BTD, token_BT)
    return {name: found[name] for name in ("count", "cosine", "shuffled_cosine", "square_a", "square_b")}


def _ratios(
    early_BTD: Floats, late_BTD: Floats, token_BT: NDArray[np.bool_], orders_XBT: NDArray[np.intp]
) -> dict[str, NDArray[np.floating]]:
    """Histograms of the ratio of norms, of the tokens and of shuffled ones."""
    norm = array_namespace(early_BTD).linalg.vector_norm
    early_BT, late_BT = (to_numpy(norm(x, axis=-1)) for x in (early_BTD, late_BTD))
    counted_BT = token_BT & (early_BT > 0)
    counts_BJ, ends_2J = count(ratio(late_BT, early_BT), counted_BT)
    shuffled = [count(ratio(np.take_along_axis(late_BT, order_BT, 1), early_BT), counted_BT) for order_BT in orders_XBT]
    return {
        "counts": counts_BJ,
        "ends": ends_2J,
        "shuffled": np.sum([each.counts_BJ.sum(0, dtype=np.float64) for each in shuffled], 0),
        "shuffled ends": np.max([each.ends_2J for each in shuffled], 0),
    }


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Updates beside each other, then norms and variances along the steps."""
    layout, options = totals.layout, totals.options
    found: list[Quantity] = []
    for update in options.updates:
        compared = {each.between: each for each in layout.comparisons if each.update == update}
        nexts = _compared(totals, compared[NEXT_LAYER], {}) if NEXT_LAYER in compared else []
        unlooped = {each.name: float(each.value_RLH[0].mean()) for each in nexts}
        where = {"update": update}
        if "visits" in compared:
            found += _compared(totals, compared["visits"], unlooped)
        elif update == "visit" and layout.partial:
            gaps = not_compared(QUANTITIES, layout.grid, options.compare, where, "needs every looped layer recorded")
            found += gaps
        else:
            found += not_compared(QUANTITIES, layout.grid, options.compare, where)
        found += nexts
    return [*found, *_norms(totals), *_variances(totals)]


def _compared(totals: Totals[Layout, Options], compared: Comparison, unlooped: dict[str, float]) -> list[Quantity]:
    """Ratios and cosine of one kind of update."""
    sums = under(totals.sums, compared.word)
    ends_L2J, shuffled_ends_L2J = (totals.largest[f"{compared.word}.{name}"] for name in ("ends", "shuffled ends"))
    shuffled_LJ = totals.whole[f"{compared.word}.shuffled"]
    values = {
        MEDIAN: np.stack([median(sums["counts"][:, p], ends_2J) for p, ends_2J in enumerate(ends_L2J)], -1),
        RMS: np.sqrt(ratio(sums["square_b"], sums["square_a"])),
        COSINE: similarity.raw_cosine(sums),
    }
    nulls = {
        MEDIAN: np.array([median(*each) for each in zip(shuffled_LJ, shuffled_ends_L2J, strict=True)])[:, None],
        RMS: None,
        COSINE: similarity.shuffled_raw_cosine(sums)[0, :, None],
    }
    end = "" if compared.between == "visits" else f", {NEXT_LAYER}"
    return [
        Quantity(
            name=name + end,
            value_RLH=value_RL[..., None],
            places=compared.places,
            n=totals.n["tokens"],
            nulls={"shuffled": nulls[name], "unlooped": unlooped.get(f"{name}, {NEXT_LAYER}")},
            where={"update": compared.update},
        )
        for name, value_RL in values.items()
    ]


def _norms(totals: Totals[Layout, Options]) -> list[Quantity]:
    """As added and undamped: the layer's update by part of the network, all by step."""
    grid, sums = totals.layout.grid, totals.sums
    norm_RLU = np.sqrt(ratio(sums["square"], sums["tokens"][:, None, None]))
    factor_L = np.array([totals.architecture.loop_factors[step] for step in grid.steps if isinstance(step, int)])
    alone = once_visited(totals.architecture.steps)
    once = [p for p, step in enumerate(grid.steps) if step in alone]

    def note(place: Place) -> str:
        factor = factor_L[place.positions[0]]
        return "" if factor == 1 else f"loop factor {factor:.4g} does not cancel here"

    found = []
    for u, update in enumerate(OF_ONE_STEP):
        norm_RL = norm_RLU[..., u]
        nulls = {"unlooped": float(norm_RL[0, once].mean()) if once else None}
        for title, value_RL in (("update norm", norm_RL), ("undamped norm", norm_RL / factor_L)):
            named = [(title, grid.places(("layer",)))]
            if update == "layer":
                named = [*((f"{title}, {part}", (place,)) for part, place in grid.parts()), *named]
            found += [
                Quantity(name=name, value_RLH=value_RL[..., None], places=places, n=totals.n["tokens"], nulls=nulls,
                         where={"update": update}, note=note if title == "update norm" else no_note)
                for name, places in named
            ]  # fmt: skip
    return found


def _variances(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Of the stream at the end of each part and after each step."""
    grid, sums, n = totals.layout.grid, totals.sums, totals.n["tokens"]
    before = Place("headline", {"layers": f"before {grid.layer(0) + 1}", "visit": 1}, [0], [])
    found = [Quantity(name="stream variance, entering", places=(before,), n=n,
                      value_RLH=ratio(sums["entering"], sums["tokens"])[:, None, None])]  # fmt: skip
    whole = grid.steps == tuple(range(len(grid.steps)))
    gap = "" if whole else "needs every step from the first recorded"
    ends = [(f", {part}", (place._replace(positions=place.positions[-1:]),)) for part, place in grid.parts()]
    for name, title, undefined in (("variance", "stream variance", ""), ("undamped", "undamped variance", gap)):
        value_RLH = ratio(sums[name], sums["tokens"][:, None])[..., None]
        found += [
            Quantity(name=title + end, value_RLH=value_RLH, places=places, n=n, undefined=undefined,
                     note=(lambda place: "not a run at scale 1") if name == "undamped" else no_note)
            for end, places in (*ends, ("", grid.places(("layer",))))
        ]  # fmt: skip
    return found


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Norm ratio and cosine by layer with the null dotted, then norms and variance along the steps."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    titles = (MEDIAN, COSINE, "update norm, as added", "stream variance, undamped dashed")
    colours = {"attention": "#4059ad", "experts": "#f4b942", "layer": "#2a9d8f"}
    drawn: Figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.2)
    for quantity in quantities(totals):
        places = [place for place in quantity.places if place.level == "layer" and not quantity.undefined]
        values = [quantity.at(place)[0] for place in places]
        update = str(quantity.where.get("update", ""))
        colour, is_ratio = colours.get(update, "#444444"), quantity.name == MEDIAN
        if quantity.name in (MEDIAN, COSINE):
            visits = [str(place.where["visit"]) for place in places]
            nulls = [quantity.null_at(place)["shuffled"] for place in places]
            for visit in dict.fromkeys(visits):
                which = [at for at, each in enumerate(visits) if each == visit]
                for y, dash, end in ((values, "solid", ""), (nulls, "dot", ", shuffled")):
                    name = f"{update}, {visit}{end}"
                    x, y_at = [places[at].where["layers"] for at in which], [y[at] for at in which]
                    style = {"name": name, "legendgroup": name, "showlegend": is_ratio}
                    trace = Scatter(x=x, y=y_at, line={"dash": dash, "color": colour}, **style)
                    drawn.add_trace(trace, row=1, col=1 if is_ratio else 2)
        elif quantity.name in ("update norm", "stream variance", "undamped variance") and places:
            line = {"color": colour, "dash": "dash" if quantity.name == "undamped variance" else "solid"}
            name = f"norm, {update}" if update else quantity.name
            trace = Scatter(x=totals.layout.grid.labels(), y=values, name=name, line=line)
            drawn.add_trace(trace, row=2, col=1 if update else 2)
    if not any(each.between == "visits" for each in totals.layout.comparisons):
        # Relative to the paper: a plot without traces has no axes to be placed by.
        drawn.add_annotation(text=NEEDS_TWO_VISITS, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.8)
    drawn.update_yaxes(type="log", row=2, col=2)
    drawn.update_xaxes(title_text="layer", dtick=1, row=1)
    drawn.update_layout(title=TITLE, height=900)
    return {"updates": drawn}


def main() -> None:
    """`python -m probes.residual_updates`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
