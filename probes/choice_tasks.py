"""Does the network solve small tasks that are built of its context: copy, recall by key, bracket depth, sums?

Items of `smelt_interp.data.choice_tasks`, each after demonstrations (--shots), each with its right answer among
--choices candidates. Scored by log-likelihood, as lm-eval scores them:

    acc         share of items whose right candidate has the highest log-probability, its newline included; ties share
    acc_norm    the same for log-probability by byte of the candidate: equal where all are as long, as here
    exact       share of items whose answer is greedy decoding's, nothing being offered

and the mean over tasks. Beside each stand chance and what the best shortcut gets that does not solve the task. Texts
among --data give the network's loss, in nats a token. With --out, scores.csv holds a row a network for
`python -m smelt_interp.scaling.calibration fit`: its mean loss on those texts and its mean acc.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer, no_sites
from probes.running.source import SampleSet, Subject, sample_sets
from probes.statistics.arrays import Floats, ratio, to_numpy
from probes.statistics.grid import Place
from probes.statistics.quantities import Quantity, Record, error_bars
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.token_loss import token_losses
from smelt_interp.architecture import Loop
from smelt_interp.data.choice_tasks import (
    Task,
    TaskOptions,
    TaskSet,
    answer_bytes,
    answer_logprob,
    right_choices,
    right_completions,
    some_items,
    task_floors,
    task_samples,
)
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.data.tokenizer import padding_id
from smelt_interp.errors import UserError
from smelt_interp.scaling.csv_columns import BASELINE
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from model.hooks.looped_model import LoopedModel
    from probes.running.command import Measured

TASKS: tuple[Task, ...] = get_args(Task)
TITLE = "Choice tasks"
needs = no_sites
DATA = DataOptions(data=(*TASKS, "code"), samples=128, shots=(4,))
OVERVIEW = ({"quantity": "acc", "task": "all"},)

SCORES = ACC, NORM, EXACT = ("acc", "acc_norm", "exact")
LOSS, GAIN = "loss (nats)", ", gain"
TEXT, ALL = "text", "all"
JOIN = "|"
"""Between the parts of a sum's name."""
Layout = tuple[()]


@validated
class Options:
    """Which items."""

    size: Annotated[int, Field(ge=2, le=9)] = 4
    """Letters to copy, pairs to recall from, deepest nesting, or digits to add."""
    choices: Annotated[int, Field(ge=2, le=9)] = 4
    """Candidates of an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSamples(SampleSet):
    """The right row of every item, task after task at each number of shots; the other candidates are in `asked`."""

    asked: tuple[TaskSet, ...]
    """As many items each."""


def choose_samples(subject: Subject, data: DataOptions, options: Options) -> tuple[SampleSet, ...]:
    """All tasks together, then each text. Raises UserError without a task, and as `task_samples` does."""
    tasks = [name for name in TASKS if name in data.data]
    texts = tuple(name for name in data.data if name not in TASKS)
    if not tasks:
        raise UserError(f"data must name one or more tasks, {', '.join(TASKS)}; got {' '.join(data.data)}")
    if subject.network is None:
        raise UserError("choice tasks must be asked of a network; got a capture, which holds none: give --ckpt")
    length, tokenizer = min(data.length, subject.architecture.context), subject.tokenizer
    asked = tuple(
        task_samples(
            TaskOptions(task=task, shots=shots, size=options.size, choices=options.choices),
            data.samples, seed=data.seed, length=length, tokenizer=tokenizer,
        )
        for task in tasks
        for shots in data.shots
    )  # fmt: skip
    right = [each.samples.rows(np.flatnonzero(each.right_N)) for each in asked]
    whole = TaskSamples(name="tasks", samples=concatenate(right, padding_id(tokenizer)), asked=asked)
    return (whole, *(sample_sets(subject, replace(data, data=texts)) if texts else ()))


def start_with(network: "LoopedModel", data: SampleSet, options: Options) -> Sums[Layout, Options]:
    """Scores by task and shots, or losses of a text."""
    return sums_of(network, data, options, quantities)


def sums_of(
    network: "LoopedModel",
    data: SampleSet,
    options: Options,
    quantities: Callable[[Totals[Layout, Options]], list[Quantity]],
) -> Sums[Layout, Options]:
    """The sums that these quantities are made of."""
    from cache.record import run_batches

    asking = Asking(data, lambda samples: run_batches(network, samples, ()))
    return Sums(network.architecture, options, lay_out, asking.reduce, quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Scores of each task at each number of shots, and their means over tasks."""
    return answer(sums, figures)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Layout:
    """No step is measured."""
    return ()


@dataclass(frozen=True, slots=True)
class Asking:
    """The items of a set, and what gives log-probabilities of rows."""

    data: SampleSet
    passes: Callable[[Samples], Iterable[Batch]]

    def reduce(self, batch: Batch, layout: Layout, options: Options) -> Reduced:
        """Scores, floors and items by task and shots, one number a sample; of text, its loss."""
        if not isinstance(self.data, TaskSamples):
            loss_BT, counts_BT = token_losses(batch)
            loss_B2 = np.stack([loss_BT.sum(1), counts_BT.sum(1)], -1)
            return Reduced(by_sample={TEXT: loss_B2}, defined={TEXT: np.asarray(counts_BT.any(1))})
        asked = self.data.asked
        set_B, item_B = np.divmod(batch.sample_ids, len(asked[0].items))
        sums: dict[str, Floats] = {}
        whole: dict[str, Floats] = {}
        defined = {}
        for index in np.unique(set_B).tolist():
            inside_B = set_B == index
            tasks = some_items(asked[index], item_B[inside_B])
            name = JOIN.join((tasks.options.task, str(tasks.options.shots)))
            score_BK = np.zeros((len(set_B), len(SCORES) + 1))
            score_BK[inside_B] = np.stack([*self._scores(tasks), np.ones(len(tasks.items))], -1)
            alone = tasks._replace(candidates=tuple((item.answer,) for item in tasks.items))
            sums[name], defined[name] = score_BK, inside_B
            for form, of in ((ACC, tasks), (EXACT, alone)):
                for floor, right_I in task_floors(of).items():
                    if (form, floor) != (EXACT, "chance"):  # nothing is offered
                        whole[JOIN.join((name, form, floor))] = np.asarray(right_I.sum())
        return Reduced(by_sample=sums, whole=whole, defined=defined)

    def _scores(self, tasks: TaskSet) -> tuple[NDArray[np.float64], ...]:
        """Each of SCORES of each item. Raises UserError for an answer whose log-probability is no number."""
        batches = list(self.passes(tasks.samples))
        logprob_NT, argmax_NT = (
            np.concatenate([to_numpy(x) for x in found])
            for found in ([each.logprob_BT for each in batches], [each.argmax_BT for each in batches])
        )
        score_N = answer_logprob(tasks, logprob_NT)
        if not np.isfinite(score_N).all():
            bad = score_N[~np.isfinite(score_N)][0]
            raise UserError(
                f"answers to score must have finite log-probabilities; got {bad} from the unembedding: mend the network"
            )
        return (right_choices(tasks, score_N), right_choices(tasks, score_N / answer_bytes(tasks)),
                right_completions(tasks, argmax_NT.astype(np.int64)))  # fmt: skip


# What the sums say


def accuracies(totals: Totals[Layout, Options]) -> dict[tuple[str, int], NDArray[np.float64]]:
    """Each of SCORES by task and shots, and their mean over tasks, `all`. -> (R, SCORES) each"""
    asked = [(task, int(shots)) for task, _, shots in (name.partition(JOIN) for name in totals.sums)]
    found: dict[tuple[str, int], NDArray[np.float64]] = {}
    for task in TASKS:
        for shots in sorted(shots for of, shots in asked if of == task):
            sum_RK = totals.sums[f"{task}{JOIN}{shots}"]
            found[task, shots] = ratio(sum_RK[:, :-1], sum_RK[:, -1:])
    for shots in sorted({shots for _, shots in asked}):
        of_tasks = [value_RK for (_, at), value_RK in found.items() if at == shots]
        found[ALL, shots] = np.mean(of_tasks, axis=0)
    return found


def num_items(totals: Totals[Layout, Options], task: str, shots: int) -> int:
    """Items asked of a task, or of all."""
    return sum(totals.n.get(f"{each}{JOIN}{shots}", 0) for each in (TASKS if task == ALL else (task,)))


def floors(totals: Totals[Layout, Options], score: str, task: str, shots: int) -> dict[str, float]:
    """Chance, where candidates are offered, and what the best shortcut gets; of all tasks, the mean."""
    if task == ALL:
        each = [floors(totals, score, of, shots) for of in sorted({name.partition(JOIN)[0] for name in totals.sums})]
        return {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    name = f"{task}{JOIN}{shots}{JOIN}{EXACT if score == EXACT else ACC}{JOIN}"
    items = totals.sums[f"{task}{JOIN}{shots}"][0, -1]
    found = {words.removeprefix(name): float(right / items) for words, right in totals.whole.items()
             if words.startswith(name)}  # fmt: skip
    chance = {"chance": found.pop("chance")} if "chance" in found else {}
    return {**chance, "best_shortcut": max(found.values())}


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Each score of each task, and the mean; or the loss of a text."""
    if TEXT in totals.sums:
        places = [Place("headline", {}, [0], [])]
        loss_R = ratio(*np.moveaxis(totals.sums[TEXT], -1, 0))
        return [Quantity(name=LOSS, value_RLH=loss_R[:, None, None], places=places, n=totals.n[TEXT])]
    return [
        quantity(totals, score, task, shots, value_RK[:, k], floors(totals, score, task, shots))
        for k, score in enumerate(SCORES)
        for (task, shots), value_RK in accuracies(totals).items()
    ]


def against(totals: Totals[Layout, Options], other: Totals[Layout, Options]) -> list[Quantity]:
    """Each score minus the other network's, paired by item; of text, how much lower the loss is."""
    if TEXT in totals.sums:
        (own,), (others,) = quantities(totals), quantities(other)
        return [replace(own, name=LOSS + GAIN, value_RLH=others.value_RLH - own.value_RLH)]
    theirs = accuracies(other)
    return [
        quantity(totals, score + GAIN, task, shots, (value_RK - theirs[task, shots])[:, k], {"no_difference": 0.0})
        for k, score in enumerate(SCORES)
        for (task, shots), value_RK in accuracies(totals).items()
        if score != NORM
    ]


def quantity(
    totals: Totals[Layout, Options],
    name: str,
    task: str,
    shots: int,
    value_R: NDArray[np.float64],
    nulls: Mapping[str, float],
) -> Quantity:
    """One number of one task. By byte it says nothing new of candidates that are as long: no headline."""
    places = [Place("split" if name == NORM else "headline", {"task": task, "shots": shots}, [0], [])]
    n, share = num_items(totals, task, shots), task != ALL and name in SCORES
    return Quantity(name=name, value_RLH=value_R[:, None, None], places=places, n=n, nulls={**nulls}, share=share)


def scores(measured: Sequence["Measured"]) -> list[Record]:
    """A row a trained network for `calibration fit`: its mean loss on the texts, its mean acc over tasks; the acc of
    each task beside it. Empty without a text."""
    tasks, *texts = measured
    found: list[Record] = []
    for at, subject in enumerate(tasks.subjects):
        losses = [value for text in texts for value in _values(text.results[at], LOSS).values()]
        accs = _values(tasks.results[at], ACC)
        if not losses or subject.untrained:
            continue
        of_all = [accs.pop(name) for name in [*accs] if name.startswith(ALL)]
        found.append({
            "architecture": "looped" if subject.architecture.loops else BASELINE,
            "loss": float(np.mean(losses)), "score": float(np.mean(of_all)), "group": "all",
            "pair": tasks.subjects[0].name, "network": subject.name, **accs,
        })  # fmt: skip
    return found


def _values(result: Result, quantity: str) -> dict[str, float]:
    """The values of a quantity, by task and shots."""
    rows = [row for row in result.rows() if row["quantity"] == quantity]
    return {f"{row.get('task')} {row.get('shots')}": value for row in rows if isinstance(value := row["value"], float)}


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """The scores of each task, with intervals, and chance."""
    from plotly.graph_objects import Bar, Figure

    drawn: Figure = Figure()
    rows = [row for each in quantities(totals) for row in each.rows() if row["quantity"] != LOSS]
    for score in dict.fromkeys(row["quantity"] for row in rows):
        of = [row for row in rows if row["quantity"] == score]
        at = [f"{row['task']}, {row['shots']} shots" for row in of]
        drawn.add_trace(Bar(x=at, y=[row["value"] for row in of], error_y=error_bars(of), name=score))
    drawn.update_layout(title=TITLE, yaxis_title="share of items")
    return {"tasks": drawn}


def main() -> None:
    """`python -m probes.choice_tasks`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
