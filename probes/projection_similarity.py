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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import (
    NEEDS_TWO_VISITS,
    Level,
    Row,
    by_level,
    check_number,
    is_token,
    measured_layers,
    recorded_steps,
    row,
)
from probes.statistics.resampling import NUM_RESAMPLES, Resampled, interval, record_sums
from probes.statistics.visit_pairs import VisitPair, check_visits, pair_label, pair_labels, visit_pairs
from smelt_interp import similarity
from smelt_interp.config import ModelConfig

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Projections and patterns across visits"

PROJECTIONS = {"Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v"}
PATTERN = "attn.hook_pattern"
QUANTITIES = (
    *(f"{name} cosine, {kind}" for name in PROJECTIONS for kind in ("raw", "centred")),
    "pattern distance",
    "pattern cosine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which visits are compared, and over what."""

    visits: tuple[int, ...] = (1, 2)
    """Visits to compare, counted from 1: every pair of them."""
    heads: Literal["separate", "concatenated"] = "separate"
    """Cosine of Q, K, V for each head, or of the whole vector with the heads concatenated."""
    t_min: int = 1
    """Patterns: least distance of a query from its segment's start. 0 counts queries that only see themselves."""
    resample_seed: int = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        check_visits(self.visits)
        check_number("t_min", self.t_min, 0)
        check_number("resample_seed", self.resample_seed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityResult:
    """Cosines and distances between visits, of one network on one data set."""

    table: tuple[Row, ...]
    pairs: tuple[VisitPair, ...]
    """The compared executions (axis P); empty on a Baseline."""
    value: Mapping[str, NDArray[np.float64]]
    """For each of QUANTITIES (P, heads): query heads, key/value heads, or one when concatenated."""
    shuffled: Mapping[str, NDArray[np.float64]]
    """The null of each value."""
    heads: Mapping[str, tuple[int, ...]]
    """For each of QUANTITIES the numbers of the heads, from 0; empty when concatenated."""

    def rows(self) -> list[Row]:
        """Headline rows, then one a pair of visits and layer, then one a head."""
        return [dict(entry) for entry in self.table]


def needs(config: ModelConfig) -> tuple[str, ...]:
    """The three projections and the patterns."""
    return (*PROJECTIONS.values(), PATTERN)


def measure(batches: Iterable[Batch], options: Options) -> SimilarityResult:
    """Compare the visits of every revisited layer; one pass, sums with their resamples."""
    sums = Resampled(options.resample_seed)
    first: Batch | None = None
    pairs: list[VisitPair] = []
    patterns = PatternStream(options.t_min)
    for batch in batches:
        if first is None:
            first = batch
            recorded = recorded_steps(batch, needs(batch.config))
            pairs = visit_pairs(batch.config, batch.plan, recorded, options.visits)
        added: dict[str, NDArray[np.generic]] = {"samples": np.asarray(is_token(batch.samples).any(-1))}
        if pairs:
            for name, suffix in PROJECTIONS.items():
                added |= record_sums(name, [_cosines(batch, suffix, pair, options) for pair in pairs])
            added |= patterns.sums(batch, pairs)
        sums.add(batch.sample_ids, added)
    sums.require_samples()
    assert first is not None  # require_samples() raises without batches
    return _result(first, options, pairs, sums)


def _cosines(batch: Batch, suffix: str, pair: VisitPair, options: Options) -> similarity.CosineSums:
    token_BT = is_token(batch.samples)
    early, late = (_tokens_only(batch.sites[step, suffix], token_BT) for step in pair.steps)
    if options.heads == "concatenated":
        early, late = (x.reshape(*x.shape[:2], 1, -1) for x in (early, late))
    return similarity.cosine_sums(early, late, token_BT)


def _tokens_only(x: NDArray[np.generic], token_BT: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The array with 0 on padding, whatever stood there."""
    return np.where(token_BT[..., None, None], np.asarray(x, np.float64), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRows:
    """The attention of one sample on both visits of every pair."""

    early_PTQS: NDArray[np.float64]
    late_PTQS: NDArray[np.float64]
    counted_T: NDArray[np.bool_]
    """Queries that are compared."""
    start_T: NDArray[np.integer]

    def against(self, other: "PatternRows") -> dict[str, NDArray[np.float64]]:
        """This sample's early rows against another's late rows, over the queries that both count at the same place.

        Sums (P, Q) named as in `similarity.PatternSums`; with itself, the comparison of visits.
        """
        length = min(len(self.counted_T), len(other.counted_T))  # rows of another part of the data may be shorter
        which_T = self.counted_T[:length] & other.counted_T[:length] & (self.start_T[:length] == other.start_T[:length])
        early_PUQS = self.early_PTQS[:, :length, :, :length][:, which_T]
        late_PUQS = other.late_PTQS[:, :length, :, :length][:, which_T]
        sums = similarity.pattern_sums(early_PUQS, late_PUQS, np.ones(early_PUQS.shape[:2], np.bool_))
        return {"count": sums.count, "distance": sums.distance, "cosine": sums.cosine}


class PatternStream:
    """Attention rows of two visits, sample by sample; the sample before is kept for the null."""

    def __init__(self, t_min: int) -> None:
        self._t_min = t_min
        self._before: PatternRows | None = None

    def sums(self, batch: Batch, pairs: list[VisitPair]) -> dict[str, NDArray[np.generic]]:
        """Sums of each sample (B, P, Q) as `pattern.FIELD` and, against the sample before, `other.FIELD`."""
        found: list[dict[str, NDArray[np.float64]]] = []
        for now in self._rows(batch, pairs):
            same = now.against(now)
            # The first sample has none before it.
            other = now.against(self._before) if self._before else {name: np.zeros_like(x) for name, x in same.items()}
            found.append(
                {f"pattern.{name}": x for name, x in same.items()} | {f"other.{name}": x for name, x in other.items()}
            )
            self._before = now
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def _rows(self, batch: Batch, pairs: list[VisitPair]) -> Iterator[PatternRows]:
        start_BT = batch.samples.segment_start_NT
        counted_BT = is_token(batch.samples) & (np.arange(start_BT.shape[1]) - start_BT >= self._t_min)
        for b, counted_T in enumerate(counted_BT):
            early_PTQS, late_PTQS = (
                np.stack(
                    [np.asarray(batch.sites[pair.steps[visit], PATTERN][b], np.float64) for pair in pairs]
                ).swapaxes(1, 2)
                for visit in (0, 1)
            )
            yield PatternRows(early_PTQS=early_PTQS, late_PTQS=late_PTQS, counted_T=counted_T, start_T=start_BT[b])


# Reading the sums


def _numbers(sums: Resampled) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
    """Each of QUANTITIES and its null, with resamples first: (R, P, heads)."""
    value: dict[str, NDArray[np.float64]] = {}
    null: dict[str, NDArray[np.float64]] = {}
    for name in PROJECTIONS:
        record = sums.record(similarity.CosineSums, name)
        value[f"{name} cosine, raw"] = similarity.raw_cosine(record)
        null[f"{name} cosine, raw"] = similarity.shuffled_raw_cosine(record)
        value[f"{name} cosine, centred"] = similarity.centred_cosine(record)
        null[f"{name} cosine, centred"] = similarity.shuffled_centred_cosine(record)
    for target, prefix in ((value, "pattern"), (null, "other")):
        record_of_rows = sums.record(similarity.PatternSums, prefix)
        target["pattern distance"] = similarity.pattern_distance(record_of_rows)
        target["pattern cosine"] = similarity.pattern_cosine(record_of_rows)
    return value, null


def _result(first: Batch, options: Options, pairs: list[VisitPair], sums: Resampled) -> SimilarityResult:
    config = first.config
    if not pairs:
        layers = measured_layers(config, first.plan, recorded_steps(first, needs(config)))
        table = [
            row("headline", quantity, None, where={"layers": layers, "visit": label, "head": None},
                note=NEEDS_TWO_VISITS)
            for label in pair_labels(options.visits)
            for quantity in QUANTITIES
        ]  # fmt: skip
        return SimilarityResult(table=tuple(table), pairs=(), value={}, shuffled={}, heads={})
    value, null = _numbers(sums)
    n = sums.count("samples")
    site_of = {quantity: PROJECTIONS.get(quantity[0], PATTERN) for quantity in QUANTITIES}
    heads = {
        quantity: () if options.heads == "concatenated" and site != PATTERN else first.heads[site]
        for quantity, site in site_of.items()
    }
    table = []

    def add(
        level: Level, quantity: str, pair: tuple[int, int], layers: str, which: list[int], head: int | None
    ) -> None:
        chosen = slice(None) if head is None else heads[quantity].index(head)
        value_R, null_R = (
            x[quantity][:, which][..., chosen].reshape(1 + NUM_RESAMPLES, -1).mean(-1) for x in (value, null)
        )
        where = {"layers": layers, "visit": pair_label(pair), "head": None if head is None else head + 1}
        table.append(row(level, quantity, interval(value_R, n), where=where, nulls={"shuffled": float(null_R[0])}))

    for visits in dict.fromkeys(pair.visits for pair in pairs):
        which = [index for index, pair in enumerate(pairs) if pair.visits == visits]
        layers = measured_layers(config, first.plan, [pairs[index].steps[0] for index in which])
        for quantity in QUANTITIES:
            add("headline", quantity, visits, layers, which, None)
    for quantity in QUANTITIES:
        for index, pair in enumerate(pairs):
            add("layer", quantity, pair.visits, str(pair.layer + 1), [index], None)
            for head in heads[quantity]:
                add("head", quantity, pair.visits, str(pair.layer + 1), [index], head)
    return SimilarityResult(
        table=tuple(by_level(table)),
        pairs=tuple(pairs),
        value={quantity: x[0] for quantity, x in value.items()},
        shuffled={quantity: x[0] for quantity, x in null.items()},
        heads=heads,
    )


def figure(result: SimilarityResult) -> "Figure":
    """Each quantity by layer: a dot a head, a line through their mean, the null dotted; a marker a pair of visits."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    panels = ("cosine, raw", "cosine, centred", "pattern distance", "pattern cosine")
    colours = {"Q": "#4059ad", "K": "#f4b942", "V": "#2a9d8f", "pattern": "#8d5a97"}
    drawn: Figure = make_subplots(rows=2, cols=2, subplot_titles=panels, vertical_spacing=0.14, shared_xaxes=True)
    pairs_of_visits = list(dict.fromkeys(pair.visits for pair in result.pairs))
    for quantity, value_PH in result.value.items():
        panel = next(index for index, title in enumerate(panels) if quantity.endswith(title))
        place = {"row": panel // 2 + 1, "col": panel % 2 + 1}
        subject = quantity.split()[0]
        for symbol, visits in enumerate(pairs_of_visits):
            which = [index for index, pair in enumerate(result.pairs) if pair.visits == visits]
            layers = [result.pairs[index].layer + 1 for index in which]
            style = {"name": f"{subject}, {pair_label(visits)}", "legendgroup": f"{subject} {visits}"}
            colour = colours[subject]
            drawn.add_trace(
                Scatter(x=layers, y=value_PH[which].mean(1), mode="lines", line={"color": colour},
                        showlegend=panel in (0, 2), **style),
                **place,
            )  # fmt: skip
            drawn.add_trace(
                Scatter(x=layers, y=result.shuffled[quantity][which].mean(1), mode="lines", showlegend=False,
                        line={"color": colour, "dash": "dot"}, **style),
                **place,
            )  # fmt: skip
            drawn.add_trace(
                Scatter(x=np.repeat(layers, value_PH.shape[1]), y=value_PH[which].ravel(), mode="markers",
                        marker={"color": colour, "opacity": 0.4, "symbol": symbol}, showlegend=False, **style),
                **place,
            )  # fmt: skip
    if not result.pairs:
        drawn.add_annotation(text=NEEDS_TWO_VISITS, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    drawn.update_xaxes(title_text="layer", dtick=1, row=2)
    drawn.update_layout(title=TITLE, height=720)
    return drawn


def main() -> None:
    """The command line of this probe."""
    from probes.running import command

    command.main("projection_similarity")


if __name__ == "__main__":
    main()
