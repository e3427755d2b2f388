"""What a looped network saves: fit the scaling law to your own runs, or ask the law that the paper prints.

    python -m smelt_interp.scaling fit runs.csv
    python -m smelt_interp.scaling printed --compute 1e21

95% intervals are percentiles over bootstrap draws of grid cells; each architecture's cells are drawn on their own. The
law and its frontier: `smelt_interp.scaling.law`; how it is fitted: `smelt_interp.scaling.fit`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from pydantic import Field

from smelt_interp.paper import printed
from smelt_interp.scaling.csv_columns import BASELINE, LARGE, LOSS, SHARE, read_columns
from smelt_interp.scaling.fit import Grid, LawFit, bootstrap, fit
from smelt_interp.scaling.law import Numbers, ScalingLaw, compute_gain, printed_law, rounding_interval
from smelt_interp.scaling.robust_fit import Draws, interval
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.progress import Progress
from smelt_interp.terminal.tables import MISSING, Cell, Table, compact, print_json, print_table
from smelt_interp.validation import Seed, validated

_GAINS = ("scaling_law", "ce_gain", "rows")
PRINTED_BUDGETS = tuple(printed.number(*_GAINS, index, "compute") for index in range(printed.length(*_GAINS)))
PRINTED_SPARSITIES = tuple(level for level in printed.numbers("sparsity", "levels") if level > 0)
"""Where the paper prints gains."""

ALL_DOMAINS = "all"
"""The domain of a file without a domain column."""


def read_grids(path: Path) -> dict[str, dict[str, Grid]]:
    """Grids by domain, then architecture, from a CSV of columns architecture, flops_per_token, sparsity, tokens, loss.

    A column `domain` is optional; without it the one domain is "all". Raises `UserError` for anything that cannot be
    fitted, with the line where there is one.
    """
    numbers = {"flops_per_token": LARGE, "sparsity": SHARE, "tokens": LARGE, "loss": LOSS}
    points = read_columns(path, ("architecture",), numbers, ("domain",))
    if "domain" not in points:
        points["domain"] = ALL_DOMAINS
    grids: dict[str, dict[str, Grid]] = {}
    for (domain, architecture), chosen in points.groupby(["domain", "architecture"], sort=False):
        grid = Grid(**{name: chosen[name].to_numpy() for name in numbers})
        grid.check(f"{path}: architecture {architecture}, domain {domain}")
        grids.setdefault(domain, {})[architecture] = grid
    return grids


@validated
class Question:
    """Where the frontier is asked."""

    compute: Annotated[tuple[Annotated[float, Field(gt=0, le=1e40)], ...], Field(min_length=1)] = PRINTED_BUDGETS
    """Training FLOPs, one or more budgets."""
    sparsity: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=1)] = PRINTED_SPARSITIES
    """Sparsity levels, one or more."""
    json: bool = False
    """Print JSON."""


@validated
class DrawOptions(Question):
    """Where the frontier is asked, and how its intervals are drawn."""

    draws: Draws = 2000
    """Bootstrap draws."""
    seed: Seed = 0
    """Of the bootstrap."""


@validated
class FitOptions(DrawOptions):
    """Fit the law to your own runs: coefficients, frontier, and compute saved, each with a 95% interval."""

    runs: tyro.conf.Positional[Path]
    """CSV: architecture, flops_per_token (training), sparsity, tokens, loss (nats); domain if there are several.
    Gains are of each architecture over the one named baseline."""


@validated
class PrintedOptions(Question):
    """The frontier and the gains of the coefficients that the paper prints, with the interval of their rounding."""


Record = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One grid, its fit, and the laws of its bootstrap draws."""

    grid: Grid
    fit: LawFit
    drawn: ScalingLaw

    @property
    def laws(self) -> tuple[ScalingLaw, ScalingLaw]:
        """The fitted law, and the drawn ones."""
        return self.fit.law, self.drawn


Fits = dict[str, dict[str, Fitted]]
"""By domain, then architecture."""


def fit_grids(grids: dict[str, dict[str, Grid]], draws: int, seed: int, show: Callable[[int], None]) -> Fits:
    """Fit every grid. `show` is called with the number of bootstrap draws done, over all grids."""
    generator = np.random.default_rng(seed)
    fits: Fits = {}
    done = 0
    for domain, architectures in grids.items():
        fits[domain] = {}
        for name, grid in architectures.items():
            fitted = fit(grid)
            drawn = bootstrap(grid, fitted, draws, generator, _after(done, show))
            fits[domain][name] = Fitted(grid=grid, fit=fitted, drawn=drawn)
            done += draws
    return fits


def fit_report(found: Fits, options: DrawOptions) -> Record:
    """Everything that the command prints about a file's grids, as plain values; infinite bounds become None."""
    fits: list[Record] = []
    frontier: list[Record] = []
    gains: list[Record] = []
    for domain, architectures in found.items():
        for name, fitted in architectures.items():
            law, drawn = fitted.laws
            where: Record = {"domain": domain, "architecture": name}
            counts: Record = {
                "points": len(fitted.grid.loss),
                "cells": int(fitted.grid.cell_N.max()) + 1,
                "rmse_nats": fitted.fit.rmse_nats,
            }
            fits.append(where | counts | {"coefficients": _with_intervals(law.figures(), drawn.figures())})
            for at in _places(options):
                frontier.append(where | at | _with_intervals(law.best(**at), drawn.best(**at)))
        for name in against_baseline(architectures):
            pairs = zip(architectures[BASELINE].laws, architectures[name].laws, strict=True)
            (base, looped), (base_draws, looped_draws) = pairs
            for at in _places(options):
                values, draws = compute_gain(base, looped, **at), compute_gain(base_draws, looped_draws, **at)
                gain = _with_intervals({"gain": values[()]}, {"gain": draws})
                gains.append({"domain": domain, "architecture": name} | at | gain)
    return {"seed": options.seed, "draws": options.draws, "fits": fits, "frontier": frontier, "gains": gains}


def against_baseline(architectures: Iterable[str]) -> list[str]:
    """The architectures whose gains can be told: all but the baseline, none without it."""
    names = list(architectures)
    return [name for name in names if name != BASELINE] if BASELINE in names else []


def _after(done: int, show: Callable[[int], None]) -> Callable[[int], None]:
    return lambda count: show(done + count)


def _places(question: Question) -> Iterator[dict[str, float]]:
    for compute, sparsity in itertools.product(question.compute, question.sparsity):
        yield {"compute": compute, "sparsity": sparsity}


def _with_intervals(values: dict[str, Numbers], draws: dict[str, Numbers]) -> Record:
    found: Record = {}
    for name, value in values.items():
        low, high = interval(np.asarray(draws[name]))
        found[name] = {"value": _finite(value), "low": _finite(low), "high": _finite(high)}
    return found


def _finite(value: Numbers) -> float | None:
    return float(value) if np.isfinite(value) else None


def printed_report(options: PrintedOptions) -> Record:
    """Frontier and gains of the printed coefficients, as plain values; gains carry the interval of the rounding."""
    laws = {"baseline": printed_law("baseline"), "smelt": printed_law("smelt")}
    fits: list[Record] = []
    frontier: list[Record] = []
    gains: list[Record] = []
    for name, law in laws.items():
        where: Record = {"architecture": name}
        fits.append(where | {"coefficients": _floats(law.figures())})
        frontier += [where | at | _floats(law.best(**at)) for at in _places(options)]
    for at in _places(options):
        low, high = rounding_interval(**at)
        value = compute_gain(laws["baseline"], laws["smelt"], **at)
        gain = {"value": _finite(value), "low": _finite(low), "high": _finite(high)}
        gains.append({"architecture": "smelt", **at, "gain": gain})
    return {"fits": fits, "frontier": frontier, "gains": gains}


def _floats(values: dict[str, Numbers]) -> Record:
    return {name: float(value) for name, value in values.items()}


def tables(report: Record) -> list[Table]:
    """Coefficients, frontier, and the gains where there are any."""
    fits, frontier, gains = (report[key] for key in ("fits", "frontier", "gains"))
    assert isinstance(fits, list)
    assert isinstance(frontier, list)
    assert isinstance(gains, list)
    # One line a coefficient: seven columns of intervals would not fit a terminal.
    lines = [
        {**{key: row[key] for key in row if key != "coefficients"}, "coefficient": letter, "value": value}
        for row in fits
        for letter, value in row["coefficients"].items()
    ]
    return [
        Table(title, list(rows[0]), [[_cell(*item) for item in row.items()] for row in rows])
        for title, rows in (
            ("Coefficients", lines),
            ("Compute-optimal frontier", frontier),
            ("Compute saved over the baseline at equal loss", gains),
        )
        if rows
    ]


NO_GAINS = f"no gains: they are measured against an architecture named {BASELINE}, beside another"


def brackets(options: DrawOptions | PrintedOptions) -> str:
    """What the numbers in brackets are."""
    if isinstance(options, PrintedOptions):
        return "in brackets: the gains that coefficients rounding to the printed ones allow"
    return f"in brackets: 95% interval, {options.draws} bootstrap draws over grid cells, seed {options.seed}"


def _cell(name: str, value: object) -> Cell:
    if isinstance(value, dict):
        absent = "never" if name == "gain" else MISSING
        bounds = [compact(bound, 4) if isinstance(bound, float) else absent for bound in value.values()]
        return f"{bounds[0]} [{bounds[1]}, {bounds[2]}]"
    assert isinstance(value, (str, int, float))
    return value


def _chosen(
    options: tyro.conf.OmitSubcommandPrefixes[
        Annotated[FitOptions, tyro.conf.subcommand("fit")] | Annotated[PrintedOptions, tyro.conf.subcommand("printed")]
    ],
) -> FitOptions | PrintedOptions:
    return options


def main() -> None:
    """Fit a file of runs, or show what the printed coefficients say."""
    options = parse(_chosen, prog="python -m smelt_interp.scaling", description=__doc__)
    if isinstance(options, PrintedOptions):
        report = printed_report(options)
    else:
        grids = read_grids(options.runs)
        progress = Progress("bootstrap draws", options.draws * sum(len(grid) for grid in grids.values()))
        report = fit_report(fit_grids(grids, options.draws, options.seed, progress.show), options)
    if options.json:
        print_json(report)
        return
    for table in tables(report):
        print_table(table)
    if not report["gains"]:
        print(NO_GAINS)
    print(brackets(options))
