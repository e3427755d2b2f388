"""Rows of several trainings as one: the mean over runs, with an interval over runs in place of that over documents."""

from collections.abc import Sequence

import numpy as np

from probes.running.report import keys_of
from probes.statistics.bootstrap import Estimate
from probes.statistics.grid import Cell
from probes.statistics.quantities import NULL_PREFIX, OTHER_PREFIX, Record
from smelt_interp.over_seeds import half_interval


def over_seeds(of_runs: Sequence[Sequence[Record]]) -> list[Record]:
    """The rows that every run has, each number its mean over runs; `low` and `high` are over runs, `n` counts them.

    Rows of one run are as they are.
    """
    first, *others = of_runs
    if not others:
        return list(first)
    names = keys_of(first)
    known = [{_key(row, names): row for row in rows} for rows in others]
    together = [[row, *(rows[_key(row, names)] for rows in known)]
                for row in first if all(_key(row, names) in rows for rows in known)]  # fmt: skip
    return [_mean(rows) for rows in together]


def _key(row: Record, names: Sequence[str]) -> tuple[Cell, ...]:
    return (row["level"], *(row.get(name) for name in names))


def _mean(rows: Sequence[Record]) -> Record:
    """One row of all runs. Where a run has no number there is none."""
    found = dict(rows[0])
    for name in rows[0]:
        of_network = name.startswith(OTHER_PREFIX) and not name.endswith(("_low", "_high"))
        if name == "value" or name.startswith(NULL_PREFIX) or of_network:
            ends = ("low", "high") if name == "value" else (f"{name}_low", f"{name}_high") if of_network else ()
            numbers = [cell for row in rows if isinstance(cell := row.get(name), float)]
            estimate = student_interval(numbers) if len(numbers) == len(rows) else None
            found[name] = estimate.value if estimate else None
            found |= dict(zip(ends, (estimate.low, estimate.high) if estimate else (None, None), strict=False))
    return {**found, "n": len(rows) if found["value"] is not None else None}


def student_interval(values: Sequence[float]) -> Estimate:
    """The mean of independent runs with its 95% interval by Student's law; two runs or more."""
    mean, half = float(np.mean(values)), half_interval(values)
    assert half is not None  # of one run rows stay as they are
    return Estimate(mean, mean - half, mean + half, len(values))
