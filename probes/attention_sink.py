"""Where does attention go: to the first token of its text (a sink), to the query itself, to the content, elsewhere?

A = attention after softmax, t a query, s(t) the first position of its segment, whatever token stands there. Means are
over the queries of `queries` with t - s(t) >= t_min, over the heads, and in the headline over the looped layers, for
each visit.

    mass partition       every key that t can see is in one part, first match wins: start (s(t)), self (t), content,
                         other
    null                 1 - the sum of the parts: what a learned sink takes. Reported, never forced: without a learned
                         sink every single row must be within 1e-3 of 0
    value-weighted       A[t, j] norm(v[j]), divided by its sum over j
    strongest key        the largest of sum over t of A[t, s(t) + i] / number of queries, over i: a sink need not sit
                         on the first token, and for i = 0 this is the start mass
    Sink_1^0.3           share of (sample, layer, head) whose mean mass on key 1 exceeds 0.3 over the first 64 queries,
                         the first one included (arXiv:2410.10781); shorter samples are left out

Each mass has beside it the share that uniform attention would give: 1 / (t - s(t) + 1) a key, or 1 / n over all n keys
of the segment where attention is not causal.
"""

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from einops import rearrange
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import Floats, Mask, is_token, like, query_heads, ratio, recorded_steps, site
from probes.statistics.attention import (
    Keys,
    at_start,
    by_position,
    entropy,
    key_masses,
    seen_keys,
    seen_rows,
    seen_total,
    share,
)
from probes.statistics.grid import HEADS, STEPS, Grid, Place
from probes.statistics.quantities import Quantity, largest_heads, no_note
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Role, Samples, role_name, token_class
from smelt_interp.errors import UserError
from smelt_interp.similarity import ROW_SUM_TOLERANCE
from smelt_interp.terminal.from_one import Indices
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Attention sink"
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ({"quantity": "start mass", "head": "mean"}, {"quantity": "content mass"})

PATTERN, VALUE = "attn.hook_pattern", "attn.hook_v"
PARTS = ("start", "self", "content", "other")
MASSES = tuple(f"{part} mass" for part in PARTS)
QUANTITIES = (*MASSES, "null mass", "entropy (nats)", "value-weighted start mass")
WEIGHTED_UNIFORM = len(QUANTITIES)
"""Where the sums hold what uniform attention would give for the last quantity."""
COLOURS = ("#4059ad", "#97d8c4", "#f4b942", "#8d99ae")
"""Of PARTS."""

Content = Literal[
    "demonstration_answers", "instruction", "brackets", "letters", "digits", "whitespace", "punctuation"
]  # fmt: skip
_ROLES = {"demonstration_answers": Role.DEMONSTRATION_ANSWER, "instruction": Role.INSTRUCTION}


@validated
class Options:
    """What is averaged over, and what counts as content."""

    queries: Literal["all", "predict_answer"] = "all"
    """Averaging set: all queries, or those whose next token belongs to the answer of the episode's own query."""
    t_min: Annotated[int, Field(ge=1, le=10**9)] = 1
    """Least distance of a query from its segment's start, whose own query has nowhere else to look."""
    heads: Indices = ()
    """Query heads to average over; naming none takes all."""
    layers: Indices = ()
    """Layers to measure; naming none takes all."""
    content: Content = "demonstration_answers"
    """Which keys are content: by role (demonstration answers, instruction) or by class of the token's text."""
    sink_threshold: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Sink_1: the mean mass on key 1 above which a head counts as a sink."""
    sink_tokens: Annotated[int, Field(ge=1, le=10**9)] = 64
    """Sink_1: the number of first queries averaged over."""

    def __post_init__(self) -> None:
        if len(set(self.heads)) < len(self.heads):
            raise UserError(f"heads must be different numbers; got {' '.join(str(head + 1) for head in self.heads)}")


def needs(architecture: Architecture) -> tuple[str, ...]:
    """Patterns, and the values whose norms weigh them."""
    return (PATTERN, VALUE)


def start(architecture: Architecture, options: Options) -> Sums[Grid, Options]:
    """Sums over the averaged queries of each sample."""
    return Sums(architecture, options, lay_out, reduce, quantities)


def result(sums: Sums[Grid, Options]) -> Result:
    """Masses, entropy, strongest keys and Sink_1, with the partition as a figure."""
    return answer(sums, figures)


# Which queries, keys, steps and heads


def keys(samples: Samples, options: Options, causal: bool) -> Keys:
    """The partition of the keys of every query."""
    start_BT, token_BT = samples.segment_start_NT.astype(np.int64), is_token(samples)
    position_T = np.arange(start_BT.shape[1])
    averaged_BT = token_BT & (position_T - start_BT >= options.t_min)
    if options.queries == "predict_answer":
        averaged_BT[:, :-1] &= samples.role_NT[:, 1:] == Role.ANSWER
        averaged_BT[:, -1] = False
    seen_BTS = seen_keys(samples, causal=causal)
    content_BS = is_content(samples, options) & token_BT
    averaged, token, seen, content, apart = (
        mask.astype(np.float64) for mask in (averaged_BT, token_BT, seen_BTS, content_BS, position_T != start_BT)
    )
    return Keys(averaged, token, seen, content, apart, start_BT, bool(start_BT.any()), causal)


def is_content(samples: Samples, options: Options) -> Mask:
    """Which tokens are content. -> (B, T)"""
    if options.content == "demonstration_answers" or options.content == "instruction":
        return np.asarray(samples.role_NT == _ROLES[options.content])
    return token_class(samples, options.content)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grid:
    """The steps and heads that are measured. Raises UserError for layers or heads that were not recorded."""
    architecture = batch.architecture
    steps = recorded_steps(batch, (PATTERN, VALUE))
    recorded = {architecture.steps[step].layer for step in steps}
    if not set(options.layers) <= recorded:
        wanted = ", ".join(str(layer + 1) for layer in options.layers)
        raise UserError(f"layers must be recorded layers of 1 to {architecture.num_layers}; got {wanted}")
    steps = tuple(s for s in steps if not options.layers or architecture.steps[s].layer in options.layers)
    kept = batch.heads[PATTERN]
    heads = options.heads or kept
    if not set(heads) <= set(kept):
        wanted = ", ".join(str(head + 1) for head in heads)
        raise UserError(f"heads must be among the recorded {[head + 1 for head in kept]}; got {wanted}")
    return Grid(architecture=architecture, loops=loops, steps=steps, heads=heads)


# Arithmetic


class Read(NamedTuple):
    """What is read off the patterns of heads: of one step, or of several, their heads side by side on the axis Q."""

    start_BQT: Floats
    """Each query's mass on the start of its segment, and on itself; whatever it is where the query is padding."""
    self_BQT: Floats
    row_BQT: Floats
    """Its mass on all keys, then that weighted by their norms."""
    weighted_BQT: Floats
    entropy_BQT: Floats
    key_BQS: Floats
    """Mass that each key takes from the averaged queries together."""
    norm_BQS: Floats


class Masses(NamedTuple):
    """What they come to; M is QUANTITIES, then what uniform attention gives the last of them."""

    mass_BQM: Floats
    """Sums over the averaged queries."""
    null_Q: Floats
    """How far the row that misses 1 most misses it."""


def read_pattern(pattern_BQTS: Floats, norm_BQS: Floats, found: Keys) -> Read:
    """Everything that is read off the pattern of a step, in one pass over it: it is the largest array of a batch."""
    xp = array_namespace(pattern_BQTS)
    key_BQS, by_query = xp.zeros_like(norm_BQS), []
    for queries, rows_BQTS in seen_rows(pattern_BQTS, found):
        keys = slice(0, rows_BQTS.shape[-1])
        key_BQS[..., keys] += key_masses(rows_BQTS, found.averaged_BT[:, queries])
        weighted_BQT = (norm_BQS[:, :, None, keys] @ rows_BQTS.mT)[:, :, 0]
        by_query.append((xp.sum(rows_BQTS, axis=-1), weighted_BQT, entropy(rows_BQTS)))
    row_BQT, weighted_BQT, entropy_BQT = (xp.concat(each, axis=-1) for each in zip(*by_query, strict=True))
    return Read(
        start_BQT=at_start(pattern_BQTS, found),
        self_BQT=xp.linalg.diagonal(pattern_BQTS),
        row_BQT=row_BQT,
        weighted_BQT=weighted_BQT,
        entropy_BQT=entropy_BQT,
        key_BQS=key_BQS,
        norm_BQS=norm_BQS,
    )


def masses(read: Read, found: Keys) -> Masses:
    """Sums over the averaged queries. Parts of keys are sums over columns that were added over queries first; only row
    sums are taken query by query."""
    start_BQT, self_BQT, row_BQT, weighted_BQT, entropy_BQT, key_BQS, norm_BQS = read
    xp = array_namespace(key_BQS)
    start_BQT, self_BQT = start_BQT * found.token_BT[:, None], self_BQT * (found.token_BT * found.apart_BT)[:, None]
    # What the keys of both parts take; what start and self took first is taken out, whichever part they belong to.
    parts_BPS = xp.stack([found.content_BS, 1 - found.content_BS], axis=1)
    part_BQP = xp.sum(xp.astype(key_BQS[:, :, None] * parts_BPS[:, None], xp.float64), axis=-1)
    at_start_BPT = at_start(parts_BPS[:, :, None], found)
    taken_BQPT = at_start_BPT[:, None] * start_BQT[:, :, None] + parts_BPS[:, None] * self_BQT[:, :, None]

    start_norm_BQT = at_start(norm_BQS[:, :, None], found)
    each_BQMT = xp.stack(
        [
            start_BQT, self_BQT, taken_BQPT[:, :, 0], taken_BQPT[:, :, 1], 1 - row_BQT,
            entropy_BQT, share(start_BQT * start_norm_BQT, weighted_BQT),
            share(start_norm_BQT, seen_total(norm_BQS, found)),
        ],
        axis=2,
    )  # fmt: skip
    # In double precision: sums of hundreds of queries are compared to 1e-6.
    mass_BQM = xp.sum(xp.astype(each_BQMT * found.averaged_BT[:, None, None], xp.float64), axis=-1)
    mass_BQM[:, :, 2:4] = part_BQP - mass_BQM[:, :, 2:4]
    missing_BQT = xp.abs(1 - row_BQT) * found.token_BT[:, None]
    null_Q = xp.max(xp.max(missing_BQT, axis=-1), axis=0)
    return Masses(mass_BQM, null_Q)


def uniform_masses(found: Keys) -> NDArray[np.float64]:
    """What uniform attention gives each of PARTS, then its entropy, by query. -> (B, T, 5)"""
    seen_BT = np.maximum(found.seen_BTS.sum(-1), 1)
    content_BT = (found.seen_BTS @ found.content_BS[..., None])[..., 0]
    content_BT -= np.take_along_axis(found.content_BS, found.start_BT, 1) + found.content_BS * found.apart_BT
    other_BT = seen_BT - 1 - found.apart_BT - content_BT
    shares = [keys_BT / seen_BT for keys_BT in (np.ones(seen_BT.shape), found.apart_BT, content_BT, other_BT)]
    return np.stack([*shares, np.log(seen_BT)], -1)


# Sums


def reduce(batch: Batch, grid: Grid, options: Options) -> Reduced:
    """Sums over the averaged queries of each sample."""
    samples, found = batch.samples, keys(batch.samples, options, batch.architecture.causal)
    # Each pattern where it is, then what was read of all of them together: it is small, and operations are what costs.
    norm_LBQS = _value_norms(batch, grid)
    xp, moved, reads, early = array_namespace(norm_LBQS), found.moved(norm_LBQS), [], []
    for position, step in enumerate(grid.steps):
        assert isinstance(step, int)  # `lay_out` measures single steps
        kept = batch.heads[PATTERN]
        pattern_BQTS = query_heads(site(batch, step, PATTERN), 1, kept, grid.heads, batch.architecture)
        reads.append(read_pattern(pattern_BQTS, norm_LBQS[position], moved))
        early.append(xp.mean(pattern_BQTS[:, :, : options.sink_tokens, 0], axis=-1))
    read = Read(*(xp.concat(each, axis=1) for each in zip(*reads, strict=True)))
    given, num_steps = masses(read, moved), len(grid.steps)
    mass_BLQM = rearrange(given.mass_BQM, "b (l q) m -> b l q m", l=num_steps)
    key_BLQP = rearrange(by_position(read.key_BQS, found), "b (l q) p -> b l q p", l=num_steps)
    sink_BLQ = xp.astype(xp.stack(early, axis=1) > options.sink_threshold, norm_LBQS.dtype)
    # Groups of layers by key, the rows that are long enough, and the roles that stand at each position.
    groups = [xp.mean(xp.mean(key_BLQP[:, inside], axis=2), axis=1) for _, _, inside in grid.groups()]
    start_BT, first = found.start_BT, options.sink_tokens
    long_B: Mask = (samples.length_N >= first) & (start_BT[:, :first] == 0).all(axis=-1)
    token_BT, role_PR = is_token(samples), np.zeros((start_BT.shape[1], len(Role)))
    position_BT = np.arange(start_BT.shape[1]) - start_BT
    np.add.at(role_PR, (position_BT[token_BT], samples.role_NT[token_BT]), 1)
    return Reduced(
        by_sample={
            "mass": mass_BLQM,
            "queries": found.averaged_BT.sum(-1),
            "uniform": (uniform_masses(found) * found.averaged_BT[..., None]).sum(1),
            "sink": sink_BLQ * like(long_B, sink_BLQ)[:, None, None],
            "long": long_B,
            **({"key": xp.stack(groups, axis=1)} if groups else {}),
        },
        whole={"head_key": xp.sum(key_BLQP, axis=0), "role": role_PR, "content": found.content_BS.sum()[None]},
        largest={"null": rearrange(given.null_Q, "(l q) -> l q", l=num_steps)},
        defined={"queries": np.asarray(found.averaged_BT.any(axis=-1)), "long": long_B},
    )


def _value_norms(batch: Batch, grid: Grid) -> Floats:
    """The norms of the values that the measured heads read. -> (L, B, Q, S)"""
    values = [site(batch, step, VALUE) for step in grid.steps if isinstance(step, int)]
    xp, heads = array_namespace(values[0]), batch.heads[VALUE]
    norm_XSG = xp.linalg.vector_norm(xp.concat(values, axis=0), axis=-1)
    norm_XSQ = query_heads(norm_XSG, 2, heads, grid.heads, batch.architecture)
    return rearrange(norm_XSQ, "(l b) s q -> l b q s", l=len(values))


# What the sums say


def quantities(totals: Totals[Grid, Options]) -> list[Quantity]:
    """Masses, entropy, strongest keys and Sink_1, wherever they have a row."""
    grid, options, sums, n = totals.layout, totals.options, totals.sums, totals.n["queries"]
    value_RLQM = ratio(sums["mass"], sums["queries"][:, None, None, None])
    uniform_M = ratio(sums["uniform"][0], sums["queries"][0])
    uniform = {**dict(zip(MASSES, uniform_M, strict=False)), "null mass": 0.0, "entropy (nats)": uniform_M[len(PARTS)]}
    nothing = "" if n else f"not defined: no query of the averaging set ({options.queries}) here"
    no_content = f"not defined: no {options.content.replace('_', ' ')} in these samples; choose another --content"
    found = [
        Quantity(
            name=name,
            value_RLH=value_RLQM[..., m],
            places=grid.places(STEPS if name in ("self mass", "other mass") else HEADS),
            n=n,
            nulls={"uniform": uniform.get(name, value_RLQM[0, ..., WEIGHTED_UNIFORM])},
            change=name != "null mass",
            note=partial(_null_check, totals.largest["null"]) if name == "null mass" else no_note,
            undefined=nothing or (no_content if name == "content mass" and not totals.whole["content"][0] else ""),
        )
        for m, name in enumerate(QUANTITIES)
    ]
    found.insert(1, largest_heads(found[0], grid))
    # Whose value is a share of heads, not of mass.
    threshold = options.sink_threshold
    sink = Quantity(
        name=f"Sink_1^{threshold:g}",
        value_RLH=ratio(sums["sink"], sums["long"][:, None, None]),
        places=grid.places(),
        n=totals.n["long"],
        nulls={"uniform": float(np.mean(1 / np.arange(1, options.sink_tokens + 1)) > threshold)},
        undefined="" if totals.n["long"] else f"not defined: no sample has {options.sink_tokens} tokens",
    )
    return [*found, sink, *_strongest_keys(totals, float(uniform_M[0]), nothing)]


def _null_check(null_LQ: NDArray[np.float64], place: Place) -> str:
    """The note that says whether every row of attention sums to 1; without a learned sink it must."""
    at_LQ = null_LQ[place.positions]
    largest = float((at_LQ[:, place.heads] if place.heads else at_LQ).max())
    if largest <= ROW_SUM_TOLERANCE:
        return f"every row sums to 1 within {ROW_SUM_TOLERANCE:g}"
    return f"FAILS: a row's parts miss 1 by {largest:.3g}, more than {ROW_SUM_TOLERANCE:g}"


def _strongest_keys(totals: Totals[Grid, Options], uniform: float, undefined: str) -> list[Quantity]:
    """The key with the largest mean mass on each visit, and of each head, where it has no interval."""
    grid, queries_R = totals.layout, totals.sums["queries"]
    role_P = totals.whole["role"].argmax(-1)

    def name(key_X: NDArray[np.integer], at: int) -> str:
        position = int(key_X.flat[at])
        return f"key {position + 1}, {role_name(Role(int(role_P[position])))}"

    head_LQP = totals.whole["head_key"]
    key_LQ = head_LQP.argmax(-1)
    value_LQ = ratio(head_LQP.max(-1), queries_R[0])
    num_heads = len(grid.heads)
    of_heads = Quantity(
        name="strongest key", value_RLH=value_LQ[None], places=grid.places(("head",)), n=totals.n["queries"],
        nulls={"uniform": uniform}, undefined=undefined,
        note=lambda place: name(key_LQ, place.positions[0] * num_heads + place.heads[0]),
    )  # fmt: skip
    if "key" not in totals.sums:
        return [of_heads]
    key_RVP = totals.sums["key"]
    key_V = key_RVP[0].argmax(-1)
    value_RV = ratio(np.take_along_axis(key_RVP, key_V[None, :, None], -1)[..., 0], queries_R[:, None])
    visits = [place._replace(positions=[v]) for v, place in enumerate(grid.places(("headline",)))]
    return [
        replace(of_heads, value_RLH=value_RV[..., None], places=visits, picked=True,
                note=lambda place: name(key_V, place.positions[0])),
        of_heads,
    ]  # fmt: skip


def figures(totals: Totals[Grid, Options]) -> "dict[str, Figure]":
    """The partition along the steps, and the start mass of each head at each step."""
    from plotly.graph_objects import Figure, Heatmap, Scatter
    from plotly.subplots import make_subplots

    grid, sums = totals.layout, totals.sums
    mass_LQM = ratio(sums["mass"][0], sums["queries"][0])
    uniform_M = ratio(sums["uniform"][0], sums["queries"][0])
    drawn: Figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08,
        subplot_titles=("Mass partition", "Start mass by head"),
    )  # fmt: skip
    steps = grid.labels()
    for part, colour, mass_L, uniform in zip(PARTS, COLOURS, mass_LQM.mean(1).T, uniform_M, strict=False):
        line = {"color": colour}
        drawn.add_trace(Scatter(x=steps, y=mass_L, name=part, mode="lines+markers", line=line), row=1, col=1)
        drawn.add_trace(
            Scatter(x=steps, y=[uniform] * len(steps), name=f"{part}, uniform attention", mode="lines",
                    line={**line, "dash": "dot"}),
            row=1, col=1,
        )  # fmt: skip
    drawn.add_trace(
        Heatmap(
            x=steps, y=[f"head {head + 1}" for head in grid.heads], z=mass_LQM[..., 0].T, zmin=0,
            zmax=float(np.nanmax(mass_LQM[..., 0], initial=1e-6)),  # a scale to 1 would show a sink of .2 as none
            colorscale="Blues", colorbar={"title": "start mass", "len": 0.45, "y": 0.2},
        ),
        row=2, col=1,
    )  # fmt: skip
    drawn.update_yaxes(title_text="mean mass", range=[0, 1], row=1, col=1)
    drawn.update_layout(title=TITLE, height=720)
    return {"masses": drawn}


def main() -> None:
    """`python -m probes.attention_sink`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
