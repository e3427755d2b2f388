"""What a network that visits each layer once has where it is as many layers deep: depth against visit.

The second visit of a layer is also a deeper place, so whatever changes there may change with depth alone. Beside the
number of a step s stands the other network's of its own step s, and beside a mean over looped layers the mean of the
layers at those depths; where the other network ends earlier, of those that it has.
"""

import re
from collections.abc import Sequence
from statistics import fmean

from probes.running.report import keys_of
from probes.statistics.grid import Cell
from probes.statistics.quantities import NULL_PREFIX, Record
from smelt_interp.architecture import Architecture

AT_DEPTH = "_at_depth"
"""The end of the null's name."""
Key = tuple[Cell, ...]


def layers_of(row: Record) -> list[int]:
    """The layers that a row is about, from 0: of `looped 3-6`, `middle 3, 5` or `5`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", str(row.get("layers") or ""))
    return [layer for first, last in ranges for layer in range(int(first) - 1, int(last or first))]


def visits_of(row: Record) -> list[int]:
    """The visits, from 0: one, or for `2 - 1` the later and the earlier; none where a row compares visits otherwise."""
    visit = row.get("visit")
    if isinstance(visit, int):
        return [visit - 1]
    change = re.fullmatch(r"(\d+) - (\d+)", str(visit))
    return [int(number) - 1 for number in change.groups()] if change else []


def at_depth(
    rows: Sequence[Record], architecture: Architecture, other: Sequence[Record], name: str
) -> tuple[list[Record], list[str]]:
    """The rows with one more null, `NAME_at_depth`, and what is to be said about it; as they were where no row has one.

    `other`: the rows of the network NAME, which visits each layer once. Heads and experts of other layers are others,
    so that they have none.
    """
    names = [column for column in keys_of(rows) if column not in ("layers", "visit")]

    def key(row: Record) -> Key:
        return tuple(row.get(column) for column in names)

    # The other network's number of each layer, and where this one's layers and visits stand in its plan.
    by_layer: dict[Key, dict[int, float]] = {}
    for row in other:
        if row["level"] == "layer" and isinstance(row["value"], float) and visits_of(row) == [0]:
            by_layer.setdefault(key(row), {}).update(dict.fromkeys(layers_of(row), row["value"]))
    step_of = {tuple(step): index for index, step in enumerate(architecture.steps)}

    def control(row: Record) -> float | None:
        values = by_layer.get(key(row), {})
        means = []
        for visit in visits_of(row):
            depths = [step_of[layer, visit] for layer in layers_of(row) if (layer, visit) in step_of]
            found = [values[depth] for depth in depths if depth in values]
            if not found:
                return None
            means.append(fmean(found))
        return means[0] - sum(means[1:]) if means else None

    # The column, unless it would be empty.
    column = f"{NULL_PREFIX}{name}{AT_DEPTH}"
    measured = [control(row) if row["level"] in ("headline", "layer") else None for row in rows]
    if all(value is None for value in measured):
        return list(rows), []
    deepest = max(layer for values in by_layer.values() for layer in values)
    beyond = f"; it has none after {deepest + 1} layers" if deepest + 1 < len(architecture.steps) else ""
    joined: list[Record] = [{**row, column: value} for row, value in zip(rows, measured, strict=True)]
    return joined, [f"{name} at depth: its layers as many layers deep as each step{beyond}"]
