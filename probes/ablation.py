"""What does the network lose when a site is taken away: at one step, in one head, or on a whole visit?

Each sample runs as the network is and with a site replaced; the effect is the score with the edit minus the score
without, paired by sample. The scores are the loss and, of Dyck episodes, the answer's loss and its exact match.

    zero       nothing in its place
    mean       its mean over all tokens of all samples
    resample   what a sample of another document has at the same position
    clamp      what the layer's first visit has, on later visits
    swap       what two visits of a layer have, exchanged

`--by visit` replaces all looped layers of one visit together; `layer` and `head` one step, or one head of it, at a
time, and their headline is the mean over those. Nulls: as large a change in a random direction at the same places, and
the same edit in other layers, for looped layers those that are not (by visit: in as many steps together, if any).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from cache.selection import num_heads
from probes.running import command
from probes.running.probe import Result, answer, no_sites
from probes.running.source import SampleSet
from probes.statistics.arrays import Floats, ratio
from probes.statistics.grid import HEADS, STEPS, At, Grid, Place
from probes.statistics.quantities import Quantity, error_bars
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Role
from smelt_interp.errors import UserError
from smelt_interp.plan import visits_of
from smelt_interp.sites import SITES, check_heads
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import Seed, different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from model.hooks.interventions import Edit
    from model.hooks.looped_model import LoopedModel
    from probes.running.compare import EditedPasses, Score

TITLE = "Ablation"
INSTEAD = "--sites names others, such as attn.hook_z, which every network has"
needs = no_sites
DATA = DataOptions(samples=64)
OVERVIEW = ({"quantity": "loss (nats), effect"},)

LOSS, ANSWER, EXACT = "loss (nats)", "answer loss (nats)", "exact match"
EFFECT, RANDOM, OTHER = "effect", "random direction", "other layers"
JOIN = "|"
"""Between the parts of a sum's name."""


@validated
class Options:
    """What is replaced, by what, and how much of it at a time."""

    sites: tuple[str, ...] = ("hook_attn_out", "hook_mlp_out")
    """Hook suffixes, each by itself."""
    by: Literal["layer", "visit", "head"] = "visit"
    """What is replaced together: one step, the looped layers of one visit, or one head of one step."""
    how: Literal["zero", "mean", "resample", "clamp", "swap"] = "mean"
    """What stands in its place."""
    layers: Indices = ()
    """Layers; none means all (by visit: those that are looped)."""
    nulls: bool = True
    """Also change as much in a random direction, and in other layers."""
    edit_seed: Seed = 0
    """Of random directions and of the choice of other layers."""

    def __post_init__(self) -> None:
        different("sites", self.sites)
        check_heads(self.sites, by_head=self.by == "head")


class Change(NamedTuple):
    """One edit of the grid."""

    site: str
    kind: str
    """EFFECT, RANDOM or OTHER."""
    position: int
    head: int
    """0 where all heads are replaced."""

    @property
    def name(self) -> str:
        """As the edit is known to the passes."""
        return JOIN.join(map(str, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is replaced: positions along L, and heads along H."""

    grid: Grid
    """Single steps, or the two visits of a swap."""
    together: tuple[tuple[int, ...], ...]
    """For each position along L the positions of `grid` that are replaced together."""
    places: tuple[Place, ...]
    scores: tuple[str, ...]
    heads: tuple[tuple[str, int], ...]
    """Each site, and how many of its heads are replaced one by one; 1 where all are together."""


def check_network(architecture: Architecture, options: Options) -> None:
    """Raise UserError for layers that the network has not, and where none of them is visited again as the edit asks."""
    _require_any(tuple(_steps(architecture, options)), options)


def _require_any(places: Sequence[object], options: Options) -> None:
    if not places:
        raise UserError(f"layers to ablate with --how {options.how} must be visited again; got none that are: "
                        "choose others, or loop some with --loop")  # fmt: skip


def start_with(network: "LoopedModel", data: SampleSet, options: Options) -> Sums[Layout, Options]:
    """Effects by sample of each edit."""
    run = Ablation(network, data, options)
    return Sums(network.architecture, options, run.lay_out, run.reduce, quantities, seed=options.edit_seed)


def result(sums: Sums[Layout, Options]) -> Result:
    """Effects by site, and their course along the steps as a figure."""
    return answer(sums, figures)


# Edits


class Ablation:
    """The edits of one network on one set of samples."""

    def __init__(self, network: "LoopedModel", data: SampleSet, options: Options) -> None:
        self.network, self.data, self.options = network, data, options
        self._passes: EditedPasses | None = None

    def lay_out(self, batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
        """Every step of the layers, later visits or pairs of visits as the edit asks. Raises UserError without any."""
        architecture = self.network.architecture
        steps = tuple(_steps(architecture, options))
        heads = {site: num_heads(site, architecture) if options.by == "head" else 1 for site in options.sites}
        grid = Grid(architecture=architecture, loops=loops, steps=steps, heads=tuple(range(max(heads.values()))))
        if options.by == "visit":
            groups = list(grid.groups())
            together = tuple(tuple(inside) for _, _, inside in groups)
            places = tuple(Place("headline", {"layers": layers, "visit": visit}, [index], [])
                           for index, (layers, visit, _) in enumerate(groups))  # fmt: skip
        else:
            together = tuple((position,) for position in range(len(steps)))
            places = grid.places(HEADS if options.by == "head" else STEPS)
            if options.by == "layer":
                places = tuple(place._replace(where={**place.where, "head": "all"}) for place in places)
        _require_any(together, options)
        asks = (self.data.samples.role_NT == Role.ANSWER).any(-1) & (self.data.samples.episode_N["shots"] >= 0)
        scores = (LOSS, ANSWER, EXACT) if asks.all() else (LOSS,)
        return Layout(grid=grid, together=together, places=places, scores=scores, heads=tuple(heads.items()))

    def reduce(self, batch: Batch, layout: Layout, options: Options) -> Reduced:
        """Scores as the network is, and what each edit adds to them."""
        from probes.running import compare

        known: dict[str, Score] = {LOSS: compare.loss, ANSWER: compare.dyck_loss, EXACT: compare.exact_match}
        edits = dict(self._changes(layout))
        if self._passes is None:
            named = {change.name: edit for change, edit in edits.items()}
            self._passes = compare.EditedPasses(self.network, self.data.samples, named)
        found = self._passes.scores(batch.sample_ids, {name: known[name] for name in layout.scores})
        rows, heads = len(batch.sample_ids), dict(layout.heads)
        sums: dict[str, Floats] = {"samples": np.ones(rows)}
        for k, score in enumerate(layout.scores):
            sums[score] = found[""][:, k]
            for change in edits:
                name = JOIN.join((change.site, change.kind, score))
                sums.setdefault(name, np.zeros((rows, len(layout.together), heads[change.site])))
                sums[name][:, change.position, change.head] = found[change.name][:, k] - found[""][:, k]
        return Reduced(by_sample=sums, defined={"samples": np.ones(rows, np.bool_)})

    def _changes(self, layout: Layout) -> Iterator[tuple[Change, "Edit"]]:
        """Every edit, its random null, and by visit the same in other layers."""
        from model.hooks.interventions import at_random

        options = self.options
        for site, num in layout.heads:
            for position, inside in enumerate(layout.together):
                at = [layout.grid.steps[p] for p in inside]
                for head in range(num):
                    edit = self._edit(site, at, (head,) if options.by == "head" else ())
                    yield Change(site, EFFECT, position, head), edit
                    if options.nulls and not SITES[site].integer:
                        random = at_random(edit, options.edit_seed)
                        yield Change(site, RANDOM, position, head), random
                if options.nulls and options.by == "visit" and (others := self._others(layout, inside)):
                    yield Change(site, OTHER, position, 0), self._edit(site, others, ())

    def _edit(self, site: str, at: list[At], heads: tuple[int, ...]) -> "Edit":
        """One edit of a site at some steps, or pairs of visits."""
        from model.hooks import interventions
        from model.hooks.interventions import Target

        if self.options.how == "swap":
            plan = self.network.plan
            pairs = [(plan[each[0]], plan[each[1]]) for each in at if not isinstance(each, int)]
            swaps = [interventions.swap(self.network, site, layer=one.layer, visits=(one.visit, two.visit), heads=heads)
                     for one, two in pairs]  # fmt: skip
            return interventions.together("swap", swaps)
        steps = tuple(each for each in at if isinstance(each, int))
        if self.options.how == "clamp":
            return interventions.clamp(self.network, site, steps, heads)
        make = {"zero": interventions.zero, "mean": interventions.mean, "resample": interventions.resample}
        return make[self.options.how](Target(site, steps, heads))

    def _others(self, layout: Layout, inside: tuple[int, ...]) -> list[At]:
        """As many steps of layers that run once and are not among those; none where there are fewer."""
        plan, layers = self.network.plan, {layout.grid.layer(p) for p in inside}
        if self.options.how in ("swap", "clamp"):
            return []
        once = [s for s, step in enumerate(plan) if len(visits_of(plan, step.layer)) == 1 and step.layer not in layers]
        if len(once) < len(inside):
            return []
        drawn = np.random.default_rng(self.options.edit_seed).choice(once, len(inside), replace=False)
        return sorted(int(step) for step in drawn)


def _steps(architecture: Architecture, options: Options) -> Iterator[At]:
    """The steps that an edit may replace; of a swap, the first visit of a layer with each later one."""
    plan = architecture.steps
    if outside := [layer for layer in options.layers if layer >= architecture.num_layers]:
        raise UserError(f"layers must be 1 to {architecture.num_layers}; got {outside[0] + 1}")
    for index, step in enumerate(plan):
        if options.layers and step.layer not in options.layers:
            continue
        if options.how == "swap" and step.visit:
            yield visits_of(plan, step.layer)[0], index
        elif options.how != "swap" and (step.visit or options.how != "clamp"):
            yield index


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Each score as the network is, then each site's effect on it."""
    layout, sums, n = totals.layout, totals.sums, totals.n["samples"]
    found = []
    for score in layout.scores:
        value_RLH = (sums[score] / _counted(sums["samples"]))[:, None, None]
        found.append(Quantity(name=score, value_RLH=value_RLH, places=[Place("headline", {}, [0], [])], n=n))
        for site, num in layout.heads:
            effect_RLH = ratio(sums[JOIN.join((site, EFFECT, score))], sums["samples"][:, None, None])
            found.append(
                Quantity(
                    name=f"{score}, effect",
                    value_RLH=effect_RLH,
                    places=[place for place in layout.places if all(head < num for head in place.heads)],
                    n=n,
                    nulls=_nulls(totals, site, score, effect_RLH[0]) if totals.options.nulls else {},
                    where={"site": site, "how": totals.options.how},
                )
            )
    return found


def _counted(samples_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Samples of each resample; one that holds none defines nothing."""
    return np.where(samples_R > 0, samples_R, np.nan)


def _nulls(
    totals: Totals[Layout, Options], site: str, score: str, effect_LH: NDArray[np.float64]
) -> dict[str, NDArray[np.float64] | float | None]:
    """What a change in a random direction does, and the same edit in other layers. -> (L, H) each"""
    layout, sums = totals.layout, totals.sums
    measured = {kind: sums.get(JOIN.join((site, kind, score))) for kind in (RANDOM, OTHER)}
    found = {kind.replace(" ", "_"): None if x is None else x[0] / sums["samples"][0] for kind, x in measured.items()}
    if totals.options.by != "visit":
        found[OTHER.replace(" ", "_")] = layout.grid.elsewhere(effect_LH)
    return {**found}


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """The effect on the loss along the steps, or of each visit, a bar a site, with its interval."""
    from plotly.graph_objects import Bar, Figure

    drawn: Figure = Figure()
    for quantity in quantities(totals):
        if quantity.name != f"{LOSS}, effect":
            continue
        level = "headline" if totals.options.by == "visit" else "layer"
        rows = [row for row in quantity.rows() if row["level"] == level]
        labels = [f"layer {row['layers']}, visit {row['visit']}" for row in rows]
        drawn.add_trace(
            Bar(x=labels, y=[row["value"] for row in rows], error_y=error_bars(rows), name=str(quantity.where["site"]))
        )
    drawn.update_layout(title=TITLE, xaxis_title="replaced", yaxis_title="loss with the edit - without (nats)")
    return {"loss": drawn}


def main() -> None:
    """`python -m probes.ablation`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
