"""Does the network learn to close brackets from demonstrations in its context, and how many does it need?

Each episode asks one query after k demonstrations. Scores are read from one forward pass over the right answer:

    exact match      every bracket of the answer and the newline that ends it is the most likely next token. That is
                     exact match of greedy decoding: as long as each token is right, generating reads the same context
    teacher-forced   the same without the newline, which gives the answer's length away
    first closer     the first bracket alone
    loss             nats a token of the answer, newline included, mean over episodes of each episode's mean

Beside each score, what shortcuts without a stack reach on the same episodes (`smelt_interp.data.dyck_scores.SHORTCUTS`;
all but the constant are given the answer's length and the pairing); beside the loss, that of a uniform guess.
Queries whose own prefix already shows a pair that the answer needs are counted apart: they need no demonstration.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import (
    MOST_SAMPLES,
    Estimate,
    Level,
    Row,
    SampleSums,
    by_level,
    check_number,
    estimates,
    row,
)
from probes.running.source import DataSet
from smelt_interp.config import ModelConfig
from smelt_interp.data.dyck import DyckOptions, Pairing, Rendering, dyck_samples
from smelt_interp.data.dyck_scores import (
    SHORTCUTS,
    answer_loss,
    floors,
    pairing_of,
    queries,
    teacher_forced,
    teacher_forced_first_closer,
)
from smelt_interp.data.samples import Role, Samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Dyck in context"
SCORES = ("exact match", "teacher-forced", "first closer", "loss (nats)")
FULL, COMPACT = "full", "compact"
ASKS_NOTHING = "not defined: no row asks a query; record --data dyck"
_DYCK = DyckOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """With --ckpt: which episodes. The same queries are asked at every number of shots."""

    shots: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Numbers of demonstrations before the query."""
    episodes: int = 256
    """Episodes for each number of shots."""
    seed: int = 0
    """Seed of the episodes, and of the untrained network's weights."""
    rendering: Rendering = _DYCK.rendering
    """How a shot is written: `PREFIX:ANSWER`, or in full with an instruction line."""
    pairing: Pairing = "episode"
    """episode permutes the closers for each episode, in prefix, demonstrations and answer alike."""
    num_types: int = _DYCK.num_types
    """Bracket types, 1 to 4."""
    max_total: int = _DYCK.max_total
    """Brackets of prefix and answer together, at most; even."""

    def __post_init__(self) -> None:
        check_number("episodes", self.episodes, 1, MOST_SAMPLES)
        check_number("seed", self.seed, 0)

    def data_sets(self, context: int) -> tuple[DataSet, ...]:
        """One data set with a part for each number of shots.

        Raises UserError for shots that do not fit the context, naming the most that do, and for none or repeated ones.
        """
        if not self.shots or len(set(self.shots)) < len(self.shots):
            raise UserError(f"shots must be one or more different numbers; got {list(self.shots)}")
        parts = tuple(self._samples(shots, context) for shots in self.shots)
        return (DataSet(name="dyck", parts=parts),)

    def _samples(self, shots: int, context: int) -> Samples:
        options = DyckOptions(
            rendering=self.rendering,
            pairing=self.pairing,
            shots=(shots,),
            num_types=self.num_types,
            max_total=self.max_total,
        )
        return dyck_samples(options, self.episodes, seed=self.seed, length=context, tokenizer=BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Nothing to choose: the episodes decide."""


class Point(NamedTuple):
    """All scores of one group of episodes."""

    rendering: str
    pairing: str
    shots: int
    queries: str
    """`all`, `pair shown`, `pair hidden`, `answer length 2`, `depth 3`."""
    level: Level
    scores: dict[str, Estimate]
    nulls: dict[str, dict[str, float]]
    """For each score, what each shortcut or a uniform guess reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DyckResult:
    """Scores of one network against shots."""

    points: tuple[Point, ...]

    def rows(self) -> list[Row]:
        """Headline: every score over all queries, exact match apart for queries that show a needed pair or do not."""
        table: list[Row] = []
        if not self.points:
            table = [row("headline", score, None, where={"queries": "all"}, note=ASKS_NOTHING) for score in SCORES]
        for point in self.points:
            where: Row = {"rendering": point.rendering, "pairing": point.pairing, "shots": point.shots,
                          "queries": point.queries}  # fmt: skip
            for score, found in point.scores.items():
                apart = point.queries != "all" and score != SCORES[0]
                level: Level = "split" if apart else point.level
                table.append(row(level, score, found, where=where, nulls=point.nulls[score]))
        return by_level(sorted(table, key=lambda entry: SCORES.index(str(entry["quantity"]))))


def needs(config: ModelConfig) -> tuple[str, ...]:
    """No site: log-probabilities and the most likely tokens are enough."""
    return ()


def _by_sample(batch: Batch, which: NDArray[np.intp]) -> Mapping[str, NDArray[np.generic]]:
    """Scores, floors and what an episode is, one number a sample."""
    samples = batch.samples.rows(which)
    argmax_BT = batch.argmax_BT[which]
    episode_B = samples.episode_N
    return {
        SCORES[0]: teacher_forced(samples, argmax_BT, newline=True),
        SCORES[1]: teacher_forced(samples, argmax_BT, newline=False),
        SCORES[2]: teacher_forced_first_closer(samples, argmax_BT),
        SCORES[3]: answer_loss(samples, batch.logprob_BT[which]),
        **{f"all {name}": right_B for name, right_B in floors(samples).items()},
        **{f"first {name}": right_B for name, right_B in first_closer_floors(samples).items()},
        **{name: episode_B[name] for name in ("shots", "depth", "answer_length", "episode_pairing", "pair_shown")},
        "full": (samples.role_NT == Role.INSTRUCTION).any(-1),
    }


def first_closer_floors(samples: Samples) -> dict[str, NDArray[np.bool_]]:
    """Whether each shortcut's answer begins with the right closer. -> name: (N,)"""
    asked = [(query, pairing_of(query)) for query in queries(samples)]
    return {
        name: np.array([shortcut(query, closer_of)[:1] == query.answer[:1] for query, closer_of in asked])
        for name, shortcut in SHORTCUTS.items()
    }


def measure(batches: Iterable[Batch], options: Options) -> DyckResult:
    """Scores by rendering, pairing and shots, and within them by pair shown, answer length and depth.

    Rows that ask nothing (text, training rows) are passed over; without any other the result has no points. Raises
    UserError without rows.
    """
    sums = SampleSums()
    vocab_size = 0
    for batch in batches:
        which = np.flatnonzero((batch.samples.role_NT == Role.ANSWER).any(-1) & (batch.samples.episode_N["shots"] >= 0))
        vocab_size = batch.config.vocab_size
        if len(which):
            sums.add(batch.sample_ids[which], _by_sample(batch, which))
    if vocab_size and sums.empty:
        return DyckResult(points=())
    by_sample = sums.finish()[1]
    kinds = np.stack([by_sample["full"], by_sample["episode_pairing"], by_sample["shots"]], -1).astype(np.int64)
    points = []
    for full, episode_pairing, shots in np.unique(kinds, axis=0):
        of_kind = (kinds == (full, episode_pairing, shots)).all(-1)
        kind = (FULL if full else COMPACT, "episode" if episode_pairing else "standard", int(shots))
        for name, level, of_split in _splits(by_sample):
            if (chosen := of_kind & of_split).any():
                inside = {key: np.asarray(array[chosen], np.float64) for key, array in by_sample.items()}
                points.append(_point(kind, name, level, inside, vocab_size))
    return DyckResult(points=tuple(points))


def _splits(by_sample: Mapping[str, NDArray[np.generic]]) -> list[tuple[str, Level, NDArray[np.bool_]]]:
    shown_N = by_sample["pair_shown"].astype(np.bool_)
    splits: list[tuple[str, Level, NDArray[np.bool_]]] = [
        ("all", "headline", np.ones_like(shown_N)),
        ("pair shown", "headline", shown_N),
        ("pair hidden", "headline", ~shown_N),
    ]
    for name, words in (("answer_length", "answer length"), ("depth", "depth")):
        splits += [(f"{words} {value}", "split", by_sample[name] == value) for value in np.unique(by_sample[name])]
    return splits


def _point(
    kind: tuple[str, str, int], name: str, level: Level, inside: Mapping[str, NDArray[np.float64]], vocab_size: int
) -> Point:
    score_NK = np.stack([inside[score] for score in SCORES], 1)
    value_K, low_K, high_K = (array.tolist() for array in estimates(score_NK, np.ones(len(score_NK))))
    whole = {shortcut.replace(" ", "_"): float(inside[f"all {shortcut}"].mean()) for shortcut in SHORTCUTS}
    first = {shortcut.replace(" ", "_"): float(inside[f"first {shortcut}"].mean()) for shortcut in SHORTCUTS}
    nulls = dict(zip(SCORES, (whole, whole, first, {"uniform": float(np.log(vocab_size))}), strict=True))
    scores = {score: Estimate(value_K[k], low_K[k], high_K[k], len(score_NK)) for k, score in enumerate(SCORES)}
    return Point(*kind, name, level, scores, nulls)


def figure(result: DyckResult) -> "Figure":
    """Scores against shots, with the floors of exact match."""
    from plotly.graph_objects import Figure, Scatter

    drawn: Figure = Figure()
    everything = [point for point in result.points if point.queries == "all"]
    for rendering, pairing in dict.fromkeys((point.rendering, point.pairing) for point in everything):
        points = [point for point in everything if (point.rendering, point.pairing) == (rendering, pairing)]
        shots = [point.shots for point in points]
        for score in SCORES[:3]:
            found = [point.scores[score] for point in points]
            error = {
                "array": [each.high - each.value for each in found],
                "arrayminus": [each.value - each.low for each in found],
            }
            name = f"{score}, {rendering}, {pairing} pairing"
            drawn.add_trace(
                Scatter(x=shots, y=[each.value for each in found], error_y=error, name=name, mode="lines+markers")
            )
        for shortcut in points[0].nulls[SCORES[0]]:
            floor = [point.nulls[SCORES[0]][shortcut] for point in points]
            name = f"floor: {shortcut.replace('_', ' ')}, {rendering}, {pairing} pairing"
            drawn.add_trace(Scatter(x=shots, y=floor, name=name, mode="lines", line={"dash": "dot"}))
    drawn.update_layout(title=TITLE, xaxis_title="demonstrations k", yaxis_title="share of episodes", height=520)
    drawn.update_yaxes(range=[-0.02, 1.02])
    return drawn


def main() -> None:
    """`python -m probes.dyck_icl`."""
    from probes.running import command

    command.main("dyck_icl", Episodes)


if __name__ == "__main__":
    main()
