"""What does an expert fire on at each visit: which tokens, in which contexts, and where do they go on the other visit?

An expert's tokens on a step are those whose top k hold it.

    token share     p(t | e): share of the expert's tokens that are t, for the t with the largest
                    p(t | e) log(p(t | e) / p(t)): what tells the expert's tokens from all tokens
    role share      the same for the roles of tokens
    stays           share of the expert's tokens of one visit that choose it on the other visit too; the headline is
                    over the tokens of all experts together
    goes to         share of its tokens that choose another expert there, for the experts where it is largest
    context         a token that gave the expert a large weight (the value), in the text around it

Nulls. `uniform`: k / E on the other visit, p(t) for tokens. `popularity`: the share of all tokens that the other expert
has. `shuffled`: the choice of every sample's tokens dealt out among them at random, in expectation. A share was picked
for being large, so that its interval, over groups of documents, leans to one side.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import is_token, ratio, to_numpy, token_values
from probes.statistics.bootstrap import num_groups, weights
from probes.statistics.examples import Examples, best_of_samples, stacked_examples, token_labels
from probes.statistics.experts import INDICES, WEIGHTS, routed_steps
from probes.statistics.grid import STEPS, Grid, Place, Where, layer_range
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.visit_pairs import not_compared, pairs_of
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Role, Samples, role_name
from smelt_interp.errors import UserError
from smelt_interp.similarity import chosen
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "What experts fire on"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ()

TOKEN, ROLE, STAYS, GOES, CONTEXT = "token share", "role share", "stays", "goes to", "context"
ROLES = tuple(role for role in Role if role != Role.PAD)
MOST_COUNTS = 2**26
"""Numbers in the table of tokens by step and expert."""
Numbers = NDArray[np.float64]


@validated
class Options:
    """Which experts are measured, and how much is shown of each."""

    layers: Indices = ()
    """Layers to measure; naming none takes the looped ones, of a network without loops the middle half, and all where
    none of those was recorded."""
    tokens: Annotated[int, Field(ge=1, le=100)] = 5
    """Tokens shown of each expert."""
    going: Annotated[int, Field(ge=1, le=100)] = 2
    """Other experts shown, to which its tokens went on the other visit."""
    contexts: Annotated[int, Field(ge=1, le=20)] = 3
    """Contexts shown of each expert, of as many samples."""
    around: Annotated[int, Field(ge=0, le=100)] = 8
    """Tokens either side in a context."""
    resample_seed: Seed = 0
    """Seed of the bootstrap."""


class Layout(NamedTuple):
    """The measured steps, the pairs of visits of their layers, and the groups of documents that tokens are counted by:
    one, without intervals, where the vocabulary is large."""

    steps: Grid
    pairs: Grid
    groups: int


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The choice and its weights."""
    return (INDICES, WEIGHTS)


def start(architecture: Architecture, options: Options) -> Sums[Layout, Options]:
    """Sums over the tokens of each sample, at every step."""
    return Sums(architecture, options, lay_out, reduce, quantities, seed=options.resample_seed)


def result(sums: Sums[Layout, Options]) -> Result:
    """Each expert's tokens, roles, contexts and where its tokens went, and a figure of the last."""
    return answer(sums, figures)


# Sums: G groups of documents, P pairs of visits, V token ids, Z roles


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """The measured steps and their pairs. Raises UserError for a dense network, for layers that were not recorded and
    for more steps than a table of tokens holds."""
    architecture = batch.architecture
    recorded = routed_steps(batch, needs(architecture))
    have = sorted({architecture.steps[step].layer for step in recorded})
    if missing := set(options.layers) - set(have):
        raise UserError(f"layers must be recorded ones, {layer_range(have)}; got {min(missing) + 1}")
    wanted = options.layers or [layer for loop in loops for layer in loop.layers if layer in have] or have
    steps = tuple(step for step in recorded if architecture.steps[step].layer in wanted)
    entries = len(steps) * architecture.num_experts * architecture.vocab_size
    if entries > MOST_COUNTS:
        most = MOST_COUNTS // (architecture.num_experts * architecture.vocab_size)
        raise UserError(
            f"experts times steps times tokens must be at most {MOST_COUNTS}; got {entries}: name --layers of at most "
            f"{most} steps"
        )
    counted = num_groups(entries) if num_groups(entries) * entries <= MOST_COUNTS else 1
    return Layout(
        steps=Grid(architecture=architecture, loops=loops, steps=steps),
        pairs=Grid(architecture=architecture, loops=loops, steps=pairs_of(architecture, steps)),
        groups=counted,
    )


def reduce(batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Tokens by expert and by id, role, group and expert of the other visit, and the contexts of each step."""
    # Which tokens each expert has at each step, and what those would be if they were dealt out at random.
    samples, architecture = batch.samples, batch.architecture
    token_BT = is_token(samples)
    tokens_B = token_BT.sum(1).astype(np.float64)
    held = {step: to_numpy(chosen(token_values(batch, step, INDICES), token_BT, architecture.num_experts))
            for step in layout.steps.steps if isinstance(step, int)}  # fmt: skip
    load_BLE = np.stack([held_BTE.sum(1) for held_BTE in held.values()], 1)
    dealt_BLE = ratio(load_BLE, tokens_B[:, None, None])
    role_BTZ = (samples.role_NT[..., None] == np.array(ROLES)) & token_BT[..., None]
    histogram_BV = _histogram(samples, token_BT, architecture.vocab_size)
    group_B = samples.document_N % layout.groups
    # By role a sample, by token and by pairs of visits in all.
    counts = {
        "load": load_BLE,
        "roles": np.stack([np.einsum("bte,btz->bez", x, role_BTZ) for x in held.values()], 1),
        "role tokens": role_BTZ.sum(1),
    }
    whole = {
        "tokens": np.stack([_by_token(x, samples.ids_NT, group_B, layout.groups, architecture.vocab_size)
                            for x in held.values()], 1),
        "shuffled tokens": np.einsum("ble,bv->lev", dealt_BLE, histogram_BV, optimize=True),
        "shuffled roles": np.einsum("ble,bz->lez", dealt_BLE, role_BTZ.sum(1)),
        "all tokens": histogram_BV.sum(0),
    }  # fmt: skip
    if layout.pairs.steps:
        pairs, whole_pairs = _pair_sums(held, layout.pairs, tokens_B, samples.document_N)
        counts, whole = counts | pairs, whole | whole_pairs
    contexts = _contexts(batch, held, options)
    return Reduced(
        by_sample={"tokens": tokens_B}, counts=counts, whole=whole, defined={"tokens": tokens_B > 0},
        examples={"contexts": contexts, "labels": token_labels(samples, architecture.vocab_size)},
    )  # fmt: skip


def _histogram(samples: Samples, token_BT: NDArray[np.bool_], vocab_size: int) -> Numbers:
    """How often each id occurs in each sample. -> (B, V)"""
    row, position = np.nonzero(token_BT)
    flat = np.bincount(row * vocab_size + samples.ids_NT[row, position], minlength=len(samples) * vocab_size)
    return flat.reshape(len(samples), vocab_size).astype(np.float64)


def _by_token(
    held_BTE: Numbers, ids_BT: NDArray[np.int32], group_B: NDArray[np.int64], groups: int, vocab_size: int
) -> Numbers:
    """How often each expert has each id, by group of documents. -> (G, E, V)"""
    row, position, expert = np.nonzero(held_BTE)
    num_experts = held_BTE.shape[-1]
    index = (group_B[row] * num_experts + expert) * vocab_size + ids_BT[row, position]
    flat = np.bincount(index, minlength=groups * num_experts * vocab_size)
    return flat.reshape(groups, num_experts, vocab_size).astype(np.float64)


def _pair_sums(
    held: dict[int, Numbers], pairs: Grid, tokens_B: Numbers, document_B: NDArray[np.int64]
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Of each pair of visits: tokens that an expert has on both, by sample (B, P, E); those of each expert of the first
    by expert of the second, by group (G, P, E, E), and if the second's choices were shuffled (P, E, E)."""
    groups = num_groups(len(pairs.steps) * next(iter(held.values())).shape[-1] ** 2)
    group_GB = document_B % groups == np.arange(groups)[:, None]
    both, to, shuffled = [], [], []
    for at in pairs.steps:
        assert not isinstance(at, int)  # pairs alone
        first_BTE, second_BTE = held[at[0]], held[at[1]]
        joint_BEE = first_BTE.swapaxes(1, 2) @ second_BTE
        both.append(np.einsum("bee->be", joint_BEE))
        to.append(np.tensordot(group_GB.astype(np.float64), joint_BEE, axes=1))
        shuffled.append(ratio(first_BTE.sum(1), tokens_B[:, None]).T @ second_BTE.sum(1))
    whole = {"goes": np.stack(to, 1), "shuffled goes": np.stack(shuffled)}
    return {"stays": np.stack(both, 1)}, whole


def _contexts(batch: Batch, held: dict[int, Numbers], options: Options) -> Examples:
    """The tokens that gave each expert the largest weight, one a sample. -> (L, E, contexts)"""
    found = []
    for step, held_BTE in held.items():
        index_BTK, weight_BTK = (to_numpy(token_values(batch, step, suffix)) for suffix in (INDICES, WEIGHTS))
        weight_BTE = np.zeros(held_BTE.shape)
        np.put_along_axis(weight_BTE, index_BTK.astype(np.int64), weight_BTK, -1)
        weight_BTE[held_BTE == 0] = -np.inf
        found.append(best_of_samples(weight_BTE, batch.samples, batch.sample_ids, options.contexts, options.around))
    return stacked_examples(found)


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Where tokens went, which tokens and roles each expert has, and contexts."""
    layout = totals.layout
    if layout.pairs.steps:
        went = _went(totals)
    else:
        once = NEEDS_TWO_VISITS if not totals.architecture.loops else "needs a layer's two visits in the capture"
        went = not_compared((STAYS,), layout.steps, (0, 1), why=once)
    return [*went, _roles(totals), _tokens(totals), *_contexts_shown(totals)]


def _each_expert(
    name: str,
    grid: Grid,
    n: int,
    value_RLEX: Numbers,
    nulls: Mapping[str, Numbers | float],
    column: Callable[[int, int, int], Where],
    groups: int | None = None,
) -> Quantity:
    """X rows of each expert at each position, those of a value above 0; `column(position, expert, x)` says of what.
    Nulls are (L, E, X)."""
    shape = value_RLEX.shape[1:]
    places = [
        Place("head", {**place.where, "expert": expert + 1, **column(at, expert, x)}, [at], [expert * shape[-1] + x])
        for at, place in enumerate(grid.places(("layer",)))
        for expert, x in np.ndindex(shape[1:])
        if value_RLEX[0, at, expert, x] > 0
    ]
    return Quantity(
        name=name,
        value_RLH=value_RLEX.reshape(len(value_RLEX), shape[0], -1),
        places=places,
        n=n,
        groups=groups,
        nulls={name: np.broadcast_to(null, shape).reshape(shape[0], -1) for name, null in nulls.items()},
        picked=True,
    )


def _largest(x: Numbers, most: int) -> NDArray[np.intp]:
    """Where the last axis is largest, largest first."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :most]


def _group_weights(counted_G: Numbers, seed: int) -> tuple[Numbers, int]:
    """The resamples of groups of documents (R, G), the value alone where there is one group; and how many hold any."""
    groups = len(counted_G)
    weight_RG = weights(seed, np.arange(groups)) if groups > 1 else np.ones((1, 1))
    return weight_RG, int((counted_G > 0).sum())


def _went(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Shares of an expert's tokens of one visit that choose it again, and that choose others, on the other visit."""
    sums, whole, pairs, options = totals.sums, totals.whole, totals.layout.pairs, totals.options
    steps = totals.layout.steps.steps
    first, second = ([steps.index(at[i]) for at in pairs.steps if not isinstance(at, int)] for i in (0, 1))
    load_RPE, there_RPE = sums["load"][:, first], sums["load"][:, second]
    popular_PE = ratio(there_RPE[0], sums["tokens"][0])
    uniform = totals.architecture.top_k / totals.architecture.num_experts
    dealt_PEE = ratio(whole["shuffled goes"], whole["goes"].sum(0).sum(-1)[..., None] / totals.architecture.top_k)
    dealt_PE = np.einsum("pee->pe", dealt_PEE)
    by_use_PE = ratio(load_RPE[0], load_RPE[0].sum(-1, keepdims=True))
    nulls = {"uniform": np.full_like(dealt_PE, uniform), "popularity": popular_PE, "shuffled": dealt_PE}
    together = Quantity(
        name=STAYS, value_RLH=ratio(sums["stays"].sum(-1), load_RPE.sum(-1))[..., None],
        places=pairs.places(STEPS), n=totals.n["tokens"],
        nulls={name: np.broadcast_to(np.nansum(by_use_PE * null, -1, keepdims=True), (len(first), 1))
               for name, null in nulls.items()},
    )  # fmt: skip
    stays = _each_expert(STAYS, pairs, totals.n["tokens"], ratio(sums["stays"], load_RPE)[..., None],
                         {name: null_PE[..., None] for name, null_PE in nulls.items()},
                         lambda at, expert, x: {})  # fmt: skip
    # The largest others, by group of documents.
    goes_GPEE = whole["goes"]
    num_experts = goes_GPEE.shape[-1]
    to_PEX = _largest(goes_GPEE.sum(0) * (1 - np.eye(num_experts)), min(options.going, num_experts - 1))
    weight_RG, groups = _group_weights(goes_GPEE.sum((1, 2, 3)), options.resample_seed)
    top_RPEX = np.tensordot(weight_RG, np.take_along_axis(goes_GPEE, to_PEX[None], -1), axes=1)
    bottom_RPE = np.tensordot(weight_RG, goes_GPEE.sum(-1), axes=1) / totals.architecture.top_k
    others: dict[str, Numbers | float] = {
        "uniform": uniform,
        "popularity": np.take_along_axis(popular_PE[:, None], to_PEX, -1),
        "shuffled": np.take_along_axis(dealt_PEE, to_PEX, -1),
    }
    goes = _each_expert(GOES, pairs, totals.n["tokens"], ratio(top_RPEX, bottom_RPE[..., None]), others,
                        lambda at, expert, x: {"to": f"expert {to_PEX[at, expert, x] + 1}"}, groups)  # fmt: skip
    return [together, stays, goes]


def _roles(totals: Totals[Layout, Options]) -> Quantity:
    """The share of each role among each expert's tokens."""
    sums, load_RLE = totals.sums, totals.sums["load"]
    shuffled_LEZ = ratio(totals.whole["shuffled roles"], load_RLE[0, ..., None])
    chance_Z = ratio(sums["role tokens"][0], sums["tokens"][0])
    return _each_expert(ROLE, totals.layout.steps, totals.n["tokens"], ratio(sums["roles"], load_RLE[..., None]),
                        {"uniform": chance_Z, "shuffled": shuffled_LEZ},
                        lambda at, expert, z: {"role": role_name(ROLES[z])})  # fmt: skip


def _tokens(totals: Totals[Layout, Options]) -> Quantity:
    """The tokens that tell each expert's from all tokens."""
    counts_GLEV, whole = totals.whole["tokens"], totals.whole
    load_GLE = counts_GLEV.sum(-1)
    share_LEV = ratio(counts_GLEV.sum(0), load_GLE.sum(0)[..., None])
    chance_V = ratio(whole["all tokens"], whole["all tokens"].sum())
    told_LEV = share_LEV * np.log(ratio(share_LEV, chance_V), out=np.zeros_like(share_LEV), where=share_LEV > 0)
    best_LEX = _largest(told_LEV, totals.options.tokens)
    weight_RG, groups = _group_weights(load_GLE.sum((1, 2)), totals.options.resample_seed)
    top_RLEX = np.tensordot(weight_RG, np.take_along_axis(counts_GLEV, best_LEX[None], -1), axes=1)
    shuffled_LEV = ratio(whole["shuffled tokens"], load_GLE.sum(0)[..., None])
    labels_V = totals.examples["labels"].text[:, 0]
    return _each_expert(
        TOKEN, totals.layout.steps, totals.n["tokens"],
        ratio(top_RLEX, np.tensordot(weight_RG, load_GLE, axes=1)[..., None]),
        {"uniform": chance_V[best_LEX], "shuffled": np.take_along_axis(shuffled_LEV, best_LEX, -1)},
        lambda at, expert, x: {"token": str(labels_V[best_LEX[at, expert, x]])}, groups,
    )  # fmt: skip


def _contexts_shown(totals: Totals[Layout, Options]) -> list[Quantity]:
    """The kept contexts, each with its sample and position from 1."""
    kept = totals.examples["contexts"]

    def column(at: int, expert: int, x: int) -> Where:
        place = at, expert, x
        return {"sample": int(kept.sample[place]) + 1, "position": int(kept.position[place]) + 1,
                "context": str(kept.text[place])}  # fmt: skip

    return [_each_expert(CONTEXT, totals.layout.steps, totals.n["tokens"], kept.score[None], {}, column)]


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """The roles of each expert's tokens on each step, and where its tokens went on the other visit."""
    from plotly.graph_objects import Figure, Heatmap

    layout, num_experts = totals.layout, totals.architecture.num_experts

    def drawn(title: str, grid: Grid, columns: Sequence[str], share_LEX: Numbers) -> Figure:
        rows = [f"{label}, expert {expert + 1}" for label in grid.labels() for expert in range(num_experts)]
        figure = Figure(Heatmap(z=share_LEX.reshape(len(rows), -1), x=list(columns), y=rows, colorscale="Viridis"))
        figure.update_layout(title=f"{TITLE}: {title}", height=200 + 12 * len(rows))
        figure.update_yaxes(autorange="reversed")
        return figure

    share_LEZ = ratio(totals.sums["roles"][0], totals.sums["load"][0, ..., None])
    found = {"roles": drawn("share of roles", layout.steps, [role_name(role) for role in ROLES], share_LEZ)}
    if layout.pairs.steps:
        goes_PEE = totals.whole["goes"].sum(0)
        share_PEE = ratio(goes_PEE, goes_PEE.sum(-1, keepdims=True) / totals.architecture.top_k)
        names = [f"expert {expert + 1}" for expert in range(num_experts)]
        found["went"] = drawn("share that goes to each expert on the other visit", layout.pairs, names, share_PEE)
    return found


def main() -> None:
    """`python -m probes.expert_tokens`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
