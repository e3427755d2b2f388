"""Does a token go to the same experts on its second visit, and how are tokens spread over the experts on each visit?

Overlap, for two visits of one layer and one token, k experts chosen of E on each:

    experts shared       o, the size of the intersection of the two sets
    Jaccard              o / (2k - o)
    weight shared        sum over experts of the smaller of its two weights, as used (1 at most where they sum to 1)

Nulls, since popularity alone makes sets overlap. `uniform`: two uniform sets of k, k^2 / E for o (hypergeometric).
`popularity`: sum over e of p1(e) p2(e), p_v(e) the share of tokens whose top k holds e on that visit. `shuffled`: the
later visit's choices shuffled among the tokens of the sample; for o its exact mean over all shuffles, and z, the
standard deviations of the shuffle by which o exceeds it (exact variance; layers shuffled independently).

Routing on each visit, beside what even routing would give: the definitions are those of `probes.expert_load`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes import expert_load
from probes.expert_load import INDICES, LOGITS, WEIGHTS, Classes, Coactivation, LoadStream
from probes.running.contract import (
    MOST_SHUFFLES,
    NEEDS_TWO_VISITS,
    Cell,
    Estimate,
    Level,
    Row,
    Span,
    by_level,
    check_number,
    is_token,
    looped_spans,
    measured_layers,
    recorded_steps,
    row,
)
from probes.statistics.resampling import (
    Resampled,
    interval,
    ratio,
    recentred_interval,
    record_sums,
    shuffled_positions,
)
from probes.statistics.visit_pairs import VisitPair, check_visits, pair_label, pair_labels, visit_pairs
from smelt_interp import similarity
from smelt_interp.config import ModelConfig
from smelt_interp.plan import label

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Experts across visits"

SHARED, JACCARD, WEIGHT, Z = "experts shared", "Jaccard", "weight shared", "experts shared, z"
OVERLAPS = (SHARED, JACCARD, WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which visits are compared."""

    visits: tuple[int, ...] = (1, 2)
    """Visits to compare, counted from 1: every pair of them."""
    shuffles: int = 4
    """Shuffles of tokens behind the nulls of Jaccard, weights and specialisation; o's null needs none."""
    resample_seed: int = 0
    """Seed of the bootstrap and of shuffles."""

    def __post_init__(self) -> None:
        check_visits(self.visits)
        check_number("shuffles", self.shuffles, 1, MOST_SHUFFLES)
        check_number("resample_seed", self.resample_seed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult:
    """Overlap and routing of one network on one data set."""

    table: tuple[Row, ...]
    pairs: tuple[VisitPair, ...]
    """The compared executions (axis P); empty on a Baseline."""
    overlap: Mapping[str, NDArray[np.float64]]
    """For each of OVERLAPS and Z (P,)."""
    shuffled: Mapping[str, NDArray[np.float64]]
    popularity_P: NDArray[np.float64]
    """The popularity null of the experts shared."""
    step_labels: tuple[str, ...]
    """One a measured step (axis S), in order of execution."""
    load_SE: NDArray[np.float64]
    """Share of tokens whose top k holds each expert."""
    coactivation: Coactivation
    class_names: tuple[str, ...]
    """Roles and domains (axis Z)."""
    class_load_SZE: NDArray[np.float64]
    """`load_SE` among the tokens of each class."""

    def rows(self) -> list[Row]:
        """Headline rows, then one a step or pair of steps, then one a step and class of token."""
        return [dict(entry) for entry in self.table]


def needs(config: ModelConfig) -> tuple[str, ...]:
    """The choice, its weights, and the scores it was made from."""
    return (INDICES, WEIGHTS, LOGITS)


def uniform_jaccard(top_k: int, num_experts: int) -> float:
    """Expectation of o / (2k - o) for two uniform sets of k among E."""
    ways = [comb(top_k, o) * comb(num_experts - top_k, top_k - o) for o in range(top_k + 1)]
    return sum(o / (2 * top_k - o) * way for o, way in enumerate(ways)) / comb(num_experts, top_k)


def measure(batches: Iterable[Batch], options: Options) -> OverlapResult:
    """Overlap between visits and routing on each step; one pass, sums with their resamples."""
    sums = Resampled(options.resample_seed)
    first: Batch | None = None
    pairs: list[VisitPair] = []
    for batch in batches:
        if first is None:
            first = batch
            recorded = recorded_steps(batch, needs(batch.config))
            pairs = visit_pairs(batch.config, batch.plan, recorded, options.visits)
            loads = LoadStream(batch.config, recorded, options.resample_seed, options.shuffles)
        added = loads.sums(batch)
        added["samples"] = np.asarray(is_token(batch.samples).any(-1))
        if pairs:
            added |= _overlaps(batch, pairs, options)
        sums.add(batch.sample_ids, added)
    sums.require_samples()
    assert first is not None  # require_samples() raises without batches
    return _Reading(first, options, pairs, sums, loads).result()


def _overlaps(batch: Batch, pairs: Sequence[VisitPair], options: Options) -> dict[str, NDArray[np.generic]]:
    token_BT = is_token(batch.samples)
    orders_XBT = shuffled_positions(token_BT, batch.sample_ids, options.resample_seed, options.shuffles)
    records, shuffled_jaccard, shuffled_weight = [], [], []
    for pair in pairs:
        early, late = ((batch.sites[step, INDICES], batch.sites[step, WEIGHTS]) for step in pair.steps)
        experts_a, experts_b = (np.asarray(visit[0], np.int64) for visit in (early, late))
        weights_a, weights_b = (np.where(token_BT[..., None], visit[1], 0.0) for visit in (early, late))
        records.append(
            similarity.overlap_sums(
                experts_a, weights_a, experts_b, weights_b, token_BT, num_experts=batch.config.num_experts
            )
        )
        jaccard_B, weight_B = np.zeros((2, len(token_BT)))
        for order_BT in orders_XBT:
            other_b, other_weights = (np.take_along_axis(x, order_BT[..., None], 1) for x in (experts_b, weights_b))
            overlap_BT = similarity.expert_overlap(experts_a, other_b)
            jaccard_B += (overlap_BT / (2 * batch.config.top_k - overlap_BT) * token_BT).sum(-1)
            weight_B += (similarity.weighted_overlap(experts_a, weights_a, other_b, other_weights) * token_BT).sum(-1)
        shuffled_jaccard.append(jaccard_B / options.shuffles)
        shuffled_weight.append(weight_B / options.shuffles)
    return {
        **record_sums("overlap", records),
        "shuffled_jaccard": np.stack(shuffled_jaccard, 1),
        "shuffled_weight": np.stack(shuffled_weight, 1),
    }


# Reading the sums


class _Reading:
    """From sums to rows and arrays; W is the axis of the value and its resamples."""

    def __init__(
        self, first: Batch, options: Options, pairs: list[VisitPair], sums: Resampled, loads: LoadStream
    ) -> None:
        self.config, self.plan, self.options = first.config, first.plan, options
        self.pairs, self.sums, self.loads = pairs, sums, loads
        self.n = sums.count("samples")
        self.spans = looped_spans(self.config, self.plan, loads.steps)
        self.coactivation = loads.coactivation()
        self.roles, self.domains = expert_load.roles_of(sums), expert_load.domains_of(sums)
        self.table: list[Row] = []
        self.overlap: dict[str, NDArray[np.float64]] = {}
        self.shuffled: dict[str, NDArray[np.float64]] = {}
        self.popularity_P = np.zeros(0)

    def result(self) -> OverlapResult:
        if self.pairs:
            self._overlap_rows()
        else:
            layers = measured_layers(self.config, self.plan, self.loads.steps)
            for pair in pair_labels(self.options.visits):
                for quantity in (*OVERLAPS, Z):
                    where: dict[str, Cell] = {"layers": layers, "visit": pair}
                    self.table.append(row("headline", quantity, None, where=where, note=NEEDS_TWO_VISITS))
        self._routing_rows()
        self._class_rows()
        classes = (self.roles, self.domains)
        return OverlapResult(
            table=tuple(by_level(self.table)),
            pairs=tuple(self.pairs),
            overlap={name: x_WP[0] for name, x_WP in self.overlap.items()},
            shuffled={name: x_WP[0] for name, x_WP in self.shuffled.items()},
            popularity_P=self.popularity_P,
            step_labels=tuple(label(self.plan[step]) for step in self.loads.steps),
            load_SE=self._load_WSE()[0],
            coactivation=self.coactivation,
            class_names=tuple(name for group in classes for name in group.names),
            class_load_SZE=np.concatenate([group.share_WSZE()[0] for group in classes], 1),
        )

    # Overlap

    def _overlap_rows(self) -> None:
        top_k, num_experts = self.config.top_k, self.config.num_experts
        record = self.sums.record(similarity.OverlapSums, "overlap")
        self.overlap = {
            SHARED: similarity.mean_overlap(record),
            JACCARD: similarity.mean_jaccard(record),
            WEIGHT: similarity.mean_weighted_overlap(record),
            Z: similarity.shuffled_overlap_z(record),
        }
        self.shuffled = {
            SHARED: similarity.shuffled_overlap(record),
            JACCARD: ratio(self.sums["shuffled_jaccard"], record.count),
            WEIGHT: ratio(self.sums["shuffled_weight"], record.count),
        }
        self.popularity_P = similarity.popularity_overlap(record)[0]
        uniform = {SHARED: similarity.uniform_overlap(top_k, num_experts), JACCARD: uniform_jaccard(top_k, num_experts)}

        def add(level: Level, visits: tuple[int, int], layers: str, which: list[int]) -> None:
            where: dict[str, Cell] = {"layers": layers, "visit": pair_label(visits)}
            for quantity in OVERLAPS:
                nulls = {
                    "uniform": uniform.get(quantity),
                    "popularity": float(self.popularity_P[which].mean()) if quantity == SHARED else None,
                    "shuffled": float(self.shuffled[quantity][0, which].mean()),
                }
                note = f"of {top_k}" if quantity == SHARED else ""
                measured = interval(self.overlap[quantity][:, which].mean(1), self.n)
                self.table.append(row(level, quantity, measured, where=where, nulls=nulls, note=note))
            z = interval(similarity.shuffled_overlap_z(_over_layers(record, which)), self.n)
            self.table.append(row(level, Z, z, where=where, nulls={"shuffled": 0.0}))

        for visits in dict.fromkeys(pair.visits for pair in self.pairs):
            which = [index for index, pair in enumerate(self.pairs) if pair.visits == visits]
            steps = [self.pairs[index].steps[0] for index in which]
            add("headline", visits, measured_layers(self.config, self.plan, steps), which)
        for index, pair in enumerate(self.pairs):
            add("layer", pair.visits, str(pair.layer + 1), [index])

    # Routing

    def _load_WSE(self) -> NDArray[np.float64]:
        return ratio(self.sums["load"], self.sums["tokens"][:, None, None])

    def _routing_rows(self) -> None:
        top_k, num_experts = self.config.top_k, self.config.num_experts
        tokens = float(self.sums["tokens"][0])
        load_WSE = self._load_WSE()
        even = float(np.log(num_experts))
        statistics: list[tuple[str, NDArray[np.float64], dict[str, float | None]]] = [
            ("load entropy", expert_load.entropy(load_WSE), {"uniform": even}),
            (
                "router entropy",
                ratio(self.sums["router_entropy"], self.sums["tokens"][:, None]),
                {"uniform": even},
            ),
            ("MaxVio", load_WSE.max(-1) * num_experts / top_k - 1, {"uniform": 0.0}),
            (
                "dead experts",
                np.where(np.isnan(load_WSE), np.nan, load_WSE == 0).sum(-1),  # a resample may hold no sample
                {"uniform": num_experts * (1 - top_k / num_experts) ** tokens},
            ),
        ]
        for quantity, value_WS, nulls in statistics:
            self._step_rows(quantity, value_WS, nulls)
        self._coactivation_rows(load_WSE[0])
        shuffled_XSRE = self.loads.shuffled_role_XSRE
        present = [index for index, count in enumerate(self.sums["role_tokens"][0]) if count]
        shuffled_S = Classes(
            names=self.roles.names,
            load_WSZE=shuffled_XSRE[:, :, present],
            tokens_WZ=np.tile(self.roles.tokens_WZ[0], (len(shuffled_XSRE), 1)),
        ).specialisation_WS().mean(0)  # fmt: skip
        for kind, classes, null_S in (("role", self.roles, shuffled_S), ("domain", self.domains, None)):
            if len(classes.names) > 1:
                self._step_rows(f"specialisation by {kind}", classes.specialisation_WS(), {"uniform": 0.0}, null_S)
            else:
                for span in self.spans:
                    where: dict[str, Cell] = {"layers": span.layers, "visit": span.visit + 1}
                    note = f"needs two {kind}s; got {', '.join(classes.names) or 'none'}"
                    self.table.append(row("headline", f"specialisation by {kind}", None, where=where, note=note))

    def _step_rows(
        self,
        quantity: str,
        value_WS: NDArray[np.float64],
        nulls: Mapping[str, float | None],
        shuffled_S: NDArray[np.float64] | None = None,
    ) -> None:
        """A headline row a visit of the looped layers, and a row a step."""
        for level, where, which in self._places():
            named = dict(nulls)
            if shuffled_S is not None:
                named["shuffled"] = float(shuffled_S[which].mean())
            measured = recentred_interval(value_WS[:, which].mean(1), self.n)
            self.table.append(row(level, quantity, measured, where=where, nulls=named))

    def _places(self) -> list[tuple[Level, dict[str, Cell], list[int]]]:
        steps = self.loads.steps

        def of_span(span: Span) -> tuple[Level, dict[str, Cell], list[int]]:
            return "headline", {"layers": span.layers, "visit": span.visit + 1}, [steps.index(s) for s in span.steps]

        def of_step(index: int) -> tuple[Level, dict[str, Cell], list[int]]:
            step = self.plan[steps[index]]
            return "layer", {"layers": str(step.layer + 1), "visit": step.visit + 1}, [index]

        return [of_span(span) for span in self.spans] + [of_step(index) for index in range(len(steps))]

    def _coactivation_rows(self, load_SE: NDArray[np.float64]) -> None:
        """The pair of experts that most tokens chose together, on each step; the headline is the mean over layers."""
        top_k, num_experts = self.config.top_k, self.config.num_experts
        if top_k < 2:
            return
        share_SEE = self.coactivation.share_SEE * (1 - np.eye(num_experts))
        best_S = share_SEE.reshape(len(share_SEE), -1).argmax(-1)
        pairs = [divmod(int(best), num_experts) for best in best_S]
        value_S, half_S = (
            np.array([x_SEE[s, e, f] for s, (e, f) in enumerate(pairs)])
            for x_SEE in (share_SEE, self.coactivation.half_width_SEE)
        )
        # Independent experts, scaled so that all pairs together are the k (k - 1) that every token has.
        scale_S = top_k * (top_k - 1) / (top_k**2 - (load_SE**2).sum(-1))
        popularity_S = np.array([load_SE[s, e] * load_SE[s, f] for s, (e, f) in enumerate(pairs)]) * scale_S
        uniform = top_k * (top_k - 1) / (num_experts * (num_experts - 1))
        for level, where, which in self._places():
            value, half = float(value_S[which].mean()), float(half_S[which].mean())
            note = "interval of a linearised ratio"
            if level == "layer":
                first, second = pairs[which[0]]
                note = f"experts {first + 1} and {second + 1}; {note}"
            share = Estimate(value, max(value - half, 0.0), min(value + half, 1.0), self.n)
            entry = row(level, "most frequent pair of experts", share, where=where, note=note,
                        nulls={"uniform": uniform, "popularity": float(popularity_S[which].mean())})  # fmt: skip
            self.table.append(entry)

    def _class_rows(self) -> None:
        """The favourite expert of each role and domain at each step."""
        uniform = self.config.top_k / self.config.num_experts
        load_SE = self._load_WSE()[0]
        for classes in (self.roles, self.domains):
            share_WSZE = classes.share_WSZE()
            for z, name in enumerate(classes.names):
                for s, step in enumerate(self.loads.steps):
                    expert = int(share_WSZE[0, s, z].argmax())
                    place: dict[str, Cell] = {
                        "layers": str(self.plan[step].layer + 1),
                        "visit": self.plan[step].visit + 1,
                        "class": name,
                    }
                    nulls = {"uniform": uniform, "popularity": float(load_SE[s, expert])}
                    measured = interval(share_WSZE[:, s, z, expert], self.n)
                    self.table.append(
                        row("head", "share of the favourite expert", measured, where=place, nulls=nulls,
                            note=f"expert {expert + 1}")
                    )  # fmt: skip


def _over_layers(record: similarity.OverlapSums, which: Sequence[int]) -> similarity.OverlapSums:
    """The sums of these pairs of visits, added up: one record for all their layers."""
    return similarity.OverlapSums(
        **{field.name: getattr(record, field.name)[:, which].sum(1) for field in fields(record)}
    )


def figure(result: OverlapResult) -> "Figure":
    """Experts shared by layer with its nulls, and the load of every expert at every step."""
    from plotly.graph_objects import Heatmap, Scatter
    from plotly.subplots import make_subplots

    drawn = make_subplots(
        rows=2, cols=1, subplot_titles=(SHARED, "load: share of tokens whose top k holds the expert"),
        vertical_spacing=0.16,
    )  # fmt: skip
    for visits in dict.fromkeys(pair.visits for pair in result.pairs):
        which = [i for i, pair in enumerate(result.pairs) if pair.visits == visits]
        layers = [result.pairs[i].layer + 1 for i in which]
        for name, y in (
            ("measured", result.overlap[SHARED][which]),
            ("popularity", result.popularity_P[which]),
            ("shuffled", result.shuffled[SHARED][which]),
        ):
            dash = "solid" if name == "measured" else "dot"
            trace = Scatter(x=layers, y=y, name=f"{name}, visits {pair_label(visits)}", line={"dash": dash})
            drawn.add_trace(trace, row=1, col=1)
    if not result.pairs:
        drawn.add_annotation(text=NEEDS_TWO_VISITS, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.8)
    experts = [f"expert {index + 1}" for index in range(result.load_SE.shape[1])]
    heat = Heatmap(z=result.load_SE.T, x=list(result.step_labels), y=experts, colorscale="Viridis",
                   colorbar={"len": 0.42, "y": 0.2})  # fmt: skip
    drawn.add_trace(heat, row=2, col=1)
    drawn.update_xaxes(title_text="layer", dtick=1, row=1, col=1)
    drawn.update_layout(title=TITLE, height=800)
    return drawn


def main() -> None:
    """The command line of this probe."""
    from probes.running import command

    command.main("expert_overlap")


if __name__ == "__main__":
    main()
