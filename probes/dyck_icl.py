"""Does the network learn to close brackets from demonstrations in its context, and how many does it need?

Each episode asks one query after k demonstrations. Scores are read from one forward pass over the right answer:

    exact match      every bracket of the answer and the newline that ends it is the most likely next token. That is
                     exact match of greedy decoding: as long as each token is right, generating reads the same context
    teacher-forced   the same without the newline, which gives the answer's length away
    first closer     the first bracket alone
    loss             nats a token of the answer, newline included, mean over episodes of each episode's mean

Beside each score, what shortcuts without a stack reach on the same episodes (`smelt_interp.data.dyck_scores.SHORTCUTS`;
all but the constant are given the answer's length and the pairing); beside the loss, that of a uniform guess.
Queries whose own prefix already shows a pair that the answer needs are counted apart: they need no demonstration. An
interval of a share is the exact binomial one, since each episode answers a query once; that of the loss is the
bootstrap's. Beside another network (--against) stands what this one has over it, paired by query.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer, no_sites
from probes.statistics.arrays import Mask, ratio, to_numpy
from probes.statistics.grid import Level, Place, Where
from probes.statistics.quantities import NULL_PREFIX, Quantity, error_bars
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.token_loss import vocab_size
from smelt_interp.architecture import Architecture
from smelt_interp.arrays import Array
from smelt_interp.data.datasets import DataOptions
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
from smelt_interp.errors import UserError
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Dyck in context"
needs = no_sites
DATA = DataOptions(samples=256, shots=(0, 1, 2, 4, 8))
OVERVIEW = ({"quantity": "exact match", "queries": "all"},)
"""The same queries are asked at every number of shots."""

SCORES = EXACT, FORCED, FIRST, LOSS = ("exact match", "teacher-forced", "first closer", "loss (nats)")
ASKS_NOTHING = "not defined: no row asks a query; record --data dyck"


@validated
class Options:
    """Nothing to choose: the episodes decide."""


class EpisodeGroup(NamedTuple):
    """Episodes that are scored together."""

    rendering: str
    pairing: str
    shots: int
    split: str
    """`all`, `pair shown`, `pair hidden`, `answer length`, `depth`."""
    number: int
    """The answer's length, or the depth; 0 where there is none."""

    @property
    def queries(self) -> str:
        """The split as a row names it."""
        return f"{self.split} {self.number}" if self.number else self.split

    @property
    def level(self) -> Level:
        """Pairs shown or hidden are headlines of their own."""
        return "split" if self.number else "headline"


SPLITS = ("all", "pair shown", "pair hidden", "answer length", "depth")
JOIN = "|"
"""Between the parts of a sum's name."""


def start(architecture: Architecture, options: Options) -> Sums[int, Options]:
    """Scores and floors by group of episodes."""
    return Sums(architecture, options, vocab_size, reduce, quantities)


def result(sums: Sums[int, Options]) -> Result:
    """Scores by rendering, pairing and shots, and within them by pair shown, answer length and depth.

    Rows that ask nothing (text, training rows) are passed over.
    """
    return answer(sums, figures)


# Arithmetic


def asking(samples: Samples) -> Mask:
    """Rows that ask a query. -> (B,)"""
    asks_B: Mask = (samples.role_NT == Role.ANSWER).any(-1) & (samples.episode_N["shots"] >= 0)
    return asks_B


def first_closer_floors(samples: Samples) -> dict[str, NDArray[np.bool_]]:
    """Whether each shortcut's answer begins with the right closer. -> name: (N,)"""
    asked = [(query, pairing_of(query)) for query in queries(samples)]
    return {
        name: np.array([shortcut(query, closer_of)[:1] == query.answer[:1] for query, closer_of in asked])
        for name, shortcut in SHORTCUTS.items()
    }


def groups(samples: Samples) -> Iterator[tuple[EpisodeGroup, Mask]]:
    """Every group that occurs, with its rows (B,)."""
    episode_B = samples.episode_N
    full_B = (samples.role_NT == Role.INSTRUCTION).any(-1)
    numbers = {"all": np.zeros(len(samples), np.int64), "answer length": episode_B["answer_length"],
               "depth": episode_B["depth"]}  # fmt: skip
    kinds = np.stack([full_B, episode_B["episode_pairing"], episode_B["shots"]], -1).astype(np.int64)
    for full, permuted, shots in np.unique(kinds, axis=0):
        of_kind_B = (kinds == (full, permuted, shots)).all(-1)
        kind = ("full" if full else "compact", "episode" if permuted else "standard", int(shots))
        for split, shown in (("pair shown", True), ("pair hidden", False)):
            yield EpisodeGroup(*kind, split, 0), of_kind_B & (episode_B["pair_shown"] == shown)
        for split, number_B in numbers.items():
            for number in np.unique(number_B[of_kind_B]).tolist():
                yield EpisodeGroup(*kind, split, number), of_kind_B & (number_B == number)


def reduce(batch: Batch, layout: int, options: Options) -> Reduced:
    """Scores, floors and episodes of each group, one number a sample."""
    asks_B = asking(batch.samples)
    if not asks_B.any():
        return Reduced()
    # Each episode's scores and floors.
    which = np.flatnonzero(asks_B)
    samples = batch.samples.rows(which)
    logprob_BT, argmax_BT = to_numpy(batch.logprob_BT)[which], to_numpy(batch.argmax_BT)[which].astype(np.int64)
    score_BK = np.stack([
        teacher_forced(samples, argmax_BT, newline=True),
        teacher_forced(samples, argmax_BT, newline=False),
        teacher_forced_first_closer(samples, argmax_BT),
        answer_loss(samples, logprob_BT),
    ], -1)  # fmt: skip
    if not np.isfinite(score_BK).all():
        raise UserError(
            f"answers to score must have finite log-probabilities; got {score_BK[~np.isfinite(score_BK)][0]} from the "
            f"unembedding, in samples {batch.sample_ids[0]} to {batch.sample_ids[-1]}: mend the network"
        )
    floor_BK = np.stack([*floors(samples).values(), *first_closer_floors(samples).values()], -1)
    # The same under the name of every group that an episode is in.
    sums: dict[str, Array] = {}
    whole: dict[str, Array] = {}
    defined: dict[str, Mask] = {}
    for group, inside_B in groups(samples):
        of_group_B = np.zeros(len(asks_B), np.bool_)
        of_group_B[which] = inside_B
        name = JOIN.join(map(str, group))
        scores_BK = np.zeros((len(asks_B), len(SCORES)))
        scores_BK[which[inside_B]] = score_BK[inside_B]
        sums |= {f"scores{JOIN}{name}": scores_BK, f"episodes{JOIN}{name}": of_group_B}
        whole[f"floors{JOIN}{name}"] = floor_BK[inside_B].sum(0)
        defined[name] = of_group_B
    return Reduced(by_sample=sums, whole=whole, defined=defined)


# What the sums say


def group_of(name: str) -> EpisodeGroup:
    """The group that a sum's name ends with."""
    rendering, pairing, shots, split, number = name.split(JOIN)[-5:]
    return EpisodeGroup(rendering, pairing, int(shots), split, int(number))


def quantities(totals: Totals[int, Options]) -> list[Quantity]:
    """Each score of each group: headline over all queries, and those that show a needed pair or do not."""
    if not totals.n:
        nothing, places = np.full((1, 1, 1), np.nan), [Place("headline", {"queries": "all"}, [0], [])]
        return [Quantity(name=score, value_RLH=nothing, places=places, n=0, undefined=ASKS_NOTHING) for score in SCORES]
    names = sorted(totals.n, key=lambda name: (*group_of(name)[:3], SPLITS.index(group_of(name).split), group_of(name)))
    return [_score(totals, name, k) for k in range(len(SCORES)) for name in names]


def _score(totals: Totals[int, Options], name: str, k: int) -> Quantity:
    """One score of one group, with its floors."""
    group, score = group_of(name), SCORES[k]
    scores_RK, episodes_R = (totals.sums[f"{word}{JOIN}{name}"] for word in ("scores", "episodes"))
    floor_K = ratio(totals.whole[f"floors{JOIN}{name}"], episodes_R[:1])
    of_score = floor_K[len(SHORTCUTS) :] if score == FIRST else floor_K[: len(SHORTCUTS)]
    floor = {shortcut.replace(" ", "_"): float(x) for shortcut, x in zip(SHORTCUTS, of_score, strict=True)}
    where: Where = {
        "rendering": group.rendering,
        "pairing": group.pairing,
        "shots": group.shots,
        "queries": group.queries,
    }
    apart = group.split != "all" and score != EXACT
    return Quantity(
        name=score,
        value_RLH=ratio(scores_RK[:, k], episodes_R)[:, None, None],
        places=[Place("split" if apart else group.level, where, [0], [])],
        n=totals.n[name],
        nulls={"uniform": float(np.log(totals.layout))} if score == LOSS else floor,
        share=score != LOSS,
    )


def against(totals: Totals[int, Options], other: Totals[int, Options]) -> list[Quantity]:
    """What the network has over another on all queries, paired by query: share by share, and how much lower its loss
    is."""
    found = []
    for own, theirs in zip(quantities(totals), quantities(other), strict=True):
        if own.places[0].where["queries"] == "all" and not own.undefined:
            more_RLH = own.value_RLH - theirs.value_RLH
            gain_RLH = -more_RLH if own.name == LOSS else more_RLH
            nothing = {"no_difference": 0.0}
            found.append(replace(own, name=f"{own.name}, gain", value_RLH=gain_RLH, nulls=nothing, share=False))
    return found


def figures(totals: Totals[int, Options]) -> "dict[str, Figure]":
    """Scores against shots, with the floors of exact match."""
    from plotly.graph_objects import Figure, Scatter

    drawn: Figure = Figure()
    rows = [row for quantity in quantities(totals) if not quantity.undefined for row in quantity.rows()]
    rows = [row for row in rows if row["queries"] == "all" and row["quantity"] != LOSS]
    for score, rendering, pairing in dict.fromkeys((r["quantity"], r["rendering"], r["pairing"]) for r in rows):
        of = [r for r in rows if (r["quantity"], r["rendering"], r["pairing"]) == (score, rendering, pairing)]
        shots, where = [r["shots"] for r in of], f"{rendering}, {pairing} pairing"
        drawn.add_trace(
            Scatter(
                x=shots,
                y=[r["value"] for r in of],
                error_y=error_bars(of),
                name=f"{score}, {where}",
                mode="lines+markers",
            )
        )
        for null in (name for name in of[0] if name.startswith(NULL_PREFIX) and score == EXACT):
            floor = f"floor: {null.removeprefix(NULL_PREFIX).replace('_', ' ')}, {where}"
            drawn.add_trace(Scatter(x=shots, y=[r[null] for r in of], name=floor, mode="lines", line={"dash": "dot"}))
    drawn.update_layout(title=TITLE, xaxis_title="demonstrations k", yaxis_title="share of episodes", height=520)
    drawn.update_yaxes(range=[-0.02, 1.02])
    return {"shots": drawn}


def main() -> None:
    """`python -m probes.dyck_icl`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
