"""How are tokens spread over the experts on each visit: load, entropy, dead experts, co-activation, specialisation?

p(e) = share of the tokens whose top k holds expert e; the p(e) of a step sum to k. Beside each number stands what even
routing would give.

    load entropy        of p(e) / k, in nats; even routing: log E
    router entropy      mean over tokens of the entropy of the router's scores over all experts, which sum to 1
    MaxVio              max p(e) / (k / E) - 1 (arXiv:2408.15664); even routing: 0
    dead experts        experts that no token chose; even routing: E (1 - k/E)^tokens
    most frequent pair  p(e, f) = share of the tokens that chose both, for the pair of experts where it is largest;
                        uniform sets: k (k - 1) / (E (E - 1))
    specialisation      mean over tokens of the total variation distance between p(e) / k among the tokens of their
                        class (role, token class, domain) and among all tokens: 0 to 1, 0 where routing ignores the
                        class; a class's own p(e) is the specialisation of OLMoE (arXiv:2409.02060)

A token's class is read from its text: an opening or closing bracket, digits, letters, punctuation, a newline, other
white space, or something else.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import Mask, is_token, ratio, token_values
from probes.statistics.bootstrap import num_groups, weights
from probes.statistics.experts import INDICES, LOGITS, routed_steps
from probes.statistics.grid import STEPS, Grid, Place
from probes.statistics.quantities import Quantity
from probes.statistics.shuffles import MOST_SHUFFLES, shuffled_positions
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop, Router
from smelt_interp.arrays import Array, Floats, moved
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Role, Samples, role_name, token_class
from smelt_interp.data.token_text import TokenClass
from smelt_interp.similarity import chosen
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Routing load"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ()

TOKEN_CLASSES: tuple[TokenClass, ...] = (
    "opening", "closing", "digits", "letters", "punctuation", "newline", "whitespace"
)  # fmt: skip
"""The first that holds is a token's class; what has none of them is `other`."""
KINDS = ("role", "token class", "domain")


@validated
class Options:
    """What the nulls are drawn from."""

    shuffles: Annotated[int, Field(ge=1, le=MOST_SHUFFLES)] = 4
    """Shuffles of each sample's tokens behind the nulls of specialisation by role and by token class."""
    resample_seed: Seed = 0
    """Seed of the bootstrap and of shuffles."""


def needs(architecture: Architecture) -> tuple[str, ...]:
    """The choice, and the scores it was made from."""
    return (INDICES, LOGITS)


def start(architecture: Architecture, options: Options) -> Sums[Grid, Options]:
    """Sums over the tokens of each sample, at every step."""
    return Sums(architecture, options, lay_out, reduce, quantities, seed=options.resample_seed)


def result(sums: Sums[Grid, Options]) -> Result:
    """Loads with their nulls, and a figure of the load of every expert."""
    return answer(sums, figures)


# Arithmetic: Z classes of tokens, G groups of documents


def score_entropy(logits_BTE: Floats, router: Router) -> Floats:
    """Entropy in nats of the router's scores over all experts, divided by their sum. -> (B, T)"""
    xp = array_namespace(logits_BTE)
    if router == "softmax":
        scores_BTE = xp.exp(logits_BTE - xp.max(logits_BTE, axis=-1, keepdims=True))
    else:
        scores_BTE = 1 / (1 + xp.exp(-xp.clip(logits_BTE, -500, 500)))
    return entropy(scores_BTE)


def entropy(weight: Floats) -> Floats:
    """Entropy in nats of nonnegative weights, divided by their sum over the last axis; NaN where they sum to 0."""
    xp = array_namespace(weight)
    total = xp.sum(weight, axis=-1, keepdims=True)
    share = weight / xp.where(total > 0, total, xp.nan)
    total_entropy: Floats = -xp.sum(
        share * xp.log(xp.where(share > 0, share, xp.where(share == 0, 1.0, share))), axis=-1
    )
    return total_entropy


def variation(share_of_class: Floats, share_of_all: Floats) -> Floats:
    """Total variation distance over the last axis of two loads, each divided by its sum."""
    first, second = (ratio(x, x.sum(-1, keepdims=True)) for x in (share_of_class, share_of_all))
    return np.asarray(np.abs(first - second).sum(-1) / 2)


def classes(samples: Samples) -> dict[str, dict[str, Mask]]:
    """The tokens of every class that occurs, by kind and name; one class of each kind a token. -> (B, T)"""
    token_BT = is_token(samples)
    found: dict[str, dict[str, Mask]] = {kind: {} for kind in KINDS}
    for role in Role:
        found["role"][role_name(role)] = token_BT & (samples.role_NT == role)
    rest_BT = token_BT
    for name in TOKEN_CLASSES:
        of_class_BT = rest_BT & token_class(samples, name)
        found["token class"][name], rest_BT = of_class_BT, rest_BT & ~of_class_BT
    found["token class"]["other"] = rest_BT
    for domain in dict.fromkeys(samples.domain_N.tolist()):
        found["domain"][domain.decode()] = token_BT & (samples.domain_N == domain)[:, None]
    return {kind: {name: of_BT for name, of_BT in each.items() if of_BT.any()} for kind, each in found.items()}


# Sums


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grid:
    """The measured steps. Raises UserError for a dense network."""
    steps = routed_steps(batch, needs(batch.architecture))
    return Grid(architecture=batch.architecture, loops=loops, steps=steps)


def reduce(batch: Batch, grid: Grid, options: Options) -> Reduced:
    """Tokens by step and expert, for all tokens and by class; pairs of experts; entropy of the router."""
    samples, architecture = batch.samples, batch.architecture
    token_BT = is_token(samples)
    names, class_BZT = _stacked_classes(samples)
    orders_XBT = shuffled_positions(token_BT, batch.sample_ids, options.resample_seed, options.shuffles)
    shuffled_XBZT = np.stack([np.take_along_axis(class_BZT, order_BT[:, None], -1) for order_BT in orders_XBT])
    groups = num_groups(len(grid.steps) * architecture.num_experts**2)
    group_GB = samples.document_N % groups == np.arange(groups)[:, None]
    steps = [
        _step_sums(batch, step, class_BZT, shuffled_XBZT, group_GB) for step in grid.steps if isinstance(step, int)
    ]
    xp = array_namespace(steps[0]["load"])
    stacked = {name: xp.stack([each[name] for each in steps], axis=1) for name in steps[0]}
    counts: dict[str, Array] = {"load": stacked["load"]}
    whole: dict[str, Array] = {"pairs": stacked["pairs"], "group tokens": group_GB @ token_BT.sum(-1)}
    for z, name in enumerate(names):
        counts |= {f"load.{name}": stacked["class"][:, :, z], f"tokens.{name}": class_BZT[:, z].sum(-1)}
        whole[f"shuffled.{name}"] = stacked["shuffled"][:, :, z]
    sums = {"tokens": token_BT.sum(-1), "router": stacked["router"]}
    return Reduced(by_sample=sums, counts=counts, whole=whole, defined={"tokens": samples.length_N > 0})


def _stacked_classes(samples: Samples) -> tuple[list[str], Mask]:
    """Names of the classes, `kind.name`, and their tokens (B, Z, T)."""
    found = {f"{kind}.{name}": of_BT for kind, each in classes(samples).items() for name, of_BT in each.items()}
    return list(found), np.stack(list(found.values()), 1)


def _step_sums(batch: Batch, step: int, class_BZT: Mask, shuffled_XBZT: Mask, group_GB: Mask) -> dict[str, Floats]:
    """Of one step: tokens by expert (B, E), of each class (B, Z, E), of shuffled classes (X, Z, E), by pair of experts
    (G, E, E); entropy of the router (B,)."""
    architecture, token_BT = batch.architecture, is_token(batch.samples)
    held_BTE = chosen(token_values(batch, step, INDICES), token_BT, architecture.num_experts)
    xp = array_namespace(held_BTE)
    token_BT_, class_BZT_, shuffled_XBZT_, group_GB_ = (
        xp.astype(moved(mask, held_BTE), held_BTE.dtype) for mask in (token_BT, class_BZT, shuffled_XBZT, group_GB)
    )
    entropy_BT = score_entropy(token_values(batch, step, LOGITS), architecture.router)
    return {
        "load": xp.sum(held_BTE, axis=1),
        "class": class_BZT_ @ held_BTE,
        "shuffled": xp.sum(shuffled_XBZT_ @ held_BTE, axis=1),
        "pairs": xp.tensordot(group_GB_, xp.matrix_transpose(held_BTE) @ held_BTE, axes=1),
        "router": xp.sum(entropy_BT * token_BT_, axis=-1),
    }


# What the sums say


class Classes(NamedTuple):
    """Loads by class of token, with resamples first where there are any."""

    names: tuple[str, ...]
    load_RLZE: NDArray[np.float64]
    tokens_RZ: NDArray[np.float64]

    def specialisation_RL(self) -> NDArray[np.float64]:
        """Mean over tokens of the distance between their class's load and everyone's."""
        distance_RLZ = np.nan_to_num(variation(self.load_RLZE, self.load_RLZE.sum(2, keepdims=True)))
        return ratio(np.einsum("rlz,rz->rl", distance_RLZ, self.tokens_RZ), self.tokens_RZ.sum(-1, keepdims=True))

    def share_RLZE(self) -> NDArray[np.float64]:
        """p(e) among the tokens of each class."""
        return ratio(self.load_RLZE, self.tokens_RZ[:, None, :, None])


def classes_of(totals: Totals[Grid, Options], kind: str) -> Classes:
    """The classes of a kind that occur in the samples."""
    names = sorted(name.removeprefix(f"tokens.{kind}.") for name in totals.sums if name.startswith(f"tokens.{kind}."))
    return Classes(
        names=tuple(names),
        load_RLZE=np.stack([totals.sums[f"load.{kind}.{name}"] for name in names], 2),
        tokens_RZ=np.stack([totals.sums[f"tokens.{kind}.{name}"] for name in names], 1),
    )


def quantities(totals: Totals[Grid, Options]) -> list[Quantity]:
    """Loads of every step, pairs of experts, and what classes of tokens prefer."""
    grid, sums, n = totals.layout, totals.sums, totals.n["tokens"]
    top_k, num_experts = totals.architecture.top_k, totals.architecture.num_experts
    load_RLE = ratio(sums["load"], sums["tokens"][:, None, None])
    dead_RL = np.where(np.isnan(load_RLE), np.nan, load_RLE == 0).sum(-1)  # a resample may hold no sample
    even, dead = float(np.log(num_experts)), num_experts * (1 - top_k / num_experts) ** float(sums["tokens"][0])
    measured = {
        "load entropy": (entropy(load_RLE), even),
        "router entropy": (ratio(sums["router"], sums["tokens"][:, None]), even),
        "MaxVio": (load_RLE.max(-1) * num_experts / top_k - 1, 0.0),
        "dead experts": (dead_RL, dead),
    }
    found = [
        Quantity(name=name, value_RLH=value_RL[..., None], places=grid.places(STEPS), n=n, nulls={"uniform": null},
                 recentred=True)
        for name, (value_RL, null) in measured.items()
    ]  # fmt: skip
    found += _coactivation(totals, load_RLE[0])
    by_kind = {kind: classes_of(totals, kind) for kind in KINDS}
    found += [_specialisation(totals, kind, each) for kind, each in by_kind.items()]
    found += [each for kind, named in by_kind.items() for each in _favourites(totals, kind, named, load_RLE[0])]
    return found


def _coactivation(totals: Totals[Grid, Options], load_LE: NDArray[np.float64]) -> list[Quantity]:
    """The pair of experts that most tokens chose together, on each step; the headline is the mean over layers."""
    top_k, num_experts = totals.architecture.top_k, totals.architecture.num_experts
    if top_k < 2:
        return []
    pairs_GLEE, tokens_G = totals.whole["pairs"] * (1 - np.eye(num_experts)), totals.whole["group tokens"]
    best_L = pairs_GLEE.sum(0).reshape(len(load_LE), -1).argmax(-1)
    first_L, second_L = np.divmod(best_L, num_experts)
    step_L = np.arange(len(load_LE))
    # The bootstrap of groups of documents: the number of a group stands for its documents.
    weight_RG = weights(totals.options.resample_seed, np.arange(len(tokens_G)))
    value_RL = ratio(weight_RG @ pairs_GLEE[:, step_L, first_L, second_L], (weight_RG @ tokens_G)[:, None])
    # Independent experts, scaled so that all pairs together are the k (k - 1) that every token has.
    scale_L = top_k * (top_k - 1) / (top_k**2 - (load_LE**2).sum(-1))
    popularity_L = load_LE[step_L, first_L] * load_LE[step_L, second_L] * scale_L

    def note(place: Place) -> str:
        at = place.positions[0]
        return f"experts {first_L[at] + 1} and {second_L[at] + 1}" if place.level == "layer" else ""

    groups = min(totals.n["tokens"], int((tokens_G > 0).sum()))
    uniform = top_k * (top_k - 1) / (num_experts * (num_experts - 1))
    return [
        Quantity(name="most frequent pair of experts", value_RLH=value_RL[..., None], note=note, n=groups, picked=True,
                 places=totals.layout.places(STEPS), nulls={"uniform": uniform, "popularity": popularity_L[:, None]})
    ]  # fmt: skip


def _specialisation(totals: Totals[Grid, Options], kind: str, named: Classes) -> Quantity:
    """How far the loads of classes are from everyone's; a domain is that of its whole sample, and has no shuffle."""
    nulls: dict[str, Floats | float | None] = {"uniform": 0.0}
    if kind != "domain":
        shuffled_XLZE = np.stack([totals.whole[f"shuffled.{kind}.{name}"] for name in named.names], 2)
        tokens_XZ = np.tile(named.tokens_RZ[0], (len(shuffled_XLZE), 1))
        nulls["shuffled"] = (
            named._replace(load_RLZE=shuffled_XLZE, tokens_RZ=tokens_XZ).specialisation_RL().mean(0)[:, None]
        )
    enough = len(named.names) > 1
    kinds = {"token class": "token classes"}.get(kind, f"{kind}s")
    return Quantity(
        name=f"specialisation by {kind}",
        value_RLH=named.specialisation_RL()[..., None],
        places=totals.layout.places(STEPS if enough else ("headline",)),
        n=totals.n["tokens"],
        nulls=nulls,
        recentred=True,
        undefined="" if enough else f"needs two {kinds}; got {', '.join(named.names) or 'none'}",
    )


def _favourites(
    totals: Totals[Grid, Options], kind: str, named: Classes, load_LE: NDArray[np.float64]
) -> list[Quantity]:
    """The favourite expert of each class at each step."""
    uniform = totals.architecture.top_k / totals.architecture.num_experts
    found = []
    for z, name in enumerate(named.names):
        share_RLE = named.share_RLZE()[:, :, z]
        best_L = share_RLE[0].argmax(-1)
        value_RL = np.take_along_axis(share_RLE, best_L[None, :, None], -1)[..., 0]
        popularity_LH = np.take_along_axis(load_LE, best_L[:, None], -1)
        found.append(
            Quantity(name="share of the favourite expert", value_RLH=value_RL[..., None], n=totals.n["tokens"],
                     places=[place._replace(level="head") for place in totals.layout.places(("layer",))],
                     nulls={"uniform": uniform, "popularity": popularity_LH}, where={"class": f"{kind} {name}"},
                     note=partial(_name_expert, best_L))
        )  # fmt: skip
    return found


def _name_expert(best_L: NDArray[np.intp], place: Place) -> str:
    return f"expert {best_L[place.positions[0]] + 1}"


def figures(totals: Totals[Grid, Options]) -> "dict[str, Figure]":
    """The load of every expert at every step."""
    from plotly.graph_objects import Figure, Heatmap

    load_LE = ratio(totals.sums["load"][0], totals.sums["tokens"][0])
    experts = [f"expert {index + 1}" for index in range(load_LE.shape[1])]
    drawn = Figure(Heatmap(z=load_LE.T, x=totals.layout.labels(), y=experts, colorscale="Viridis"))
    drawn.update_layout(title=f"{TITLE}: share of tokens whose top k holds the expert", height=520)
    return {"load": drawn}


def main() -> None:
    """`python -m probes.expert_load`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
