"""Does a token go to the same experts on its second visit?

For two visits of one layer and one token, k experts chosen of E on each:

    experts shared       o, the size of the intersection of the two sets
    Jaccard              o / (2k - o)
    weight shared        sum over experts of the smaller of its two weights, as used (1 at most where they sum to 1)

Nulls, since popularity alone makes sets overlap. `uniform`: two uniform sets of k, k^2 / E for o (hypergeometric).
`popularity`: sum over e of p1(e) p2(e), p_v(e) the share of tokens whose top k holds e on that visit. `shuffled`: the
later visit's choices shuffled among the tokens of the sample; for o its exact mean over all shuffles, and z, the
standard deviations of the shuffle by which o exceeds it (exact variance; layers shuffled independently).

How tokens are spread over the experts on each visit is the question of `probes.expert_load`.
"""

import sys
from collections.abc import Sequence
from functools import partial
from math import comb
from typing import TYPE_CHECKING, Annotated

import einops
import numpy as np
from array_api_compat import array_namespace
from einops import rearrange, repeat
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import is_token, values_of_steps
from probes.statistics.experts import INDICES, WEIGHTS, routed_steps
from probes.statistics.grid import STEPS, Grid
from probes.statistics.named_sums import under
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity, no_note
from probes.statistics.shuffles import MOST_SHUFFLES, shuffled_positions
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.visit_pairs import Pair, check_visits, not_compared, visit_pairs
from smelt_interp import similarity
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.arrays import Floats, moved
from smelt_interp.data.datasets import DataOptions
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Experts across visits"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ({"quantity": "experts shared"},)

SHARED, JACCARD, WEIGHT, Z = QUANTITIES = ("experts shared", "Jaccard", "weight shared", "experts shared, z")


@validated
class Options:
    """Which visits are compared."""

    compare: Indices = (0, 1)
    """Visits to compare: every pair of them."""
    shuffles: Annotated[int, Field(ge=1, le=MOST_SHUFFLES)] = 4
    """Shuffles of tokens behind the nulls of Jaccard and weights; o's null needs none."""
    resample_seed: Seed = 0
    """Seed of the bootstrap and of shuffles."""

    def __post_init__(self) -> None:
        check_visits(self.compare)


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The choice and its weights."""
    return (INDICES, WEIGHTS)


def start(architecture: Architecture, options: Options) -> Sums[Grid, Options]:
    """Sums over the tokens of each sample, for every pair of visits."""
    return Sums(architecture, options, lay_out, reduce, quantities, seed=options.resample_seed)


def result(sums: Sums[Grid, Options]) -> Result:
    """Overlaps with their nulls, and a figure of the experts shared by layer."""
    return answer(sums, figures)


# Arithmetic


def uniform_jaccard(top_k: int, num_experts: int) -> float:
    """Expectation of o / (2k - o) for two uniform sets of k among E."""
    ways = [comb(top_k, o) * comb(num_experts - top_k, top_k - o) for o in range(top_k + 1)]
    return sum(o / (2 * top_k - o) * way for o, way in enumerate(ways)) / comb(num_experts, top_k)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grid:
    """The compared pairs of visits; none on a Baseline. Raises UserError for a dense network."""
    pairs = visit_pairs(batch.architecture, routed_steps(batch, needs(batch.architecture)), options.compare)
    return Grid(architecture=batch.architecture, loops=loops, steps=pairs)


def reduce(batch: Batch, grid: Grid, options: Options) -> Reduced:
    """Sums over tokens of what two choices share, as they are and shuffled."""
    token_BT = is_token(batch.samples)
    orders_XBT = shuffled_positions(token_BT, batch.sample_ids, options.resample_seed, options.shuffles)
    pairs = [at for at in grid.steps if not isinstance(at, int)]
    found = _pair_sums(batch, pairs, token_BT, orders_XBT) if pairs else {}
    return Reduced(by_sample=found, defined={"tokens": batch.samples.length_N > 0})


def _pair_sums(
    batch: Batch, pairs: Sequence[Pair], token_BT: NDArray[np.bool_], orders_XBT: NDArray[np.intp]
) -> dict[str, Floats]:
    """`similarity.overlap_sums`, and the mean over shuffles of Jaccard and of the shared weight: (B, L, ...) of all L
    pairs at once, since what costs is the number of operations."""
    early_BTLK, weight_early_BTLK, late_BTLK, weight_late_BTLK = (
        values_of_steps(batch, steps, suffix) for steps in zip(*pairs, strict=True) for suffix in (INDICES, WEIGHTS)
    )
    sums = similarity.overlap_sums(
        early_BTLK, weight_early_BTLK, late_BTLK, weight_late_BTLK, token_BT, batch.architecture.num_experts
    )
    # Every shuffle is a sample more: (Z, T, L, K), Z = X B.
    xp, num = array_namespace(late_BTLK), len(orders_XBT)
    order_ZT11 = moved(rearrange(orders_XBT, "x b t -> (x b) t 1 1"), late_BTLK)
    early_ZTLK, weight_early_ZTLK, late_ZTLK, weight_late_ZTLK = (
        repeat(x, "b ... -> (x b) ...", x=num) for x in (early_BTLK, weight_early_BTLK, late_BTLK, weight_late_BTLK)
    )
    late_ZTLK, weight_late_ZTLK = (xp.take_along_axis(x, order_ZT11, axis=1) for x in (late_ZTLK, weight_late_ZTLK))
    token_ZT = np.tile(token_BT, (num, 1))
    shuffled = similarity.shared_sums(early_ZTLK, weight_early_ZTLK, late_ZTLK, weight_late_ZTLK, token_ZT)
    for name in ("jaccard", "weighted"):
        sums[f"shuffled_{name}"] = einops.reduce(shuffled[name], "(x b) l -> b l", "mean", x=num)
    return {f"overlap.{name}": x for name, x in sums.items()}


# What the sums say


def quantities(totals: Totals[Grid, Options]) -> list[Quantity]:
    """Each of QUANTITIES at every pair of visits."""
    grid, architecture = totals.layout, totals.architecture
    if not grid.steps:
        return not_compared(QUANTITIES, grid, totals.options.compare)
    # Each value with its nulls, then where all of them stand.
    sums = under(totals.sums, "overlap")
    top_k, num_experts = architecture.top_k, architecture.num_experts
    values: dict[str, tuple[Floats, dict[str, Floats | float | None]]] = {
        SHARED: (
            similarity.mean_overlap(sums),
            {
                "uniform": similarity.uniform_overlap(top_k, num_experts),
                "popularity": similarity.popularity_overlap(sums)[0, :, None],
                "shuffled": similarity.shuffled_overlap(sums)[0, :, None],
            },
        ),
        JACCARD: (
            similarity.mean_jaccard(sums),
            {
                "uniform": uniform_jaccard(top_k, num_experts),
                "shuffled": similarity.quotient(sums["shuffled_jaccard"], sums["count"])[0, :, None],
            },
        ),
        WEIGHT: (
            similarity.mean_weighted_overlap(sums),
            {"shuffled": similarity.quotient(sums["shuffled_weighted"], sums["count"])[0, :, None]},
        ),
        Z: (similarity.shuffled_overlap_z(sums), {"shuffled": 0.0}),
    }
    return [
        Quantity(
            name=name,
            value_RLH=value_RL[..., None],
            places=grid.places(STEPS),
            n=totals.n["tokens"],
            nulls=nulls,
            note=(lambda place: f"of {top_k}") if name == SHARED else no_note,
            over=partial(_z_over_layers, sums) if name == Z else None,
        )
        for name, (value_RL, nulls) in values.items()
    ]


def _z_over_layers(sums: dict[str, Floats], positions: list[int]) -> Floats:
    """z of the overlap of several layers together, which are shuffled independently. -> (R,)"""
    names = ("overlap", "shuffled_overlap", "shuffled_variance")
    return similarity.shuffled_overlap_z({name: sums[name][:, positions].sum(1) for name in names})


def figures(totals: Totals[Grid, Options]) -> "dict[str, Figure]":
    """Experts shared by layer with its nulls, a line a pair of visits."""
    from plotly.graph_objects import Figure, Scatter

    drawn = Figure()
    shared = quantities(totals)[0]
    places = [place for place in shared.places if place.level == "layer"]
    for visit in dict.fromkeys(place.where["visit"] for place in places):
        which = [place for place in places if place.where["visit"] == visit]
        lines = {"measured": [shared.at(place)[0] for place in which]}
        lines |= {name: [shared.null_at(place)[name] for place in which] for name in shared.nulls}
        for name, y in lines.items():
            dash = "solid" if name == "measured" else "dot"
            drawn.add_trace(Scatter(x=[int(str(place.where["layers"])) for place in which], y=y,
                                    name=f"{name}, visits {visit}", line={"dash": dash}))  # fmt: skip
    if shared.undefined:
        drawn.add_annotation(text=NEEDS_TWO_VISITS, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    drawn.update_xaxes(title_text="layer", dtick=1)
    drawn.update_layout(title=f"{TITLE}: {SHARED}", height=480)
    return {"experts shared": drawn}


def main() -> None:
    """`python -m probes.expert_overlap`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
