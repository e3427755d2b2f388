"""Does the network get more out of demonstrations in its context than another does?

The acc of the tasks of `probes.choice_tasks`, the same items after each number of shots, mean over tasks:

    acc            without a demonstration; and the mean over the numbers of shots from 1 on
    shots' worth   the second minus the first
    gap            each minus that of the network named by --against, paired by item; of shots' worth, how much wider
                   the gap is with demonstrations: the paper prints .9 points without and 1.9 with 1 to 8

Beside each acc stand chance and what the best shortcut gets.
"""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from probes import choice_tasks
from probes.choice_tasks import ACC, ALL, TASKS, Layout, Options, accuracies, floors, needs, num_items
from probes.running import command
from probes.running.probe import Result, answer
from probes.running.source import SampleSet, Subject
from probes.statistics.grid import Level, Place
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Sums, Totals
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError, shown

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from model.hooks.looped_model import LoopedModel

__all__ = ["Options", "needs"]  # the same items, from no site

TITLE = "Few-shot gap"
DATA = DataOptions(data=TASKS, samples=128, shots=(0, 1, 2, 4, 8))
OVERVIEW = ()

WORTH, GAP = "shots' worth", ", gap"


def choose_samples(subject: Subject, data: DataOptions, options: Options) -> tuple[SampleSet, ...]:
    """All tasks together. Raises UserError for shots without 0 or without another, for data that is no task, and as
    `choice_tasks` does."""
    if 0 not in data.shots or len(data.shots) < 2:
        raise UserError(f"shots must hold 0 and another number; got {' '.join(map(str, data.shots))}")
    if others := [name for name in data.data if name not in TASKS]:
        raise UserError(f"data must name tasks, {', '.join(TASKS)}; got {shown(others[0])}")
    return choice_tasks.choose_samples(subject, data, options)


def start_with(network: "LoopedModel", data: SampleSet, options: Options) -> Sums[Layout, Options]:
    """The sums of `choice_tasks`."""
    return choice_tasks.sums_of(network, data, options, quantities)


def result(sums: Sums[Layout, Options]) -> Result:
    """Acc without and with demonstrations."""
    return answer(sums, figures)


def curves(totals: Totals[Layout, Options]) -> dict[str, dict[int, NDArray[np.float64]]]:
    """Acc (R,) by shots, by task."""
    found: dict[str, dict[int, NDArray[np.float64]]] = {}
    for (task, shots), value_RK in accuracies(totals).items():
        found.setdefault(task, {})[shots] = value_RK[:, 0]
    return found


def figures(totals: Totals[Layout, Options]) -> "dict[str, Figure]":
    """Acc of each task against shots."""
    from plotly.graph_objects import Figure, Scatter

    drawn: Figure = Figure()
    for task, by_shots in curves(totals).items():
        drawn.add_trace(Scatter(x=list(by_shots), y=[float(x_R[0]) for x_R in by_shots.values()], name=task))
    drawn.update_layout(title=TITLE, xaxis_title="demonstrations", yaxis_title=ACC)
    return {"shots": drawn}


def quantities(totals: Totals[Layout, Options]) -> list[Quantity]:
    """Acc of all tasks, without and with demonstrations and at each number of them, then of each task."""
    return [each for task, by_shots in _all_first(curves(totals)) for each in _of_task(totals, task, by_shots)]


def against(totals: Totals[Layout, Options], other: Totals[Layout, Options]) -> list[Quantity]:
    """The same quantities minus the other network's, paired by item."""
    theirs = curves(other)
    gaps = {task: {shots: x_R - theirs[task][shots] for shots, x_R in by_shots.items()}
            for task, by_shots in curves(totals).items()}  # fmt: skip
    found = [each for task, by_shots in _all_first(gaps) for each in _of_task(totals, task, by_shots)]
    return [replace(each, name=each.name + GAP, nulls={"no_difference": 0.0}) for each in found]


def _all_first(
    of_tasks: dict[str, dict[int, NDArray[np.float64]]],
) -> list[tuple[str, dict[int, NDArray[np.float64]]]]:
    return sorted(of_tasks.items(), key=lambda each: each[0] != ALL)


def _of_task(totals: Totals[Layout, Options], task: str, by_shots: dict[int, NDArray[np.float64]]) -> list[Quantity]:
    """Numbers of one task: headline where it is all of them."""
    some = [shots for shots in by_shots if shots]
    with_R = np.mean([by_shots[shots] for shots in some], axis=0)
    span = f"{min(some)}-{max(some)}" if len(some) > 1 else str(some[0])
    each = {ACC: {"0": by_shots[0], span: with_R, **{str(shots): by_shots[shots] for shots in some}},
            WORTH: {f"{span} - 0": with_R - by_shots[0]}}  # fmt: skip
    found = []
    for name, values in each.items():
        for shots, value_R in values.items():
            level: Level = "headline" if task == ALL and shots in ("0", span, f"{span} - 0") else "split"
            nulls = floors(totals, ACC, task, int(shots)) if shots.isdigit() else {}
            places = [Place(level, {"task": task, "shots": shots}, [0], [])]
            n = num_items(totals, task, 0)
            found.append(Quantity(name=name, value_RLH=value_R[:, None, None], places=places, n=n, nulls={**nulls}))
    return found


def main() -> None:
    """`python -m probes.few_shot_gap`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
