"""How does the answer to a Dyck episode form along the executed steps, and where do right and wrong answers part?

    python -m probes.answer_lens --ckpt CHECKPOINT --capture CAPTURE

The network that was recorded runs again on the capture's episodes, and the lenses of `probes.logit_lens` read its
states where it predicts the answer, the newline that ends it too. After each step, of each token of the answer:

    answer rank   rank, from 1, of the right token among the lens's tokens
    probability   that the lens gives it
    flips         share of tokens at which the lens's most likely token is another than one step before

Means stand apart for episodes that the network answers right, every token of the answer being its most likely one, and
for the others; beside each, the same lens on the state that enters the first step (`entering`). The result lies in the
capture's folder, where the dashboard's page of answers shows it episode by episode.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from cache.batch import Batch
from cache.store import Capture
from probes import logit_lens
from probes.dyck_icl import ASKS_NOTHING, asking
from probes.logit_lens import AFTER, ENTERING, Layout, Lens, lay_out, readings
from probes.running import report
from probes.running.source import SampleSet, Source, Subject, open_subjects
from probes.statistics.along_steps import mean_at_steps
from probes.statistics.arrays import to_numpy
from probes.statistics.bootstrap import weights
from probes.statistics.grid import STEPS, Where, headline_loops
from probes.statistics.quantities import Quantity, Record, rows_of
from smelt_interp.data.dyck_scores import teacher_forced
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError, run_command
from smelt_interp.input_files import read_input
from smelt_interp.looped_span import OpeningOptions
from smelt_interp.plan import label as step_label
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import print_table
from smelt_interp.validation import Threads, different, validated

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure
    from torch import Tensor

TITLE = "Answers along the steps"
SCHEMA = "smelt.answer_lens"
FILE = "answer_lens.json"
"""In the folder `results` of a capture."""
MOST_BYTES = 256 * 2**20
MEASURES = ("answer rank", "probability", "flips")
RIGHT, WRONG = "right", "wrong"
NEVER = "never"
Floats = NDArray[np.float64]


@validated
class Options(OpeningOptions):
    """Whose answers are read."""

    ckpt: Path
    """Folder of the checkpoint that was recorded."""
    capture: Path
    """Capture of Dyck episodes; they run again, whatever sites were recorded."""
    lenses: tuple[Lens, ...] = ("stream", "coda")
    """stream: final norm and unembedding. coda: the layers after the loop first, where a pass can start at one."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Episodes in memory at a time."""
    threads: Threads = 1
    json: bool = False
    """Print the result as JSON instead of a table."""

    def __post_init__(self) -> None:
        OpeningOptions.__post_init__(self)
        different("lenses", self.lenses)


class Reading(NamedTuple):
    """What a lens reads of some tokens: before the first step, then after each step. X such states, P tokens."""

    rank_XP: NDArray[np.int64]
    probability_XP: Floats
    top_XP: NDArray[np.int64]
    """The most likely token."""

    def measures(self) -> Floats:
        """Each of MEASURES. -> (X, P, 3)"""
        before_XP = np.concatenate([self.top_XP[:1], self.top_XP[:-1]])
        return np.stack([self.rank_XP, self.probability_XP, self.top_XP != before_XP], -1).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode, as the network answered it."""

    sample: int
    """In its capture, from 0."""
    right: bool
    shots: int
    depth: int
    tokens: tuple[str, ...]
    """Of the right answer, its newline too."""
    rank: dict[str, list[list[int]]]
    """By lens: after each state, of each token."""
    probability: dict[str, list[list[float]]]
    top: dict[str, list[list[str]]]
    """The most likely tokens."""

    def first_from(self, lens: str) -> int:
        """The first state from which every token of the answer is the most likely one and stays it, 0 before any step;
        as many as there are states where there is none."""
        first = [max(ranks) == 1 for ranks in self.rank[lens]]
        return next((at for at in range(len(first)) if all(first[at:])), len(first))

    def flips(self, lens: str) -> int:
        """How often the most likely token changes, over all tokens of the answer."""
        return sum(a != b for before, after in pairwise(self.top[lens]) for a, b in zip(before, after, strict=True))


class Answers(NamedTuple):
    """What is kept beside a capture."""

    rows: list[Record]
    """Means after each step; right episodes with the wrong ones beside them."""
    episodes: tuple[Episode, ...]
    command: str

    @property
    def lenses(self) -> tuple[str, ...]:
        """Those that read anything."""
        return tuple(self.episodes[0].rank)


# Reading


def read_batch(subject: Subject, batch: Batch, layout: Layout, lenses: Sequence[Lens]) -> dict[str, Reading]:
    """What each lens reads of the answers of a batch, token after token, row after row."""
    import torch

    network = subject.network
    assert network is not None  # a checkpoint was opened
    row_P, answer_P = np.nonzero(batch.samples.role_NT == Role.ANSWER)
    at_P = answer_P - 1  # what predicts it
    right_P1 = torch.from_numpy(batch.samples.ids_NT[row_P, answer_P].astype(np.int64))[:, None].to(network.device)
    found: dict[str, Reading] = {}
    with torch.no_grad():
        for lens in lenses:
            states: list[tuple[Tensor, Tensor, Tensor]] = []
            for lens_BTW in readings(network, batch, layout, lens):
                lens_PW = lens_BTW[row_P, at_P]
                own_P1 = lens_PW.gather(-1, right_P1)
                states.append((1 + (lens_PW > own_P1).sum(-1), own_P1[:, 0].double().exp(), lens_PW.argmax(-1)))
            if states:
                rank, probability, top = (np.stack([to_numpy(each[at]) for each in states]) for at in range(3))
                found[lens] = Reading(rank.astype(np.int64), probability, top.astype(np.int64))
    return found


def quantities(
    name: str, by_lens: dict[str, Floats], tokens_N: Floats, samples: Samples, layout: Layout
) -> list[Quantity]:
    """The means of the episodes of one kind. by_lens: sums over each episode's tokens, (N, X, 3)."""
    grid, coda = layout
    weight_RN, n = weights(0, samples.document_N), samples.num_documents
    found = []
    for lens, sum_NXM in by_lens.items():
        places = grid.places(STEPS)
        if sum_NXM.shape[1] <= len(grid.steps):
            places = tuple(place for place in places if max(place.positions) < coda)
        for index, measure in enumerate(MEASURES):
            where: Where = {"lens": lens}
            if not n:
                nothing = np.full((1, len(grid.steps), 1), np.nan)
                found.append(Quantity(name=measure, value_RLH=nothing, n=0, where=where, places=places, change=True,
                                      undefined=f"no episode is answered {name}"))  # fmt: skip
                continue
            sum_RX = weight_RN @ sum_NXM[..., index]
            found.append(mean_at_steps(measure, sum_RX, weight_RN @ tokens_N, grid, n, places=places, where=where,
                                       entering=True))  # fmt: skip
    return found


def measure(options: Options) -> tuple[dict[str, object], Capture]:
    """The whole result. Raises UserError for another network than the one recorded, and without any episode."""
    capture = Capture(options.capture)
    samples = capture.samples
    which = np.flatnonzero(asking(samples))
    if not len(which):
        raise UserError(f"a capture must hold Dyck episodes; got {capture.path}, {ASKS_NOTHING}")
    subject = _opened(options, capture)
    data = SampleSet(name="dyck", samples=samples.rows(which))
    layout: Layout | None = None
    episodes: list[Episode] = []
    sums: dict[str, list[Floats]] = {}
    for batch in subject.batches(data, (ENTERING, AFTER)):
        layout = layout or lay_out(
            batch, logit_lens.Options(lenses=options.lenses), headline_loops(subject.architecture)
        )
        found = read_batch(subject, batch, layout, options.lenses)
        row_P, _ = np.nonzero(batch.samples.role_NT == Role.ANSWER)
        ends = np.searchsorted(row_P, np.arange(len(batch.samples) + 1))
        right_B = teacher_forced(batch.samples, to_numpy(batch.argmax_BT).astype(np.int64), newline=True)
        for row, position in enumerate(batch.sample_ids.tolist()):
            own = {lens: Reading._make(x_XP[:, ends[row] : ends[row + 1]] for x_XP in each)
                   for lens, each in found.items()}  # fmt: skip
            for lens, each in own.items():
                sums.setdefault(lens, []).append(each.measures().sum(1))
            episodes.append(_episode(batch.samples, row, int(which[position]), bool(right_B[row]), own, subject))
    assert layout is not None  # there is an episode
    if not sums:
        raise UserError(f"lenses must read this network; got {' '.join(options.lenses)}: add stream")
    parts = []
    for name in (RIGHT, WRONG):
        of_kind = np.flatnonzero([each.right == (name == RIGHT) for each in episodes])
        tokens_N = np.array([len(each.tokens) for each in episodes], np.float64)[of_kind]
        by_lens = {lens: np.stack(each)[of_kind] for lens, each in sums.items()}
        every = quantities(name, by_lens, tokens_N, data.samples.rows(of_kind), layout)
        parts.append([row for quantity in every for row in quantity.rows()])
    rows, _ = report.join_networks(parts[0], parts[1], WRONG, once=False)
    described = {"name": capture.path.name, "capture": str(capture.path), "digest": capture.digest,
                 "weights": subject.described["weights"]}  # fmt: skip
    values = [{name: getattr(each, name) for name in Episode.__slots__} for each in episodes]
    return {"schema": SCHEMA, "probe": "answer_lens", "title": TITLE, "options": {}, "networks": [described],
            "rows": rows, "episodes": values}, capture  # fmt: skip


def _opened(options: Options, capture: Capture) -> Subject:
    """The network that was recorded. Raises UserError for another."""
    source = Source(ckpt=options.ckpt, visits=options.visits, untrained=False, batch_size=options.batch_size,
                    threads=options.threads, loop=options.loop, loop_scale=options.loop_scale,
                    trust_remote_code=options.trust_remote_code, allow_download=options.allow_download)  # fmt: skip
    (subject,) = open_subjects(source, 0)
    recorded = capture.request.get("weights"), capture.architecture
    if (subject.described["weights"], subject.architecture) != recorded:
        raise UserError(f"--ckpt must be the network that {capture.path} was recorded from; got {options.ckpt}, "
                        "another: see `python -m cache.info`")  # fmt: skip
    return subject


def _episode(
    samples: Samples, row: int, sample: int, right: bool, own: dict[str, Reading], subject: Subject
) -> Episode:
    """A row of a batch with what the lenses read of it."""
    called = subject.tokenizer.token_text.label
    labels = samples.labels(row)
    asked = samples.episode_N[row]

    return Episode(
        sample=sample, right=right, shots=int(asked["shots"]), depth=int(asked["depth"]),
        tokens=tuple(labels[at] for at in np.flatnonzero(samples.role_NT[row] == Role.ANSWER)),
        rank={lens: each.rank_XP.tolist() for lens, each in own.items()},
        probability={lens: each.probability_XP.round(6).tolist() for lens, each in own.items()},
        top={lens: [[called(token) for token in top_P] for top_P in each.top_XP.tolist()]
             for lens, each in own.items()},
    )  # fmt: skip


# What is kept


def read_answers(capture: Capture) -> Answers | None:
    """What is kept beside a capture, None where nothing is. Raises UserError for what the command did not write, or
    wrote of another capture."""
    path = capture.path / "results" / FILE
    if not path.exists():
        return None
    try:
        said = json.loads(read_input(path, "answers", MOST_BYTES))
        if said["schema"] != SCHEMA or said["networks"][0]["digest"] != capture.digest:
            raise ValueError("it is of another capture")
        episodes = TypeAdapter(tuple[Episode, ...]).validate_python(said["episodes"])
        if not episodes[0].rank or len({each.sample for each in episodes}) != len(episodes):
            raise ValueError("an episode is there twice, or no lens")
        for lens, states in episodes[0].rank.items():  # whoever draws them finds a number for each state and token
            for each in episodes:
                drawn = (each.rank[lens], each.probability[lens], each.top[lens])
                whole = all([len(at) for at in kind] == len(states) * [len(each.tokens)] for kind in drawn)
                if not (whole and each.tokens and 0 <= each.sample < len(capture)):
                    raise ValueError(f"sample {each.sample + 1} is not whole")
            if not 0 < len(states) <= len(state_labels(capture)):
                raise ValueError(f"{lens} reads {len(states)} states")
        return Answers(rows_of(said["rows"], "value", "low", "high"), episodes, str(said["command"]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path} must be what probes.answer_lens wrote of this capture; {error!s:.80}: write it again"
                        ) from None  # fmt: skip


def command_for(capture: Capture) -> str:
    """The command that writes the answers of a capture, with the checkpoint that its own command names."""
    words = shlex.split(capture.manifest.command)
    named = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--ckpt"]
    ckpt = named[0] if named else f"checkpoints/{capture.request.get('checkpoint', 'NAME')}"
    line = ["python", "-m", "probes.answer_lens", "--ckpt", ckpt, "--capture", str(capture.path)]
    loop = capture.request.get("loop")
    if isinstance(loop, dict):
        line += ["--loop", str(loop.get("layers")), "--visits", str(loop.get("visits"))]
        line += ["--loop-scale", str(loop.get("factor"))]
    return shlex.join(line)


def episode_frame(answers: Answers, capture: Capture, lens: str, *, right: bool) -> "DataFrame":
    """A row an episode that is answered right, or wrong: its sample from 1, its question, when its answer stands."""
    from pandas import DataFrame

    states = [*state_labels(capture), NEVER]
    last = len(answers.episodes[0].rank[lens])
    return DataFrame([
        {"sample": each.sample + 1, "shots": each.shots, "depth": each.depth, "answer": "".join(each.tokens),
         "stands after": states[at] if (at := each.first_from(lens)) < last else NEVER, "flips": each.flips(lens)}
        for each in answers.episodes if each.right == right
    ], columns=["sample", "shots", "depth", "answer", "stands after", "flips"])  # fmt: skip


def state_labels(capture: Capture) -> list[str]:
    """The states that a lens reads: `entering`, `layer 5, visit 2`."""
    return ["entering", *map(step_label, capture.architecture.steps)]


def episode_figure(episode: Episode, capture: Capture, lens: str) -> "Figure":
    """The answer forming: a row a token of it, a column a state, coloured by the right token's probability, with the
    most likely token written in each cell; the visits of each loop are marked off."""
    from plotly.graph_objects import Figure, Heatmap

    probability, top, rank = episode.probability[lens], episode.top[lens], episode.rank[lens]
    names = state_labels(capture)[: len(rank)]
    rows = [f"{at + 1}: {token}" for at, token in enumerate(episode.tokens)]
    by_row = [[[state[at] for state in values] for at in range(len(rows))] for values in (probability, top, rank)]
    said = [[f"{names[x]}, token {rows[y]}<br>most likely {by_row[1][y][x]}<br>rank of the right one {by_row[2][y][x]}"
             for x in range(len(names))] for y in range(len(rows))]  # fmt: skip
    figure: Figure = Figure(Heatmap(
        z=by_row[0], x=list(range(len(names))), y=rows, zmin=0, zmax=1, colorscale="Blues", text=by_row[1],
        texttemplate="%{text}", customdata=said, xgap=1, ygap=1, colorbar={"title": "probability", "thickness": 10},
        hovertemplate="%{customdata}<br>its probability %{z:.4f}<extra></extra>",
    ))  # fmt: skip
    steps = capture.architecture.steps
    ticks = ["in", *(str(step.layer + 1) for step in steps)][: len(names)]
    figure.update_xaxes(tickvals=list(range(len(names))), ticktext=ticks, title_text="layer", showgrid=False)
    figure.update_yaxes(autorange="reversed", type="category")
    for loop in capture.architecture.loops:
        for visit in range(loop.num_visits):
            inside = [step + 1 for step in loop.steps(steps, visit) if step + 1 < len(names)]
            if inside:
                figure.add_vrect(x0=inside[0] - 0.5, x1=inside[-1] + 0.5, line={"width": 1.5, "color": "#d9752b"})
                figure.add_annotation(x=inside[0] - 0.5, y=1, yref="paper", text=f"visit {visit + 1}", font_size=10,
                                      showarrow=False, xanchor="left", yanchor="bottom")  # fmt: skip
    figure.update_layout(height=150 + 34 * len(rows), margin={"l": 50, "r": 10, "t": 40, "b": 40})
    return figure


# The command


def main() -> None:
    """Read the answers, keep them beside the capture, and print the means."""
    options = parse(Options, prog="python -m probes.answer_lens", description=__doc__ or "")
    document, capture = measure(options)
    document["command"] = shlex.join(["python", "-m", "probes.answer_lens", *sys.argv[1:]])
    text = report.json_text(document)
    path = capture.path / "results" / FILE
    report.write_text(path, text)
    if options.json:
        sys.stdout.write(text)
        return
    rows = cast("list[Record]", document["rows"])
    episodes = cast("list[dict[str, object]]", document["episodes"])
    right = sum(each["right"] is True for each in episodes)
    title = f"{TITLE}: {capture.path.name}, {right} episodes answered right, {len(episodes) - right} wrong"
    print_table(report.readable(rows, title, {WRONG: WRONG}, "headline"))
    print(f"result: {path}")


if __name__ == "__main__":
    run_command(main)
