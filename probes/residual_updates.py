"""What does each visit add to the residual stream: how large, in which direction, and what does the stream become?

D is what one execution adds, as added (the loop factor is inside): the attention sublayer, the expert sublayer, the
layer (their sum), or the whole visit (the sum over the looped layers). For two visits of the same layer:

    norm ratio, median   median over tokens of norm(D_late) / norm(D_early), in constant memory (`ratio_histogram`)
    norm ratio, RMS      root mean square norm over tokens of D_late, by that of D_early
    cosine               mean over tokens of cos(D_early, D_late)

Nulls. `shuffled`: the later visit's tokens shuffled within their sample (of the cosine the exact mean over all
shuffles; the RMS ratio has none, since a shuffle leaves it as it is). `unlooped`: the same between a layer that runs
once and the next one that does, mean over all such pairs of this network; a Baseline has it as a row, `next layer`.

The loop factor is on both visits, so it cancels between them; it does not cancel against prelude and coda.

    update norm          root mean square norm over tokens of what a step adds, mean over the steps of a part; beside it
                         that of the layers that run once
    undamped norm        the same with each looped update divided by the loop factor, to compare with prelude and coda
    stream variance      mean over tokens of the variance over channels, after a step, or at the end of a part
    undamped variance    the same of the stream that enters the first step plus every recorded update divided by its
                         loop factor. Not a run at scale 1: each update is what the network wrote while reading its own,
                         damped stream
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import (
    NEEDS_TWO_VISITS,
    Cell,
    Level,
    Row,
    by_level,
    layer_range,
    looped_spans,
    measured_layers,
    row,
)
from probes.statistics.resampling import Resampled, interval, ratio
from probes.statistics.visit_pairs import once_visited, pair_label, pair_labels
from probes.update_sums import OF_ONE_STEP, SITES_READ, Comparison, Options, Stream, Update
from smelt_interp.config import ModelConfig
from smelt_interp.plan import label, step_scale

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Residual updates"

QUANTITIES = ("norm ratio, median", "norm ratio, RMS", "cosine")
NORM, VARIANCE = "update norm", "stream variance"
UNDAMPED_NORM, UNDAMPED_VARIANCE = "undamped norm", "undamped variance"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesResult:
    """Updates of one network on one data set."""

    table: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    """Axis P."""
    value: Mapping[str, NDArray[np.float64]]
    """For each of QUANTITIES (P,)."""
    shuffled: Mapping[str, NDArray[np.float64]]
    step_labels: tuple[str, ...]
    """One a measured step (axis S), in order of execution."""
    norm_US: NDArray[np.float64]
    """Root mean square norm of each update of OF_ONE_STEP (axis U) as added."""
    scale_S: NDArray[np.float64]
    """The loop factor inside each update."""
    variance_S: NDArray[np.float64]
    """Of the stream after each step."""
    undamped_variance_S: NDArray[np.float64]
    """NaN where a step before it was not recorded."""
    entering_variance: float
    """Of the stream that enters the first measured step."""

    def rows(self) -> list[Row]:
        """Headline rows, then one a comparison and one a step."""
        return [dict(entry) for entry in self.table]


def needs(config: ModelConfig) -> tuple[str, ...]:
    """What both sublayers add, and the stream they add it to."""
    return SITES_READ


def measure(batches: Iterable[Batch], options: Options) -> UpdatesResult:
    """Compare what the visits add, and follow the stream; one pass, sums with their resamples."""
    sums = Resampled(options.resample_seed)
    stream: Stream | None = None
    for batch in batches:
        stream = stream or Stream(batch, options)
        sums.add(batch.sample_ids, stream.sums(batch))
    sums.require_samples()
    assert stream is not None  # require_samples() raises without batches
    return _Reading(stream, sums).result()


# Reading the sums


class Place(NamedTuple):
    """Steps that one row is about."""

    level: Level
    end: str
    """Of the row's quantity."""
    where: dict[str, Cell]
    which: list[int]
    """Positions among the measured steps."""


class _Reading:
    """From sums to rows and arrays; R is the axis of the value and its resamples."""

    def __init__(self, stream: Stream, sums: Resampled) -> None:
        self.stream, self.sums = stream, sums
        self.config, self.plan, self.steps = stream.config, stream.plan, stream.steps
        self.n = sums.count("samples")
        self.table: list[Row] = []
        self.value: dict[str, NDArray[np.float64]] = {}
        self.shuffled: dict[str, NDArray[np.float64]] = {}
        self.scale_S = np.array([step_scale(self.config, self.plan[step]) for step in self.steps])
        self.norm_RSU = np.sqrt(ratio(sums["square"], sums["tokens"][:, None, None]))
        tokens_R1 = sums["tokens"][:, None]
        self.variance_RS, self.undamped_RS = (ratio(sums[name], tokens_R1) for name in ("variance", "undamped"))
        if not stream.whole:
            self.undamped_RS = np.full_like(self.undamped_RS, np.nan)

    def result(self) -> UpdatesResult:
        if self.stream.comparisons:
            self._compare()
        self._comparison_rows()
        self._norm_rows()
        self._variance_rows()
        return UpdatesResult(
            table=tuple(by_level(self.table)),
            comparisons=tuple(self.stream.comparisons),
            value={name: x_RP[0] for name, x_RP in self.value.items()},
            shuffled=self.shuffled,
            step_labels=tuple(label(self.plan[step]) for step in self.steps),
            norm_US=self.norm_RSU[0].T,
            scale_S=self.scale_S,
            variance_S=self.variance_RS[0],
            undamped_variance_S=self.undamped_RS[0],
            entering_variance=float(ratio(self.sums["entering"], self.sums["tokens"])[0]),
        )

    def _compare(self) -> None:
        sums, stream = self.sums, self.stream
        rms_RP = np.sqrt(ratio(sums["square_b"], sums["square_a"]))
        self.value = {
            "norm ratio, median": stream.ratios.median(sums["ratio"]),
            "norm ratio, RMS": rms_RP,
            "cosine": ratio(sums["cosine"], sums["count"]),
        }
        self.shuffled = {
            "norm ratio, median": stream.shuffled_ratios.median(stream.shuffled_count_PJ),
            "norm ratio, RMS": np.full(len(stream.comparisons), np.nan),
            "cosine": ratio(sums["shuffled_cosine"][0], sums["count"][0]),
        }

    def _comparison_rows(self) -> None:
        compared, options = self.stream.comparisons, self.stream.options
        for update in options.updates:
            once = [i for i, c in enumerate(compared) if c.update == update and c.visits is None]
            asked = pair_labels(options.visits)
            for quantity in QUANTITIES:
                unlooped = float(self.value[quantity][0, once].mean()) if once else None
                of_visits = [i for i, c in enumerate(compared) if c.update == update and c.visits is not None]
                for name in asked:
                    which = [i for i in of_visits if pair_label(compared[i].visits or (0, 0)) == name]
                    where = self._where(name, update, which)
                    if which:
                        self._row("headline", quantity, which, where, unlooped)
                    else:
                        note = NEEDS_TWO_VISITS if self.config.num_visits == 1 else "needs every looped layer recorded"
                        self.table.append(row("headline", quantity, None, where=where, note=note))
                if once:
                    # Beside a comparison of visits this is its null; on a Baseline it is what there is to compare.
                    level: Level = "layer" if of_visits else "headline"
                    where = {"layers": "unlooped", "visit": 1, "update": update}
                    self._row(level, f"{quantity}, next layer", once, where, None)
                for index in (*(of_visits if update != "visit" else ()), *once):
                    visits = compared[index].visits
                    visit: Cell = pair_label(visits) if visits else 1
                    where = {"layers": compared[index].layers, "visit": visit, "update": update}
                    title = quantity if visits else f"{quantity}, next layer"
                    self._row("layer", title, [index], where, unlooped if visits else None)

    def _where(self, visits: str, update: Update, which: Sequence[int]) -> dict[str, Cell]:
        steps = [step for i in which for step in self.stream.comparisons[i].steps[0]] or self.steps
        return {"layers": measured_layers(self.config, self.plan, steps), "visit": visits, "update": update}

    def _row(
        self, level: Level, title: str, which: list[int], where: Mapping[str, Cell], unlooped: float | None
    ) -> None:
        quantity = next(name for name in QUANTITIES if title.startswith(name))
        nulls = {"shuffled": float(self.shuffled[quantity][which].mean()), "unlooped": unlooped}
        measured = interval(self.value[quantity][:, which].mean(1), self.n)
        self.table.append(row(level, title, measured, where=where, nulls=nulls))

    # Along the steps

    def _parts(self) -> list[tuple[str, str, int, list[int]]]:
        """Part of the network, its layers and visit as a row names them, and its positions among the steps."""
        first, last = self.config.loop_start, self.config.loop_stop
        found: list[tuple[str, str, int, list[int]]] = []
        outside = [s for s in self.steps if first < last and not first <= self.plan[s].layer < last]
        for name, members in (
            ("prelude", [s for s in outside if self.plan[s].layer < first]),
            ("coda", [s for s in outside if self.plan[s].layer >= last]),
        ):
            if members:
                layers = f"{name} {layer_range([self.plan[s].layer for s in members])}"
                found.append((name, layers, 1, [self.steps.index(s) for s in members]))
        for span in looped_spans(self.config, self.plan, self.steps):
            found.append(("loop", span.layers, span.visit + 1, [self.steps.index(s) for s in span.steps]))
        return sorted(found, key=lambda part: part[3][0])

    def _norm_rows(self) -> None:
        """As added and undamped: the layer's update by part of the network, all by step."""
        alone = once_visited(self.plan)
        once = [index for index, step in enumerate(self.steps) if step in alone]
        for kind, update in enumerate(OF_ONE_STEP):
            for title, norm_RS in (
                (NORM, self.norm_RSU[..., kind]),
                (UNDAMPED_NORM, self.norm_RSU[..., kind] / self.scale_S),
            ):
                places = self._by_step()
                if update == "layer":
                    places = [*self._by_part(), *places]
                for level, end, where, which in places:
                    scale = self.scale_S[which[0]]
                    note = f"loop factor {scale:.4g} does not cancel here"
                    self.table.append(
                        row(
                            level,
                            title + end,
                            interval(norm_RS[:, which].mean(1), self.n),
                            where={**where, "update": update},
                            nulls={"unlooped": float(norm_RS[0, once].mean()) if once else None},
                            note=note if title == NORM and scale != 1 else "",
                        )
                    )

    def _variance_rows(self) -> None:
        """Of the stream at the end of each part and after each step."""
        entering = interval(ratio(self.sums["entering"], self.sums["tokens"]), self.n)
        where: dict[str, Cell] = {"layers": f"before {self.plan[self.steps[0]].layer + 1}", "visit": 1}
        self.table.append(row("headline", f"{VARIANCE}, entering", entering, where=where))
        note = "not a run at scale 1"
        if not self.stream.whole:
            note = "needs every step from the first recorded"
        for title, variance_RS, remark in (
            (VARIANCE, self.variance_RS, ""),
            (UNDAMPED_VARIANCE, self.undamped_RS, note),
        ):
            for level, end, place, which in (*self._by_part(), *self._by_step()):
                measured = interval(variance_RS[:, which[-1]], self.n)
                self.table.append(row(level, title + end, measured, where=place, note=remark))

    def _by_part(self) -> list[Place]:
        return [
            Place("headline", f", {part}", {"layers": layers, "visit": visit}, which)
            for part, layers, visit, which in self._parts()
        ]

    def _by_step(self) -> list[Place]:
        return [
            Place("layer", "", {"layers": str(self.plan[step].layer + 1), "visit": self.plan[step].visit + 1}, [index])
            for index, step in enumerate(self.steps)
        ]


def figure(result: UpdatesResult) -> "Figure":
    """Norm ratio and cosine by layer with the null dotted, then norms and variance along the steps."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    titles = ("norm ratio, median", "cosine", "update norm, as added", "stream variance")
    colours = {"attention": "#4059ad", "experts": "#f4b942", "layer": "#2a9d8f"}
    drawn: Figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.2)
    groups = dict.fromkeys((c.update, c.visits) for c in result.comparisons if c.visits and c.update != "visit")
    pairs_of_visits = list(dict.fromkeys(visits for _, visits in groups))
    for kind, visits in groups:
        which = [i for i, c in enumerate(result.comparisons) if (c.update, c.visits) == (kind, visits)]
        layers = [int(result.comparisons[i].layers) for i in which]
        for column, quantity in enumerate(("norm ratio, median", "cosine"), 1):
            for values, dash, end in ((result.value, "solid", ""), (result.shuffled, "dot", ", shuffled")):
                name = f"{kind}, {pair_label(visits)}{end}"
                trace = Scatter(
                    x=layers, y=values[quantity][which], name=name, legendgroup=name, showlegend=column == 1,
                    line={"dash": dash, "color": colours[kind]}, marker={"symbol": pairs_of_visits.index(visits)},
                    mode="lines+markers",
                )  # fmt: skip
                drawn.add_trace(trace, row=1, col=column)
    if not groups:
        # Relative to the paper: a plot without traces has no axes to be placed by.
        drawn.add_annotation(text=NEEDS_TWO_VISITS, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.8)
    steps = list(result.step_labels)
    for norm_S, update in zip(result.norm_US, OF_ONE_STEP, strict=True):
        trace = Scatter(x=steps, y=norm_S, name=f"norm, {update}", line={"color": colours[update]})
        drawn.add_trace(trace, row=2, col=1)
    for variance_S, name, dash in (
        (result.variance_S, "as run", "solid"),
        (result.undamped_variance_S, "undamped", "dash"),
    ):
        line = {"color": "#444444", "dash": dash}
        drawn.add_trace(Scatter(x=steps, y=variance_S, name=f"variance, {name}", line=line), row=2, col=2)
    drawn.update_yaxes(type="log", row=2, col=2)
    drawn.update_xaxes(title_text="layer", dtick=1, row=1)
    drawn.update_layout(title=TITLE, height=900)
    return drawn


def main() -> None:
    """The command line of this probe."""
    from probes.running import command

    command.main("residual_updates")


if __name__ == "__main__":
    main()
