"""Are the states of two steps alike as a whole: does the second visit bring the stream to where the first one had it?

The states are the residual stream after each step, at the tokens t of a sample with t - s(t) >= t_min: without the
start, whose large norm would decide everything. K is the matrix of their dot products, one row and column a token.

    CKA             linear centred kernel alignment (arXiv:1905.00414): HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), each
                    HSIC summed over samples. It is above 0 for unrelated states, far above with few tokens
    debiased CKA    the same with the unbiased HSIC (Song et al. 2012), which is 0 in the mean for unrelated states
    effective rank  (sum of eigenvalues)^2 / (sum of their squares) of a sample's centred states, mean over samples:
                    from 1 to the smaller of width and tokens less 1

Nulls. `shuffled`: one sample's states against those of the next one at the same positions. `gaussian`: the effective
rank of as many independent normal vectors of that width.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from einops import rearrange
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch, take
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import Floats, Mask, is_token, like, ratio, recorded_steps, token_values
from probes.statistics.grid import STEPS, Grid, Place, Where
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity
from probes.statistics.sums import Between, Reduced, Sums, Totals
from probes.statistics.visit_pairs import not_compared, pairs_of
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.arrays import Array
from smelt_interp.data.datasets import DataOptions
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "States alike"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ({"quantity": "debiased CKA"},)

STATE = "hook_resid_post"
CKA, DEBIASED, RANK = "CKA", "debiased CKA", "effective rank"
FEWEST_TOKENS = 4
"""The unbiased HSIC needs them."""
Numbers = NDArray[np.float64]


@validated
class Options:
    """Which tokens are compared."""

    t_min: Annotated[int, Field(ge=0, le=10**9)] = 1
    """Least distance of a token from its segment's start."""
    tokens: Annotated[int, Field(ge=4, le=4096)] = 256
    """Most tokens of a sample, the first ones."""


class Layout(NamedTuple):
    """Every recorded step, and the pairs of visits among them."""

    steps: Grid
    pairs: Grid


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The stream after each step."""
    return (STATE,)


def start(architecture: Architecture, options: Options) -> Sums[Layout, Options]:
    """Sums of each sample, for every pair of steps."""
    between = Between(suffixes=(STATE,), compare=compare)
    return Sums(architecture, options, lay_out, reduce, quantities, between=between)


def result(sums: Sums[Layout, Options]) -> Result:
    """CKA of visits and of all pairs of steps, effective ranks, and a map of all pairs."""
    return answer(sums, figures)


# Arithmetic: L and M steps, B samples, n tokens


def alignment(first_LBTT: Floats, second_MBTT: Floats, mask_BT: Floats) -> dict[str, Floats]:
    """HSIC of every pair of steps, plain and debiased, from dot products that are 0 where a token is not measured.

    -> {CKA, DEBIASED}, each (B, L, M); 0 for samples with fewer tokens than FEWEST_TOKENS.
    """
    xp = array_namespace(first_LBTT)
    n_B11 = xp.sum(mask_BT, axis=-1)[:, None, None]
    enough_B11 = n_B11 >= FEWEST_TOKENS
    n_B11 = xp.where(enough_B11, n_B11, float(FEWEST_TOKENS))
    # tr(K L), 1'K L 1 and (1'K 1)(1'L 1), with the diagonals and without.
    flat = [rearrange(x, "l b t s -> b l (t s)") for x in (first_LBTT, second_MBTT)]
    rows = [rearrange(xp.sum(x, axis=-1), "l b t -> b l t") for x in (first_LBTT, second_MBTT)]
    diagonal = [rearrange(xp.linalg.diagonal(x), "l b t -> b l t") for x in (first_LBTT, second_MBTT)]
    trace_BLM, on_diagonal_BLM = flat[0] @ flat[1].mT, diagonal[0] @ diagonal[1].mT
    totals = [xp.sum(x, axis=-1)[..., None] for x in rows]
    plain_BLM = trace_BLM - 2 / n_B11 * (rows[0] @ rows[1].mT) + totals[0] @ totals[1].mT / n_B11**2
    off = [row - on for row, on in zip(rows, diagonal, strict=True)]
    totals = [xp.sum(x, axis=-1)[..., None] for x in off]
    debiased_BLM = (
        (trace_BLM - on_diagonal_BLM)
        + totals[0] @ totals[1].mT / ((n_B11 - 1) * (n_B11 - 2))
        - 2 / (n_B11 - 2) * (off[0] @ off[1].mT)
    )
    found = {CKA: plain_BLM / (n_B11 - 1) ** 2, DEBIASED: debiased_BLM / (n_B11 * (n_B11 - 3))}
    return {name: xp.where(enough_B11, x, xp.zeros_like(x)) for name, x in found.items()}


def effective_rank(products_LBTT: Floats, mask_BT: Floats) -> Floats:
    """Of each step's centred states; 0 where all are equal. -> (B, L)"""
    xp = array_namespace(products_LBTT)
    n_B = xp.clip(xp.sum(mask_BT, axis=-1), 1, None)
    rows_LBT = xp.sum(products_LBTT, axis=-1)
    total_LB = xp.sum(rows_LBT, axis=-1)
    trace_LB = xp.sum(xp.linalg.diagonal(products_LBTT), axis=-1) - total_LB / n_B
    square_LB = xp.sum(products_LBTT**2, axis=(-2, -1)) - 2 / n_B * xp.sum(rows_LBT**2, axis=-1) + total_LB**2 / n_B**2
    spread_LB = xp.where(square_LB > 0, square_LB, 1.0)
    rank_BL: Floats = xp.where(square_LB > 0, trace_LB**2 / spread_LB, 0.0).T
    return rank_BL


def gaussian_rank(tokens_B: Numbers, width: int) -> Numbers:
    """The same of independent normal vectors, from the moments of Wishart's law. -> (B,)"""
    free_B = np.maximum(tokens_B - 1, 1)
    return np.asarray((free_B * width + 2) / (free_B + width + 1))


# Sums


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """Every recorded step, and the pairs of visits of a layer."""
    steps = recorded_steps(batch, (STATE,))
    architecture = batch.architecture
    return Layout(
        Grid(architecture=architecture, loops=loops, steps=steps),
        Grid(architecture=architecture, loops=loops, steps=pairs_of(architecture, steps)),
    )


def measured_tokens(batch: Batch, options: Options) -> Mask:
    """Which tokens are compared. -> (B, T)"""
    position_T = np.arange(batch.samples.ids_NT.shape[1])
    far_BT = is_token(batch.samples) & (position_T - batch.samples.segment_start_NT >= options.t_min)
    first_BT: Mask = far_BT & (np.cumsum(far_BT, 1) <= options.tokens)
    return first_BT


def products(batch: Batch, layout: Layout, mask_BT: Mask) -> tuple[Floats, Floats]:
    """Dot products of the states of each step (L, B, T, T), 0 where a token is not measured, and the mask beside.

    Positions after the last measured one are left out.
    """
    length = int(np.flatnonzero(mask_BT.any(0)).max(initial=0)) + 1
    found = []
    for step in layout.steps.steps:
        assert isinstance(step, int)  # the grid of steps has no pairs
        state_BTD = token_values(batch, step, STATE)[:, :length]
        state_BTD = state_BTD * like(mask_BT[:, :length], state_BTD)[..., None]
        found.append(state_BTD @ state_BTD.mT)
    stacked_LBTT = array_namespace(found[0]).stack(found)
    return stacked_LBTT, like(mask_BT[:, :length], stacked_LBTT)


def one_by_one(batch: Batch) -> list[Batch]:
    """Its samples, whose dot products at all steps need not fit into memory together."""
    return [take(batch, np.array([row])) for row in range(len(batch.samples))]


def reduce(batch: Batch, layout: Layout, options: Options) -> Reduced:
    """HSIC of every pair of steps, and the effective rank of each."""
    mask_BT = measured_tokens(batch, options)
    tokens_B = mask_BT.sum(1)
    defined_B = tokens_B >= FEWEST_TOKENS
    found: dict[str, list[Floats]] = {CKA: [], DEBIASED: [], RANK: []}
    for row, sample in enumerate(one_by_one(batch)):
        product_L1TT, measured_1T = products(sample, layout, mask_BT[row : row + 1])
        rank_1L = effective_rank(product_L1TT, measured_1T) * float(defined_B[row])
        for name, x in {**alignment(product_L1TT, product_L1TT, measured_1T), RANK: rank_1L}.items():
            found[name].append(x)
    sums: dict[str, Array] = {name: array_namespace(each[0]).concat(each) for name, each in found.items()}
    sums |= {"samples": defined_B, "gaussian": gaussian_rank(tokens_B, batch.architecture.width) * defined_B}
    return Reduced(by_sample=sums, defined={"samples": defined_B})


def compare(before: Batch, after: Batch, layout: Layout, options: Options) -> Mapping[str, Array]:
    """HSIC between samples and the ones after them, and within each, at the positions that both have."""
    masks = [measured_tokens(batch, options) for batch in (before, after)]
    shortest = min(mask_BT.shape[1] for mask_BT in masks)
    mask_BT = masks[0][:, :shortest] & masks[1][:, :shortest]
    sums: dict[str, Floats] = {}
    for row, pair in enumerate(zip(one_by_one(before), one_by_one(after), strict=True)):
        (first, measured_1T), (second, _) = (products(each, layout, mask_BT[row : row + 1]) for each in pair)
        for word, (a, b) in {"cross": (first, second), "first": (first,) * 2, "second": (second,) * 2}.items():
            for name, x_1LL in alignment(a, b, measured_1T).items():
                sums[f"{word} {name}"] = sums.get(f"{word} {name}", 0.0) + x_1LL[0]
    return sums


# What the sums say


def aligned(cross: Numbers, first: Numbers, second: Numbers) -> Numbers:
    """HSIC over the roots of each step's own, which are on the diagonals of `first` and `second`. (..., L, L)"""
    own_first, own_second = (np.maximum(np.diagonal(x, axis1=-2, axis2=-1), 0) for x in (first, second))
    return ratio(cross, np.sqrt(own_first[..., :, None] * own_second[..., None, :]))


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Both alignments of visits, of all pairs of steps, and the effective rank of every step."""
    (steps, pairs), sums, whole, n = totals.layout, totals.sums, totals.whole, totals.n["samples"]
    nulls_LL: dict[str, Numbers | None] = {
        name: aligned(*(whole[f"{word} {name}"] for word in ("cross", "first", "second")))
        if f"cross {name}" in whole else None
        for name in (CKA, DEBIASED)
    }  # fmt: skip
    found: list[Quantity] = []
    if pairs.steps:
        first, second = ([steps.steps.index(at[i]) for at in pairs.steps if not isinstance(at, int)] for i in (0, 1))
        for name, null_LL in nulls_LL.items():
            value_RLL = aligned(sums[name], sums[name], sums[name])
            null_PH = None if null_LL is None else null_LL[first, second][:, None]
            found.append(Quantity(name=name, value_RLH=value_RLL[:, first, second][..., None], n=n,
                                  places=pairs.places(STEPS), nulls={"shuffled": null_PH}))  # fmt: skip
    elif not totals.architecture.loops:
        found += not_compared((CKA, DEBIASED), steps, (0, 1), why=NEEDS_TWO_VISITS)
    mean_RL = ratio(sums[RANK], sums["samples"][:, None])
    gaussian = float(ratio(sums["gaussian"], sums["samples"])[0])
    found.append(Quantity(name=RANK, value_RLH=mean_RL[..., None], places=steps.places(STEPS), n=n, change=True,
                          nulls={"gaussian": gaussian}))  # fmt: skip
    for name, null_LL in nulls_LL.items():
        found.append(Quantity(name=name, value_RLH=aligned(sums[name], sums[name], sums[name]), n=n,
                              places=_all_pairs(steps), nulls={"shuffled": null_LL}))  # fmt: skip
    return found


def _all_pairs(steps: Grid) -> list[Place]:
    """A row for each step with each later one; the later one is the head."""
    places, labels = steps.places(("layer",)), steps.labels()
    return [
        Place("head", Where({**place.where, "with": labels[later]}), place.positions, [later])
        for place in places
        for later in range(place.positions[0] + 1, len(labels))
    ]


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Debiased CKA of every pair of steps."""
    from plotly.graph_objects import Figure, Heatmap

    hsic_LL, labels = totals.sums[DEBIASED][0], totals.layout.steps.labels()
    cka_LL = aligned(hsic_LL, hsic_LL, hsic_LL)
    drawn = Figure(Heatmap(z=cka_LL, x=labels, y=labels, zmin=0, zmax=1, colorscale="Viridis"))
    drawn.update_layout(title=f"{TITLE}: {DEBIASED}", height=640)
    drawn.update_yaxes(autorange="reversed")
    return {"pairs of steps": drawn}


def main() -> None:
    """`python -m probes.representation_similarity`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
