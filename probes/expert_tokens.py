"""What does an expert, or a head, fire on at each visit: which tokens, in which contexts, going where on another visit?

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

With `--of heads` tokens are the keys that an attention head looks at, each as much as the attention that it takes from
the queries after the first of its document: token share and role share are shares of that attention; a context is a key
that took more than uniform attention gives it (the value: how much more, of all queries together). The null `uniform`
is the share that uniform attention would give. The headline is each role's share, the mean over heads.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import is_token, like, ratio, recorded_steps, site, to_numpy, token_values
from probes.statistics.attention import key_masses, seen_keys
from probes.statistics.bootstrap import num_groups
from probes.statistics.examples import Examples, best_of_samples, stacked_examples, token_labels
from probes.statistics.experts import INDICES, WEIGHTS, routed_steps
from probes.statistics.grid import HEADS, STEPS, Grid, Where, layer_range
from probes.statistics.quantities import NEEDS_TWO_VISITS, Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.units import Numbers, by_token, each_unit, group_weights, histogram, largest
from probes.statistics.visit_pairs import not_compared, pairs_of
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Role, role_name
from smelt_interp.errors import UserError
from smelt_interp.similarity import chosen
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "What experts or heads fire on"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ()
TABLE_A_QUANTITY = True
INSTEAD = "--of heads measures attention heads"

PATTERN = "attn.hook_pattern"
TOKEN, ROLE, STAYS, GOES, CONTEXT = "token share", "role share", "stays", "goes to", "context"
ROLES = tuple(role for role in Role if role != Role.PAD)
MOST_COUNTS = 2**26
"""Numbers in the table of tokens by step and expert."""


@validated
class Options:
    """Which experts or heads are measured, and how much is shown of each."""

    of: Literal["experts", "heads"] = "experts"
    """Experts, or attention heads: what the keys are that they look at."""
    layers: Indices = ()
    """Layers to measure; naming none takes the looped ones, of a network without loops the middle half, and all where
    none of those was recorded."""
    tokens: Annotated[int, Field(ge=1, le=100)] = 5
    """Tokens shown of each."""
    going: Annotated[int, Field(ge=1, le=100)] = 2
    """Other experts shown, to which an expert's tokens went on the other visit."""
    contexts: Annotated[int, Field(ge=1, le=20)] = 3
    """Contexts shown of each, of as many samples."""
    around: Annotated[int, Field(ge=0, le=100)] = 8
    """Tokens either side in a context."""
    resample_seed: Seed = 0
    """Seed of the bootstrap."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The choice and its weights, or attention."""
        return (INDICES, WEIGHTS) if self.of == "experts" else (PATTERN,)


class Layout(NamedTuple):
    """The measured steps, the pairs of visits of their layers, and the groups of documents that tokens are counted by:
    one, without intervals, where the vocabulary is large."""

    steps: Grid
    pairs: Grid
    groups: int


def needs(architecture: Architecture) -> tuple[str, ...]:
    """Those of experts."""
    return Options().reads


def start(architecture: Architecture, options: Options) -> Sums[Layout, Options]:
    """Sums over the tokens of each sample, at every step."""
    return Sums(architecture, options, lay_out, reduce, quantities, seed=options.resample_seed)


def result(sums: Sums[Layout, Options]) -> Result:
    """Each expert's tokens, roles, contexts and where its tokens went, and a figure of the last."""
    return answer(sums, figures)


# Sums: U units (experts E, or heads), G groups of documents, P pairs of visits, V token ids, Z roles


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """The measured steps and their pairs. Raises UserError for a dense network, for layers that were not recorded and
    for more steps than a table of tokens holds."""
    architecture = batch.architecture
    of_heads = options.of == "heads"
    recorded = recorded_steps(batch, options.reads) if of_heads else routed_steps(batch, options.reads)
    heads = batch.heads[PATTERN] if of_heads else ()
    have = sorted({architecture.steps[step].layer for step in recorded})
    if missing := set(options.layers) - set(have):
        raise UserError(f"layers must be recorded ones, {layer_range(have)}; got {min(missing) + 1}")
    wanted = options.layers or [layer for loop in loops for layer in loop.layers if layer in have] or have
    steps = tuple(step for step in recorded if architecture.steps[step].layer in wanted)
    of_step = (len(heads) or architecture.num_experts) * architecture.vocab_size
    entries = len(steps) * of_step
    if entries > MOST_COUNTS:
        most = MOST_COUNTS // of_step
        raise UserError(
            f"{options.of} times steps times tokens must be at most {MOST_COUNTS}; got {entries}: name --layers of at "
            f"most {most} steps"
        )
    counted = num_groups(entries) if num_groups(entries) * entries <= MOST_COUNTS else 1
    return Layout(
        steps=Grid(architecture=architecture, loops=loops, steps=steps, heads=heads),
        pairs=Grid(architecture=architecture, loops=loops, steps=() if of_heads else pairs_of(architecture, steps)),
        groups=counted,
    )


def reduce(batch: Batch, layout: Layout, options: Options) -> Reduced:
    """Tokens by unit and by id, role, group and expert of the other visit, and the contexts of each step."""
    samples, vocab_size = batch.samples, batch.architecture.vocab_size
    of_heads = options.of == "heads"
    # What each unit has of each token, and what it would have at random: the token once, or uniform attention.
    if of_heads:
        held, chance_BT = _attention(batch, layout.steps)
    else:
        held, chance_BT = _choices(batch, layout.steps), is_token(samples).astype(np.float64)
    chance_B = chance_BT.sum(1)
    load_BLU = np.stack([held_BTU.sum(1) for held_BTU in held.values()], 1)
    role_BTZ = (samples.role_NT[..., None] == np.array(ROLES)) * chance_BT[..., None]
    of_role_BTZ = role_BTZ > 0
    histogram_BV = histogram(samples, chance_BT, vocab_size)
    group_B = samples.document_N % layout.groups
    # By role a sample, by token and by pairs of visits in all.
    amounts = {
        "load": load_BLU,
        "roles": np.stack([np.einsum("btu,btz->buz", x, of_role_BTZ, optimize=True) for x in held.values()], 1),
        "role tokens": role_BTZ.sum(1),
    }
    whole = {
        "tokens": np.stack([by_token(x, samples.ids_NT, group_B, layout.groups, vocab_size) for x in held.values()], 1),
        "all tokens": histogram_BV.sum(0),
    }
    if not of_heads:  # uniform attention is dealt out within each sample as it is
        dealt_BLE = ratio(load_BLU, chance_B[:, None, None])
        whole["shuffled tokens"] = np.einsum("ble,bv->lev", dealt_BLE, histogram_BV, optimize=True)
        whole["shuffled roles"] = np.einsum("ble,bz->lez", dealt_BLE, amounts["role tokens"])
    if layout.pairs.steps:
        pairs, whole_pairs = _pair_sums(held, layout.pairs, chance_B, samples.document_N)
        amounts, whole = amounts | pairs, whole | whole_pairs
    return Reduced(
        by_sample={"tokens": chance_B, **(amounts if of_heads else {})},
        counts={} if of_heads else amounts,
        whole=whole, defined={"tokens": chance_B > 0},
        examples={"contexts": _contexts(batch, held, chance_BT, options), "labels": token_labels(samples, vocab_size)},
    )  # fmt: skip


def _choices(batch: Batch, steps: Grid) -> dict[int, Numbers]:
    """Which tokens chose each expert, at each step. -> (B, T, E)"""
    token_BT, num_experts = is_token(batch.samples), batch.architecture.num_experts
    return {step: to_numpy(chosen(token_values(batch, step, INDICES), token_BT, num_experts))
            for step in steps.steps if isinstance(step, int)}  # fmt: skip


def _attention(batch: Batch, steps: Grid) -> tuple[dict[int, Numbers], Numbers]:
    """What each key takes of each head's attention at each step (B, T, Q), and of uniform attention (B, T), both summed
    over the queries after the first of their document."""
    samples = batch.samples
    seen_BTS = seen_keys(samples, causal=batch.architecture.causal)
    averages_BT = is_token(samples) & (np.arange(samples.ids_NT.shape[1]) != samples.segment_start_NT)
    held = {}
    for step in steps.steps:
        assert isinstance(step, int)  # `lay_out` measures single steps
        pattern_BQTS = site(batch, step, PATTERN)
        xp = array_namespace(pattern_BQTS)
        seen = xp.asarray(seen_BTS, device=device(pattern_BQTS))[:, None]
        pattern_BQTS = xp.where(seen, pattern_BQTS, xp.zeros_like(pattern_BQTS))
        held[step] = to_numpy(key_masses(pattern_BQTS, like(averages_BT, pattern_BQTS))).swapaxes(1, 2)
    uniform_BTS = seen_BTS / np.maximum(seen_BTS.sum(-1, keepdims=True), 1)
    return held, np.einsum("bt,bts->bs", averages_BT.astype(np.float64), uniform_BTS)


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


def _contexts(batch: Batch, held: dict[int, Numbers], chance_BT: Numbers, options: Options) -> Examples:
    """The tokens that gave each expert the largest weight, or took the most attention beyond chance from each head, one
    a sample. -> (L, U, contexts)"""
    found = []
    for step, held_BTU in held.items():
        score_BTU = np.where(chance_BT[..., None] > 0, held_BTU - chance_BT[..., None], -np.inf)
        if options.of == "experts":
            index_BTK, weight_BTK = (to_numpy(token_values(batch, step, suffix)) for suffix in (INDICES, WEIGHTS))
            np.put_along_axis(score_BTU, index_BTK.astype(np.int64), weight_BTK, -1)
            score_BTU[held_BTU == 0] = -np.inf
        found.append(best_of_samples(score_BTU, batch.samples, batch.sample_ids, options.contexts, options.around))
    return stacked_examples(found)


# What the sums say


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Where tokens went, which tokens and roles each expert has, and contexts."""
    layout = totals.layout
    if totals.options.of == "heads":
        return [*_role_masses(totals), _tokens(totals), *_contexts_shown(totals)]
    if layout.pairs.steps:
        went = _went(totals)
    else:
        once = NEEDS_TWO_VISITS if not totals.architecture.loops else "needs a layer's two visits in the capture"
        went = not_compared((STAYS,), layout.steps, (0, 1), why=once)
    return [*went, _roles(totals), _tokens(totals), *_contexts_shown(totals)]


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
    stays = each_unit(STAYS, pairs, totals.n["tokens"], ratio(sums["stays"], load_RPE)[..., None],
                         {name: null_PE[..., None] for name, null_PE in nulls.items()},
                         lambda at, expert, x: {})  # fmt: skip
    # The largest others, by group of documents.
    goes_GPEE = whole["goes"]
    num_experts = goes_GPEE.shape[-1]
    to_PEX = largest(goes_GPEE.sum(0) * (1 - np.eye(num_experts)), min(options.going, num_experts - 1))
    weight_RG, groups = group_weights(goes_GPEE.sum((1, 2, 3)), options.resample_seed)
    top_RPEX = np.tensordot(weight_RG, np.take_along_axis(goes_GPEE, to_PEX[None], -1), axes=1)
    bottom_RPE = np.tensordot(weight_RG, goes_GPEE.sum(-1), axes=1) / totals.architecture.top_k
    others: dict[str, Numbers | float] = {
        "uniform": uniform,
        "popularity": np.take_along_axis(popular_PE[:, None], to_PEX, -1),
        "shuffled": np.take_along_axis(dealt_PEE, to_PEX, -1),
    }
    goes = each_unit(GOES, pairs, totals.n["tokens"], ratio(top_RPEX, bottom_RPE[..., None]), others,
                        lambda at, expert, x: {"to": f"expert {to_PEX[at, expert, x] + 1}"}, groups)  # fmt: skip
    return [together, stays, goes]


def _roles(totals: Totals[Layout, Options]) -> Quantity:
    """The share of each role among each expert's tokens."""
    sums, load_RLE = totals.sums, totals.sums["load"]
    shuffled_LEZ = ratio(totals.whole["shuffled roles"], load_RLE[0, ..., None])
    chance_Z = ratio(sums["role tokens"][0], sums["tokens"][0])
    return each_unit(ROLE, totals.layout.steps, totals.n["tokens"], ratio(sums["roles"], load_RLE[..., None]),
                        {"uniform": chance_Z, "shuffled": shuffled_LEZ},
                        lambda at, expert, z: {"role": role_name(ROLES[z])})  # fmt: skip


def _role_masses(totals: Totals[Layout, Options]) -> list[Quantity]:
    """The share of each head's attention that the keys of each role take, and of that of all heads."""
    sums, grid = totals.sums, totals.layout.steps
    share_RLQZ = ratio(sums["roles"], sums["load"][..., None])
    chance_Z = ratio(sums["role tokens"][0], sums["tokens"][0])
    return [
        Quantity(name=ROLE, value_RLH=share_RLQZ[..., z], places=grid.places(HEADS), n=totals.n["tokens"],
                 nulls={"uniform": float(chance_Z[z])}, change=True, where={"role": role_name(role)})
        for z, role in enumerate(ROLES) if chance_Z[z] > 0
    ]  # fmt: skip


def _tokens(totals: Totals[Layout, Options]) -> Quantity:
    """The tokens that tell each unit's from all tokens."""
    counts_GLEV, whole = totals.whole["tokens"], totals.whole
    load_GLE = counts_GLEV.sum(-1)
    share_LEV = ratio(counts_GLEV.sum(0), load_GLE.sum(0)[..., None])
    chance_V = ratio(whole["all tokens"], whole["all tokens"].sum())
    told_LEV = share_LEV * np.log(ratio(share_LEV, chance_V), out=np.zeros_like(share_LEV), where=share_LEV > 0)
    best_LEX = largest(told_LEV, totals.options.tokens)
    weight_RG, groups = group_weights(load_GLE.sum((1, 2)), totals.options.resample_seed)
    top_RLEX = np.tensordot(weight_RG, np.take_along_axis(counts_GLEV, best_LEX[None], -1), axes=1)
    nulls: dict[str, Numbers | float] = {"uniform": chance_V[best_LEX]}
    if "shuffled tokens" in whole:
        shuffled_LEV = ratio(whole["shuffled tokens"], load_GLE.sum(0)[..., None])
        nulls["shuffled"] = np.take_along_axis(shuffled_LEV, best_LEX, -1)
    labels_V = totals.examples["labels"].text[:, 0]
    return each_unit(
        TOKEN, totals.layout.steps, totals.n["tokens"],
        ratio(top_RLEX, np.tensordot(weight_RG, load_GLE, axes=1)[..., None]),
        nulls,
        lambda at, expert, x: {"token": str(labels_V[best_LEX[at, expert, x]])}, groups,
    )  # fmt: skip


def _contexts_shown(totals: Totals[Layout, Options]) -> list[Quantity]:
    """The kept contexts, each with its sample and position from 1."""
    kept = totals.examples["contexts"]

    def column(at: int, expert: int, x: int) -> Where:
        place = at, expert, x
        return {"sample": int(kept.sample[place]) + 1, "position": int(kept.position[place]) + 1,
                "context": str(kept.text[place])}  # fmt: skip

    return [each_unit(CONTEXT, totals.layout.steps, totals.n["tokens"], kept.score[None], {}, column)]


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """The roles of each unit's tokens on each step, and where an expert's went on the other visit."""
    from plotly.graph_objects import Figure, Heatmap

    layout, num_experts = totals.layout, totals.architecture.num_experts

    def drawn(title: str, grid: Grid, columns: Sequence[str], share_LEX: Numbers) -> Figure:
        kind, numbers = ("head", grid.heads) if grid.heads else ("expert", range(num_experts))
        rows = [f"{label}, {kind} {number + 1}" for label in grid.labels() for number in numbers]
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
