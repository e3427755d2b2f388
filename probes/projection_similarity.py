"""Does a token ask, offer and carry the same on its second visit: are Q, K, V and the attention pattern alike?

Q, K and V of one token are compared between two visits of the same layer, before RoPE, which leaves the cosine of a
token with itself unchanged. Means are over all tokens of the samples, over heads (or over whole vectors, heads
concatenated), and in the headline over the looped layers.

    cosine, raw          mean over tokens of cos(a, b)
    cosine, centred      pooled: sum <a - ma, b - mb> / sqrt(sum |a - ma|^2 sum |b - mb|^2), ma and mb the means over
                         all measured tokens of that visit (a mean by position breaks down at small batches)
    pattern distance     mean over queries of the Jensen-Shannon distance (bits, 0 to 1) of the two attention rows
    pattern cosine       mean over queries of their cosine

Nulls. `shuffled` of a cosine: the tokens of the later visit shuffled within their sample, exact mean over all shuffles;
raw, it is far above 0 where vectors share an offset. `shuffled` of a pattern: the later visit's row of the sample
before it, at the same position of a segment that starts at the same place.
A segment's first query can only see itself and has equal rows on every visit: `t_min` leaves it out.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import einops
import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import Mask, is_token, recorded_steps, token_values
from probes.statistics.grid import Grid, pair_label
from probes.statistics.named_sums import stacked, under
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity
from probes.statistics.sums import Between, Reduced, Sums, Totals
from probes.statistics.visit_pairs import check_visits, not_compared, visit_pairs
from smelt_interp import similarity
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.arrays import Array, Floats
from smelt_interp.data.datasets import DataOptions
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Projections and patterns across visits"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = tuple({"quantity": f"{name} cosine, raw"} for name in "QKV")

PROJECTIONS = {"Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v"}
PATTERN = "attn.hook_pattern"
COSINES = {
    "raw": (similarity.raw_cosine, similarity.shuffled_raw_cosine),
    "centred": (similarity.centred_cosine, similarity.shuffled_centred_cosine),
}
PATTERNS = {"distance": similarity.pattern_distance, "cosine": similarity.pattern_cosine}
QUANTITIES = (
    *(f"{subject} cosine, {kind}" for subject in PROJECTIONS for kind in COSINES),
    *(f"pattern {name}" for name in PATTERNS),
)

Grids = dict[str, Grid]
"""The compared pairs of visits, with the heads of Q, K, V and the patterns; concatenated heads are none."""


@validated
class Options:
    """Which visits are compared, and over what."""

    compare: Indices = (0, 1)
    """Visits to compare: every pair of them."""
    heads: Literal["separate", "concatenated"] = "separate"
    """Cosine of Q, K, V for each head, or of the whole vector with the heads concatenated."""
    t_min: Annotated[int, Field(ge=0, le=10**9)] = 1
    """Patterns: least distance of a query from its segment's start. 0 counts queries that only see themselves."""
    resample_seed: Seed = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        check_visits(self.compare)


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The three projections and the patterns."""
    return (*PROJECTIONS.values(), PATTERN)


def start(architecture: Architecture, options: Options) -> Sums[Grids, Options]:
    """Sums over the tokens of each sample, and over queries beside those of the sample before."""
    return Sums(architecture, options, lay_out, reduce, quantities, seed=options.resample_seed,
                between=Between(suffixes=(PATTERN,), compare=between))  # fmt: skip


def result(sums: Sums[Grids, Options]) -> Result:
    """Cosines and distances with their nulls, and a figure of them by layer."""
    return answer(sums, figures)


# Arithmetic


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grids:
    """The compared pairs of visits, with the heads of each site; no pair on a Baseline."""
    architecture = batch.architecture
    pairs = visit_pairs(architecture, recorded_steps(batch, needs(architecture)), options.compare)
    whole = options.heads == "concatenated"
    return {
        subject: Grid(architecture=architecture, loops=loops, steps=pairs,
                      heads=() if whole and suffix != PATTERN else batch.heads[suffix])
        for subject, suffix in (*PROJECTIONS.items(), ("pattern", PATTERN))
    }  # fmt: skip


def reduce(batch: Batch, grids: Grids, options: Options) -> Reduced:
    """Sums over tokens of Q, K, V and over queries of patterns, for each pair of visits."""
    token_BT = is_token(batch.samples)
    found: dict[str, Array] = {}
    for subject, suffix in PROJECTIONS.items():
        pairs = [[_vectors(batch, step, suffix, options) for step in pair] for pair in _pairs(grids)]
        found |= stacked(subject, [similarity.cosine_sums(early, late, token_BT) for early, late in pairs])
    queries_BT = counted_queries(batch, options)
    rows = [[pattern_rows(batch, step) for step in pair] for pair in _pairs(grids)]
    found |= stacked("pattern", [similarity.pattern_sums(early, late, queries_BT) for early, late in rows])
    return Reduced(by_sample=found, defined={"tokens": batch.samples.length_N > 0})


def between(before: Batch, after: Batch, grids: Grids, options: Options) -> dict[str, Array]:
    """The attention of samples on the earlier visit beside that of the ones before them on the later visit, summed over
    the queries that both count at the same place of a segment that starts at the same place."""
    length = min(each.samples.ids_NT.shape[1] for each in (before, after))  # parts of the data may differ
    counted_BT, other_BT = (counted_queries(each, options)[:, :length] for each in (after, before))
    start_BT, other_start_BT = (each.samples.segment_start_NT[:, :length] for each in (after, before))
    which_BT = counted_BT & other_BT & (start_BT == other_start_BT)
    found = []
    for steps in _pairs(grids):
        batch_and_step = zip((after, before), steps, strict=True)
        early, late = (pattern_rows(each, step)[:, :length, :, :length] for each, step in batch_and_step)
        found.append(similarity.pattern_sums(early, late, which_BT))
    return {name: einops.reduce(x, "b ... -> ...", "sum") for name, x in stacked("other", found).items()}


def _pairs(grids: Grids) -> list[tuple[int, int]]:
    return [at for at in grids["pattern"].steps if not isinstance(at, int)]


def _vectors(batch: Batch, step: int, suffix: str, options: Options) -> Floats:
    vectors_BTHC = token_values(batch, step, suffix)
    whole = options.heads == "concatenated"
    return rearrange(vectors_BTHC, "b t h c -> b t 1 (h c)") if whole else vectors_BTHC


def pattern_rows(batch: Batch, step: int) -> Floats:
    """Attention rows with the query axis second. -> (B, T, Q, S)"""
    return token_values(batch, step, PATTERN)


def counted_queries(batch: Batch, options: Options) -> Mask:
    """Queries whose rows are compared. -> (B, T)"""
    start_BT = batch.samples.segment_start_NT
    return np.asarray(is_token(batch.samples) & (np.arange(start_BT.shape[1]) - start_BT >= options.t_min))


# What the sums say


def quantities(totals: Totals[Grids, Options]) -> list[Quantity]:
    """Each of QUANTITIES at every pair of visits and head."""
    grids, n = totals.layout, totals.n["tokens"]
    if not _pairs(grids):
        return not_compared(QUANTITIES, grids["pattern"], totals.options.compare)
    found = []
    for subject in PROJECTIONS:
        sums = under(totals.sums, subject)
        for kind, (value, null) in COSINES.items():
            found.append(_quantity(f"{subject} cosine, {kind}", value(sums), null(sums)[0], grids[subject], n))
    patterns, other = under(totals.sums, "pattern"), under(totals.whole, "other")
    for name, mean in PATTERNS.items():
        shuffled = mean(other) if other else np.array(np.nan)  # a single sample has none before it
        found.append(_quantity(f"pattern {name}", mean(patterns), shuffled, grids["pattern"], n))
    return found


def _quantity(name: str, value_RLH: Floats, null_LH: NDArray[np.float64], grid: Grid, n: int) -> Quantity:
    return Quantity(name=name, value_RLH=value_RLH, places=grid.places(), n=n, nulls={"shuffled": null_LH})


def figures(totals: Totals[Grids, Options]) -> "dict[str, Figure]":
    """Each quantity by layer: a dot a head, a line through their mean, the null dotted; a marker a pair of visits."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    panels = ("cosine, raw", "cosine, centred", "pattern distance", "pattern cosine")
    colours = {"Q": "#4059ad", "K": "#f4b942", "V": "#2a9d8f", "pattern": "#8d5a97"}
    drawn: Figure = make_subplots(rows=2, cols=2, subplot_titles=panels, vertical_spacing=0.14, shared_xaxes=True)
    for quantity in quantities(totals):
        if quantity.undefined:
            drawn.add_annotation(text=NEEDS_TWO_VISITS, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
            break
        subject = quantity.name.split()[0]
        grid, colour = totals.layout[subject], colours[subject]
        panel = next(index for index, title in enumerate(panels) if quantity.name.endswith(title))
        place = {"row": panel // 2 + 1, "col": panel % 2 + 1}
        # A line through the means of each pair of visits, its null, and the heads.
        value_LH, null_LH = quantity.value_RLH[0], np.asarray(quantity.nulls["shuffled"])
        for symbol, visits in enumerate(dict.fromkeys(grid.visits(p) for p in range(len(grid.steps)))):
            which = [p for p in range(len(grid.steps)) if grid.visits(p) == visits]
            layers = [grid.layer(p) + 1 for p in which]
            style = {"name": f"{subject}, {pair_label(visits)}", "legendgroup": f"{subject} {visits}"}
            lines = ((value_LH, "solid", panel in (0, 2)), (null_LH, "dot", False))
            for line_LH, dash, shown in lines:
                drawn.add_trace(Scatter(x=layers, y=line_LH[which].mean(1), mode="lines", showlegend=shown,
                                        line={"color": colour, "dash": dash}, **style), **place)  # fmt: skip
            dots = {"color": colour, "opacity": 0.4, "symbol": symbol}
            drawn.add_trace(Scatter(x=np.repeat(layers, value_LH.shape[1]), y=value_LH[which].ravel(), mode="markers",
                                    marker=dots, showlegend=False, **style), **place)  # fmt: skip
    drawn.update_xaxes(title_text="layer", dtick=1, row=2)
    drawn.update_layout(title=TITLE, height=720)
    return {"by layer": drawn}


def main() -> None:
    """`python -m probes.projection_similarity`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
