"""What a looped network saves: fit the scaling law to your own runs, or ask the law that the paper prints.

    python -m smelt_interp.scaling fit runs.csv
    python -m smelt_interp.scaling printed --compute 1e21

95% intervals are percentiles over bootstrap draws of grid cells; each architecture's cells are drawn on their own. The
law and its frontier: `smelt_interp.scaling.law`; how it is fitted: `smelt_interp.scaling.fit`.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from smelt_interp.scaling.fit import Grid, LawFit, bootstrap, fit
from smelt_interp.scaling.law import (
    Numbers,
    ScalingLaw,
    coefficients,
    compute_gain,
    printed_law,
    rounding_interval,
)
from smelt_interp.scaling.robust_fit import check_draws, interval
from smelt_interp.scaling.runs import BASELINE, LARGE, POSITIVE, SHARE, read_columns
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.progress import Progress
from smelt_interp.terminal.tables import Cell, Table, compact, print_json, print_table

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
    columns = read_columns(
        path,
        words=("architecture",),
        numbers={"flops_per_token": LARGE, "sparsity": SHARE, "tokens": LARGE, "loss": POSITIVE},
        optional=("domain",),
    )
    architectures = np.array(columns.words["architecture"])
    domains = np.array(columns.words.get("domain", [ALL_DOMAINS] * len(architectures)))
    grids: dict[str, dict[str, Grid]] = {}
    for domain in dict.fromkeys(domains.tolist()):
        grids[domain] = {}
        for architecture in dict.fromkeys(architectures[domains == domain].tolist()):
            chosen = (domains == domain) & (architectures == architecture)
            grid = Grid(**{name: values[chosen] for name, values in columns.numbers.items()})
            grid.check(f"{path}: architecture {architecture}, domain {domain}")
            grids[domain][architecture] = grid
    return grids


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Where the frontier is asked."""

    compute: tuple[float, ...] = PRINTED_BUDGETS
    """Training FLOPs, one or more budgets."""
    sparsity: tuple[float, ...] = PRINTED_SPARSITIES
    """Sparsity levels, one or more."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        for name in ("compute", "sparsity"):
            if not getattr(self, name):
                raise UserError(f"--{name} must name at least one value; got none")
        for value in self.compute:
            if not 0 < value < float("inf"):
                raise UserError(f"--compute must be above 0; got {value}")
        for value in self.sparsity:
            if not 0 <= value < 1:
                raise UserError(f"--sparsity must be a share of at least 0 and below 1; got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions(Question):
    """Where the frontier is asked, and how its intervals are drawn."""

    draws: int = 2000
    """Bootstrap draws."""
    seed: int = 0
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        Question.__post_init__(self)
        check_draws(self.draws, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions(DrawOptions):
    """Fit the law to your own runs: coefficients, frontier, and compute saved, each with a 95% interval."""

    runs: tyro.conf.Positional[Path]
    """CSV: architecture, flops_per_token (training), sparsity, tokens, loss (nats); domain if there are several.
    Gains are of each architecture over the one named baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedOptions(Question):
    """The frontier and the gains of the coefficients that the paper prints, with the interval of their rounding."""


Row = dict[str, object]


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


def fit_report(found: Fits, options: DrawOptions) -> Row:
    """Everything that the command prints about a file's grids, as plain values; infinite bounds become None."""
    fits: list[Row] = []
    frontier: list[Row] = []
    gains: list[Row] = []
    for domain, architectures in found.items():
        for name, fitted in architectures.items():
            law, drawn = fitted.laws
            where: Row = {"domain": domain, "architecture": name}
            values = coefficients(law) | {"gamma": law.gamma}
            spread = coefficients(drawn) | {"gamma": drawn.gamma}
            fits.append(
                {
                    **where,
                    "points": len(fitted.grid.loss),
                    "cells": int(fitted.grid.cell_N.max()) + 1,
                    "rmse_nats": fitted.fit.rmse_nats,
                    "coefficients": {letter: _with_interval(values[letter], spread[letter]) for letter in values},
                }
            )
            frontier += [{**where, **row} for row in _frontier(law, drawn, options)]
        for name in against_baseline(architectures):
            gains += [
                {"domain": domain, "architecture": name, **row}
                for row in _gains(architectures[BASELINE].laws, architectures[name].laws, options)
            ]
    return {"seed": options.seed, "draws": options.draws, "fits": fits, "frontier": frontier, "gains": gains}


def against_baseline(architectures: Iterable[str]) -> list[str]:
    """The architectures whose gains can be told: all but the baseline, none without it."""
    names = list(architectures)
    return [name for name in names if name != BASELINE] if BASELINE in names else []


def _after(done: int, show: Callable[[int], None]) -> Callable[[int], None]:
    return lambda count: show(done + count)


def _with_interval(value: Numbers, draws: Numbers) -> Row:
    low, high = interval(np.asarray(draws))
    return {"value": _finite(value), "low": _finite(low), "high": _finite(high)}


def _finite(value: Numbers) -> float | None:
    return float(value) if np.isfinite(value) else None


def _frontier(law: ScalingLaw, drawn: ScalingLaw, question: Question) -> list[Row]:
    return [
        {
            "compute": compute,
            "sparsity": sparsity,
            "flops_per_token": _with_interval(
                law.best_flops_per_token(compute, sparsity), drawn.best_flops_per_token(compute, sparsity)
            ),
            "tokens": _with_interval(law.best_tokens(compute, sparsity), drawn.best_tokens(compute, sparsity)),
            "tokens_per_parameter": _with_interval(
                law.tokens_per_parameter(compute, sparsity), drawn.tokens_per_parameter(compute, sparsity)
            ),
            "loss": _with_interval(law.best_loss(compute, sparsity), drawn.best_loss(compute, sparsity)),
        }
        for compute, sparsity in itertools.product(question.compute, question.sparsity)
    ]


def _gains(
    baseline: tuple[ScalingLaw, ScalingLaw], looped: tuple[ScalingLaw, ScalingLaw], question: Question
) -> list[Row]:
    return [
        {
            "compute": compute,
            "sparsity": sparsity,
            "gain": _with_interval(
                compute_gain(baseline[0], looped[0], compute, sparsity)[()],
                compute_gain(baseline[1], looped[1], compute, sparsity),
            ),
        }
        for compute, sparsity in itertools.product(question.compute, question.sparsity)
    ]


def printed_report(options: PrintedOptions) -> Row:
    """Frontier and gains of the printed coefficients, as plain values; gains carry the interval of the rounding."""
    baseline, looped = printed_law("baseline"), printed_law("smelt")
    fits: list[Row] = []
    frontier: list[Row] = []
    for name, law in (("baseline", baseline), ("smelt", looped)):
        values = coefficients(law) | {"gamma": law.gamma}
        fits.append({"architecture": name, "coefficients": {letter: float(values[letter]) for letter in values}})
        for compute, sparsity in itertools.product(options.compute, options.sparsity):
            frontier.append(
                {
                    "architecture": name,
                    "compute": compute,
                    "sparsity": sparsity,
                    "flops_per_token": float(law.best_flops_per_token(compute, sparsity)),
                    "tokens": float(law.best_tokens(compute, sparsity)),
                    "tokens_per_parameter": float(law.tokens_per_parameter(compute, sparsity)),
                    "loss": float(law.best_loss(compute, sparsity)),
                }
            )
    gains: list[Row] = []
    for compute, sparsity in itertools.product(options.compute, options.sparsity):
        low, high = rounding_interval(compute, sparsity)
        value = float(compute_gain(baseline, looped, compute, sparsity))
        gain = {"value": _finite(value), "low": _finite(low), "high": _finite(high)}
        gains.append({"architecture": "smelt", "compute": compute, "sparsity": sparsity, "gain": gain})
    return {"fits": fits, "frontier": frontier, "gains": gains}


def tables(report: Row) -> list[Table]:
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
        Table(title, list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
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


def _cell(value: object) -> Cell:
    if isinstance(value, dict):
        bounds = [compact(bound, 4) if isinstance(bound, float) else "never" for bound in value.values()]
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
