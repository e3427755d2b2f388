"""Where does attention go: to the first token of its text (a sink), to the query itself, to the content, elsewhere?

A = attention after softmax, t a query, s(t) the first position of its segment. Means are over the queries of
`queries` with t - s(t) >= t_min, over the heads, and in the headline over the looped layers, for each visit.

    mass partition       every causal key is in one part, first match wins: start (s(t)), self (t), content, other
    null                 1 - the sum of the parts: what a learned sink takes. Reported, never forced: without a learned
                         sink every single row must be within 1e-3 of 0
    value-weighted       A[t, j] norm(v[j]), divided by its sum over j
    strongest key        the largest of sum over t of A[t, s(t) + i] / number of queries, over i: a sink need not sit
                         on the first token, and for i = 0 this is the start mass
    Sink_1^0.3           share of (sample, layer, head) whose mean mass on key 1 exceeds 0.3 over the first 64 queries,
                         the first one included (arXiv:2410.10781); shorter samples are left out
    massive channels     entries of the residual above 100 and above 1000 times the median of their token
                         (arXiv:2402.17762)

Each mass has beside it the share that uniform attention 1 / (t - s(t) + 1) would give.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import (
    NEEDS_TWO_VISITS,
    Estimate,
    Level,
    Row,
    SampleSums,
    estimate,
    estimates,
    row,
)
from probes.sink_sums import PARTS, SITE_NORMS, SITES_READ, Chosen, Options, PositionSums, choose, sample_sums
from smelt_interp.config import ModelConfig
from smelt_interp.plan import label
from smelt_interp.similarity import ROW_SUM_TOLERANCE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Attention sink"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkResult:
    """The masses of one network on one data set."""

    table: tuple[Row, ...]
    step_labels: tuple[str, ...]
    """One a measured step, in order of execution."""
    head_labels: tuple[str, ...]
    part_mass_PL: NDArray[np.float64]
    """Mean mass of each part (P, in the order of PARTS) at each measured step (L)."""
    uniform_P: NDArray[np.float64]
    start_mass_LQ: NDArray[np.float64]
    """Start mass of each head."""

    def rows(self) -> list[Row]:
        """Headline rows, then one a step, then one a step and head."""
        return [dict(entry) for entry in self.table]


def needs(config: ModelConfig) -> tuple[str, ...]:
    """Patterns, and what the norms are of."""
    return SITES_READ


def measure(batches: Iterable[Batch], options: Options) -> SinkResult:
    """Masses, entropy and norms of one network on one data set; one pass, sums by sample.

    Raises UserError without samples, and for layers, heads or sites that were not recorded.
    """
    sums = SampleSums()
    opened: tuple[Chosen, PositionSums] | None = None
    for batch in batches:
        if opened is None:
            chosen = choose(batch, options)
            spans = [[chosen.steps.index(s) for s in span.steps] for span in chosen.spans]
            opened = chosen, PositionSums(spans, len(chosen.steps), len(chosen.heads))
        sums.add(batch.sample_ids, sample_sums(batch, opened[0], options, opened[1]))
    _, by_sample = sums.finish()
    assert opened is not None  # finish() has raised when there was no batch
    return _result(*opened, options, {name: np.asarray(array, np.float64) for name, array in by_sample.items()})


# Rows

MASSES = tuple(f"{part} mass" for part in PARTS)
QUANTITIES = (*MASSES, "null mass", "entropy (nats)", "value-weighted start mass")
WEIGHTED_UNIFORM = len(QUANTITIES)
"""Where the sums hold what uniform attention would give for the last quantity."""
NORMS = (*(f"{name} norm, start/other" for name in SITE_NORMS), "massive channels", "largest channel/median")


class _Scope(NamedTuple):
    """What one group of rows is about: measured steps by index, and heads by index."""

    level: Level
    where: Row
    steps: Sequence[int]
    heads: Sequence[int]


def _scopes(chosen: Chosen) -> list[_Scope]:
    every = range(len(chosen.heads))
    scopes = [
        _Scope("headline", {"layers": span.layers, "visit": span.visit + 1, "head": "mean"},
               [chosen.steps.index(s) for s in span.steps], every)
        for span in chosen.spans
    ]  # fmt: skip
    for index, step in enumerate(chosen.steps):
        where: Row = {"layers": str(chosen.plan[step].layer + 1), "visit": chosen.plan[step].visit + 1}
        scopes.append(_Scope("layer", {**where, "head": "mean"}, [index], every))
        scopes += [_Scope("head", {**where, "head": head + 1}, [index], [i]) for i, head in enumerate(chosen.heads)]
    return sorted(scopes, key=lambda scope: ("headline", "layer", "head").index(scope.level))


def _result(
    chosen: Chosen, positions: PositionSums, options: Options, sums: dict[str, NDArray[np.float64]]
) -> SinkResult:
    scopes = _scopes(chosen)
    quantity_NLMQ, count_N = sums["quantity"], sums["count"]
    scoped_NKM = np.stack([quantity_NLMQ[:, s.steps][..., s.heads].mean((1, 3)) for s in scopes], 1)
    counted = int(np.count_nonzero(count_N))
    value_KM, low_KM, high_KM = estimates(scoped_NKM, count_N)
    with np.errstate(invalid="ignore"):
        uniform_P = sums["uniform"].sum(0) / count_N.sum()
    has_content = bool(sums["content"].any())
    undefined = "" if counted else f"not defined: no query of the averaging set ({options.queries}) here"
    no_content = f"not defined: no {options.content.replace('_', ' ')} in these samples; choose another --content"
    table: list[Row] = []
    for k, scope in enumerate(scopes):
        uniform_M = [*uniform_P[:4], 0.0, uniform_P[4], value_KM[k, WEIGHTED_UNIFORM]]
        for m, quantity in enumerate(QUANTITIES):
            note = undefined
            found: Estimate | None = Estimate(value_KM[k, m], low_KM[k, m], high_KM[k, m], counted)
            if quantity == "content mass" and not has_content:
                found, note = None, no_content
            if quantity == "null mass":
                note = _null_check(float(sums["largest_null"][:, scope.steps][..., scope.heads].max()))
            if scope.level == "head" and quantity in ("self mass", "other mass"):
                continue
            nulls = {"uniform": None if found is None else uniform_M[m]}
            table.append(row(scope.level, quantity, found, where=scope.where, nulls=nulls, note=note))
        table += _more_rows(scope, k, positions, options, sums, uniform_P[0])
        if k == len(chosen.spans) - 1:
            table += _strongest_head_rows(chosen, scopes, (value_KM, low_KM, high_KM), counted, uniform_P[0])
            table += _change_rows(chosen, scoped_NKM, count_N, has_content)
    order = list(dict.fromkeys(entry["quantity"] for entry in table))
    headline = len([entry for entry in table if entry["level"] == "headline"])
    table[:headline] = sorted(
        table[:headline], key=lambda entry: (order.index(entry["quantity"]), entry["head"] == "largest")
    )
    layers = [k for k, scope in enumerate(scopes) if scope.level == "layer"]
    heads = [k for k, scope in enumerate(scopes) if scope.level == "head"]
    return SinkResult(
        table=tuple(table),
        step_labels=tuple(label(chosen.plan[step]) for step in chosen.steps),
        head_labels=tuple(f"head {head + 1}" for head in chosen.heads),
        part_mass_PL=value_KM[layers, :4].T,
        uniform_P=uniform_P[:4],
        start_mass_LQ=value_KM[heads, 0].reshape(len(chosen.steps), len(chosen.heads)),
    )


def _null_check(largest: float) -> str:
    """The note that says whether every row of attention sums to 1; without a learned sink it must."""
    if largest <= ROW_SUM_TOLERANCE:
        return f"every row sums to 1 within {ROW_SUM_TOLERANCE:g}"
    return f"FAILS: a row's parts miss 1 by {largest:.3g}, more than {ROW_SUM_TOLERANCE:g}"


def _more_rows(
    scope: _Scope,
    k: int,
    positions: PositionSums,
    options: Options,
    sums: dict[str, NDArray[np.float64]],
    uniform_start: float,
) -> list[Row]:
    """Sink_1 and the strongest key; norms and massive channels, which no single head has."""
    long_N = sums["long"]
    sink_N = sums["sink"][:, scope.steps][..., scope.heads].mean((1, 2)) * long_N
    mean_uniform = np.mean(1 / np.arange(1, options.sink_tokens + 1))
    sink_nulls = {"uniform": float(mean_uniform > options.sink_threshold)}
    sink_name = f"Sink_1^{options.sink_threshold:g}"
    no_long = "" if long_N.any() else f"not defined: no sample has {options.sink_tokens} tokens"
    rows = [row(scope.level, sink_name, estimate(sink_N, long_N), where=scope.where, nulls=sink_nulls, note=no_long)]
    nulls = {"uniform": uniform_start}
    if scope.level == "headline":
        found, key = positions.strongest(k)
        found = found._replace(n=int(np.count_nonzero(sums["count"])))
        rows.append(row(scope.level, "strongest key", found, where=scope.where, nulls=nulls, note=key))
    if scope.level == "head":
        mass, key = positions.strongest_of_head(scope.steps[0], scope.heads[0])
        rows.append(row(scope.level, "strongest key", mass, where=scope.where, nulls=nulls, note=key))
        return rows
    return rows + _norm_rows(scope, sums)


def _norm_rows(scope: _Scope, sums: dict[str, NDArray[np.float64]]) -> list[Row]:
    """Norms at the start over norms elsewhere, mean over samples; massive channels at the start and elsewhere."""
    norm_NXk = sums["norm"][:, scope.steps].mean(1)
    start_N, other_N = sums["kinds"].T
    rows = []
    for x, name in enumerate(NORMS):
        if x < len(SITE_NORMS):
            elsewhere_N = norm_NXk[:, x, 1] * start_N
            ratio_N = np.zeros_like(elsewhere_N)
            np.divide(norm_NXk[:, x, 0] * other_N, elsewhere_N, out=ratio_N, where=elsewhere_N > 0)
            found, other = estimate(ratio_N, (elsewhere_N > 0).astype(np.float64)), 1.0
        else:
            found, other = estimate(norm_NXk[:, x, 0], start_N), estimate(norm_NXk[:, x, 1], other_N).value
        note = _channel(sums["channel"][:, scope.steps]) if name == NORMS[-1] else ""
        rows.append(row(scope.level, name, found, where=scope.where, nulls={"other_tokens": other}, note=note))
    return rows


def _channel(channel_NL: NDArray[np.float64]) -> str:
    """Which channel is the largest at a sample's first token, and how often."""
    channels, counts = np.unique(channel_NL, return_counts=True)
    return f"channel {int(channels[counts.argmax()]) + 1} in {counts.max() / channel_NL.size:.0%}"


def _strongest_head_rows(
    chosen: Chosen,
    scopes: Sequence[_Scope],
    estimated: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]],
    counted: int,
    uniform_start: float,
) -> list[Row]:
    """The head with the largest start mass in each span. The largest of many is above their mean by choice alone."""
    rows = []
    for span in chosen.spans:
        steps = [chosen.steps.index(s) for s in span.steps]
        heads = [k for k, scope in enumerate(scopes) if scope.level == "head" and scope.steps[0] in steps]
        best = max(heads, key=lambda k: np.nan_to_num(estimated[0][k, 0]))
        value, low, high = (float(array[best, 0]) for array in estimated)
        where: Row = {"layers": span.layers, "visit": span.visit + 1, "head": "largest"}
        note = f"layer {scopes[best].where['layers']}, head {scopes[best].where['head']}"
        nulls = {"uniform": uniform_start}
        rows.append(
            row("headline", MASSES[0], Estimate(value, low, high, counted), where=where, nulls=nulls, note=note)
        )
    return rows


def _change_rows(
    chosen: Chosen, scoped_NKM: NDArray[np.float64], count_N: NDArray[np.float64], has_content: bool
) -> list[Row]:
    """Later visits minus the first, with paired intervals; under uniform attention only norms of values change."""
    rows = []
    spans = chosen.spans
    for m, quantity in enumerate(QUANTITIES):
        if quantity == "null mass" or (quantity == "content mass" and not has_content):
            continue
        if len(spans) == 1:
            where: Row = {"layers": spans[0].layers, "visit": "2 - 1", "head": "mean"}
            rows.append(row("headline", quantity, None, where=where, note=NEEDS_TWO_VISITS))
        for k in range(1, len(spans)):
            where = {"layers": spans[k].layers, "visit": f"{spans[k].visit + 1} - {spans[0].visit + 1}", "head": "mean"}
            found = estimate(scoped_NKM[:, k, m] - scoped_NKM[:, 0, m], count_N)
            uniform = estimate(scoped_NKM[:, k, WEIGHTED_UNIFORM] - scoped_NKM[:, 0, WEIGHTED_UNIFORM], count_N).value
            nulls = {"uniform": uniform if m == WEIGHTED_UNIFORM - 1 else 0.0}
            rows.append(row("headline", quantity, found, where=where, nulls=nulls))
    return rows


# Figure and command


def figure(result: SinkResult) -> "Figure":
    """The partition along the steps, and the start mass of each head at each step."""
    from plotly.graph_objects import Figure, Heatmap, Scatter
    from plotly.subplots import make_subplots

    drawn: Figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.08,
        subplot_titles=("Mass partition", "Start mass by head"),
    )
    colours = ("#4059ad", "#97d8c4", "#f4b942", "#8d99ae")
    for part, colour, mass_L, uniform in zip(PARTS, colours, result.part_mass_PL, result.uniform_P, strict=True):
        steps = list(result.step_labels)
        line = {"color": colour}
        drawn.add_trace(Scatter(x=steps, y=mass_L, name=part, mode="lines+markers", line=line), row=1, col=1)
        flat = {"color": colour, "dash": "dot"}
        name = f"{part}, uniform attention"
        drawn.add_trace(
            Scatter(x=steps, y=[uniform] * len(steps), name=name, mode="lines", line=flat, visible="legendonly"),
            row=1,
            col=1,
        )
    drawn.add_trace(
        Heatmap(
            x=list(result.step_labels), y=list(result.head_labels), z=result.start_mass_LQ.T, zmin=0, zmax=1,
            colorscale="Blues", colorbar={"title": "start mass", "len": 0.45, "y": 0.2},
        ),
        row=2,
        col=1,
    )  # fmt: skip
    drawn.update_yaxes(title_text="mean mass", range=[0, 1], row=1, col=1)
    drawn.update_layout(title=TITLE, height=720)
    return drawn


def main() -> None:
    """`python -m probes.attention_sink`."""
    from probes.running import command

    command.main("attention_sink")


if __name__ == "__main__":
    main()
