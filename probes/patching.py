"""Where is it decided which bracket closes: what, put from a clean run into a corrupted one, brings its answer back?

Pairs of Dyck episodes differ in a few characters and in the first closer of the answer (`--swap`). The corrupted one
runs with a site's value taken from the clean one, at one step and group of tokens, and

    recovery = (patched - corrupted) / (clean - corrupted)

of the score: the logit of the clean answer's first token minus that of the corrupted one's, before the answer. Sums
over episodes are divided, paired by episode. Nulls: a change as large in a random direction, and the same patch in
other layers, for looped layers those that are not. Patching a value with itself changes nothing, to the bit.

`approximation` is attribution patching: the change times the score's gradient in the corrupted run, one backward pass
for all; `correlation` is between its grid (step, tokens, head) and the exact one.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from cache.selection import num_heads
from probes.running import command
from probes.running.probe import Result, answer, no_sites
from probes.running.source import SampleSet, Subject
from probes.statistics.arrays import Floats, ratio
from probes.statistics.grid import HEADS, STEPS, Grid, Place
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.dyck import Swap, dyck_pairs
from smelt_interp.data.dyck_scores import answer_start
from smelt_interp.data.samples import Role, Samples, role_name
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, check_heads
from smelt_interp.validation import Seed, different, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel
    from probes.running.patches import Patch, PatchedRuns

TITLE = "Patching"
INSTEAD = "--sites names others, such as attn.hook_z, which every network has"
needs = no_sites
DATA = DataOptions(samples=32)
OVERVIEW = ({"quantity": "recovery", "tokens": "last token"},)

EXACT, RANDOM, FAST = "exact", "random direction", "approximation"
CLEAN, CORRUPTED, SAMPLES = "clean score", "corrupted score", "samples"
JOIN = "|"


@validated
class Options:
    """What is patched, in groups of which tokens."""

    sites: tuple[str, ...] = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out")
    """Hook suffixes, each by itself."""
    by: Literal["layer", "head"] = "layer"
    """All heads of a step together, or each by itself."""
    tokens: Literal["role", "position"] = "role"
    """Groups of tokens: by role, or each of the last ones before the answer."""
    last: Annotated[int, Field(ge=1, le=1024)] = 8
    """With --tokens position: how many."""
    swap: Swap = "closer"
    """What the corrupted episode has otherwise: a closer wherever it stands, or the query's last open bracket."""
    nulls: bool = True
    """Also change as much in a random direction."""
    patch_seed: Seed = 0
    """Of the random directions."""

    def __post_init__(self) -> None:
        different("sites", self.sites)
        check_heads(self.sites, by_head=self.by == "head")
        if whole := [suffix for suffix in self.sites if SITES[suffix].integer]:
            raise UserError(f"a site to patch must hold real numbers; got {whole[0]}")
        if "head_results" in {SITES[suffix].computed for suffix in self.sites}:
            raise UserError("heads to patch must be those of a site that every pass has; got attn.hook_result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The grid of one site a time: steps and heads; and the groups of tokens."""

    grid: Grid
    groups: tuple[str, ...]
    heads: tuple[tuple[str, int], ...]
    """Each site, and how many of its heads are patched one by one; 1 where all are together."""


def check_data(data: DataOptions) -> None:
    """Raise UserError for data that has no pairs, before a network is opened."""
    if data.data != ("dyck",):
        raise UserError(f"data to patch must be dyck, which has pairs; got {' '.join(data.data)}")


def choose_samples(subject: Subject, data: DataOptions, options: Options) -> tuple[SampleSet, ...]:
    """Pairs of Dyck episodes. Raises UserError for other data, as `check_causal` does, and as `dyck_pairs` does."""
    check_data(data)
    check_causal(subject.architecture)
    length = min(data.length, subject.architecture.context)
    tokenizer = subject.tokenizer
    pairs = dyck_pairs(data, data.samples, seed=data.seed, length=length, tokenizer=tokenizer, swap=options.swap)
    return (SampleSet(name="dyck", samples=pairs.clean, corrupted=pairs.corrupted),)


def start_with(network: "LoopedModel", data: SampleSet, options: Options) -> Sums[Layout, Options]:
    """Scores of patched runs by episode. Raises UserError for samples without pairs, and as `check_causal` does."""
    check_causal(network.architecture)
    if data.corrupted is None:
        raise UserError("samples to patch must be pairs; got none that are corrupted: make them with choose_samples")
    run = Patching(network, data.corrupted)
    return Sums(network.architecture, options, lay_out, run.reduce, quantities, seed=options.patch_seed)


def check_causal(architecture: Architecture) -> None:
    """Raise UserError for a network that has no score of a next token."""
    if not architecture.causal:
        raise UserError(f"a network to patch must predict the next token; {architecture.family} fills in others")


def result(sums: Sums[Layout, Options]) -> Result:
    """Recovery by site and group of tokens, and its map as a figure."""
    return answer(sums, figures)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every step."""
    architecture = batch.architecture
    heads = {site: num_heads(site, architecture) if options.by == "head" else 1 for site in options.sites}
    steps = tuple(range(len(architecture.steps)))
    grid = Grid(architecture=architecture, loops=loops, steps=steps, heads=tuple(range(max(heads.values()))))
    return Layout(grid=grid, groups=tuple(token_groups(batch.samples, options)), heads=tuple(heads.items()))


def token_groups(samples: Samples, options: Options) -> dict[str, NDArray[np.bool_]]:
    """Which tokens are patched together, (B, T) each, all before the answer."""
    start_B1 = answer_start(samples)[:, None]
    position_T = np.arange(samples.ids_NT.shape[1])
    if options.tokens == "position":
        return {f"{back} before": position_T == start_B1 - back for back in range(1, options.last + 1)}
    roles = (Role.DEMONSTRATION_INPUT, Role.DEMONSTRATION_ANSWER, Role.QUERY)
    last_BT = position_T == start_B1 - 1
    groups = {role_name(role): (samples.role_NT == role) & ~last_BT for role in roles}
    return {**groups, "last token": last_BT}


class Patching:
    """The patches of one network on one set of pairs."""

    def __init__(self, network: "LoopedModel", corrupted: Samples) -> None:
        self.network, self.corrupted = network, corrupted

    def reduce(self, batch: Batch, layout: Layout, options: Options) -> Reduced:
        """What each patch adds to the corrupted score, exactly and by its gradient."""
        from probes.running.patches import Patch, PatchedRuns

        rows = batch.sample_ids
        runs = PatchedRuns(self.network, batch.samples, self.corrupted.rows(rows), options.sites)
        clean_B, corrupted_B = (x.double().cpu().numpy() for x in (runs.clean_B, runs.corrupted_B))
        sums: dict[str, Floats] = {SAMPLES: np.ones(len(rows)), CLEAN: clean_B, CORRUPTED: corrupted_B}
        groups = token_groups(batch.samples, options)
        approximate = runs.attributions(options.sites)
        for site, num in layout.heads:
            each = [(g, head) for g in range(len(groups)) for head in range(num)]
            patches = [Patch(list(groups.values())[g], head if options.by == "head" else None) for g, head in each]
            shape = (len(groups), len(rows), len(layout.grid.steps), num)
            steps = runs.steps
            exact_GBLH = _gained(runs, site, {step: runs.values(site, step) for step in steps}, patches, num)
            fast_GBLH, random_GBLH = np.zeros(shape), np.zeros(shape)
            for step in steps:
                fast_GBLH[:, :, step] = _summed(approximate[site, step], groups, runs.length, by_head=num > 1)
            if options.nulls:
                drawn = {step: runs.random(site, step, rows, options.patch_seed) for step in steps}
                random_GBLH = _gained(runs, site, drawn, patches, num)
            for kind, found_GBLH in ((EXACT, exact_GBLH), (FAST, fast_GBLH), (RANDOM, random_GBLH)):
                for group, found_BLH in zip(groups, found_GBLH, strict=True):
                    sums[JOIN.join((site, group, kind))] = found_BLH
        return Reduced(by_sample=sums, defined={SAMPLES: np.ones(len(rows), np.bool_)})


def _gained(
    runs: "PatchedRuns", site: str, given: "dict[int, Tensor]", patches: "list[Patch]", num: int
) -> NDArray[np.float64]:
    """What patches add to the corrupted score, (G, B, L, H): the heads of a group are next to one another."""
    gained_LPB = (runs.scores(site, given, patches) - runs.corrupted_B).double().cpu().numpy()
    return rearrange(gained_LPB, "step (group head) row -> group row step head", head=num)


def _summed(
    attribution: "Tensor", groups: dict[str, NDArray[np.bool_]], length: int, *, by_head: bool
) -> NDArray[np.float64]:
    """Attributions (B, T) or (B, T, H) summed over each group's tokens, (G, B, H)."""
    found_BTH = attribution.double().cpu().numpy()
    found_BTH = found_BTH.reshape(*found_BTH.shape[:2], -1)
    if not by_head:
        found_BTH = found_BTH.sum(-1, keepdims=True)
    return np.stack([np.einsum("bt,bth->bh", where_BT[:, :length], found_BTH) for where_BT in groups.values()])


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Scores of the pairs; recovery, exact and approximate, of each site and group; their correlation by site."""
    layout, sums, n = totals.layout, totals.sums, totals.n[SAMPLES]
    whole = [Place("headline", {}, [0], [])]
    found = [
        Quantity(name=name, value_RLH=ratio(sums[name], sums[SAMPLES])[:, None, None], places=whole, n=n)
        for name in (CLEAN, CORRUPTED)
    ]
    gap_R = (sums[CLEAN] - sums[CORRUPTED])[:, None, None]
    levels = HEADS if totals.options.by == "head" else STEPS
    for site, num in layout.heads:
        places = [place for place in layout.grid.places(levels) if all(head < num for head in place.heads)]
        both: list[list[NDArray[np.float64]]] = []
        for group in layout.groups:
            exact_RLH, fast_RLH, random_RLH = (
                ratio(sums[JOIN.join((site, group, kind))], gap_R) for kind in (EXACT, FAST, RANDOM)
            )
            both.append([exact_RLH, fast_RLH])
            nulls: dict[str, NDArray[np.float64] | float | None] = {"other_layers": layout.grid.elsewhere(exact_RLH[0])}
            if totals.options.nulls:
                nulls = {"random_direction": random_RLH[0], **nulls}
            where = {"site": site, "tokens": group}
            found.append(
                Quantity(name="recovery", value_RLH=exact_RLH, places=places, n=n, nulls=nulls, where={**where})
            )
            found.append(Quantity(name=FAST, value_RLH=fast_RLH, places=places, n=n, where={**where}))
        cells = [np.concatenate([each[kind].reshape(len(gap_R), -1) for each in both], -1) for kind in (0, 1)]
        found.append(Quantity(name="correlation", value_RLH=_correlation(*cells)[:, None, None], places=whole, n=n,
                              where={"site": site}, picked=True))  # fmt: skip
    return found


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pearson's, along the last axis; NaN where one of them does not vary."""
    one, other = (x - x.mean(-1, keepdims=True) for x in (one, other))
    return ratio((one * other).sum(-1), np.sqrt((one**2).sum(-1) * (other**2).sum(-1)))


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Recovery of each site, steps against groups of tokens, mean over heads."""
    from plotly.graph_objects import Figure, Heatmap

    drawn = {}
    found = [quantity for quantity in quantities(totals) if quantity.name == "recovery"]
    for site, _ in totals.layout.heads:
        of_site = [quantity for quantity in found if quantity.where["site"] == site]
        value = np.stack([quantity.value_RLH[0].mean(-1) for quantity in of_site])
        labels = [str(quantity.where["tokens"]) for quantity in of_site]
        figure: Figure = Figure(Heatmap(z=value, x=totals.layout.grid.labels(), y=labels, zmid=0, colorscale="RdBu"))
        figure.update_layout(title=TITLE, xaxis_title="patched", yaxis_title="tokens")
        drawn[site] = figure
    return drawn


def main() -> None:
    """`python -m probes.patching`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
