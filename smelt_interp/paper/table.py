"""Every figure of the paper that can be recomputed, recomputed: printed, ours, and whether they agree.

match              ours rounds to the printed figure
within rounding    ours does not, but lies where the rounding of the printed figures it is computed from allows
contradiction      the printed figure disagrees with figures printed beside it; the reason says how
not recomputable   needs the paper's runs, weights or data, or a definition that is not printed
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Literal, get_args

import numpy as np

from smelt_interp.costs.budget import Budget, budget, last_digit, mismatch, printed_geometry, row_index
from smelt_interp.costs.presets import PAPER_ATTENDED_TOKENS, PAPER_PAIRS, PAPER_ROWS
from smelt_interp.costs.serving import Load, gpu, serving
from smelt_interp.costs.sparsity import fully_active_control, sparsity
from smelt_interp.errors import run_command
from smelt_interp.paper import printed
from smelt_interp.plan import plan
from smelt_interp.scaling.calibration import win_rate
from smelt_interp.scaling.law import (
    Architecture,
    compute_gain,
    printed_law,
    rounding_corners,
    rounding_interval,
)
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, compact, print_json, print_table

Verdict = Literal["match", "within rounding", "contradiction", "not recomputable"]
Value = str | float | None

ARCHITECTURES: tuple[Architecture, ...] = ("baseline", "smelt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One printed figure."""

    name: str
    printed: Value
    ours: Value
    """None where there is nothing to compute it from."""
    verdict: Verdict
    reason: str = ""


def last_place(value: float) -> float:
    """What one unit of the last digit of a decimal is worth, trailing zeros left out: 0.125 -> 0.001, 4.2e9 -> 1e8."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return 10.0**exponent


def rounds_to(ours: float, figure: float, unit: float) -> bool:
    """Whether ours, rounded to the unit, is the figure; half a unit off counts as rounded either way."""
    return abs(ours - figure) <= 0.5 * unit * (1 + 1e-9)


def _compared(name: str, figure: float, ours: float, otherwise: str, unit: float | None = None) -> Row:
    """A match, or a contradiction for the given reason; the unit is the figure's last place unless given."""
    agrees = rounds_to(ours, figure, last_place(figure) if unit is None else unit)
    if agrees:
        return Row(name=name, printed=figure, ours=ours, verdict="match")
    return Row(name=name, printed=figure, ours=ours, verdict="contradiction", reason=otherwise)


def _allowed(name: str, figure: float, ours: float, low: float, high: float, unit: float) -> Row:
    """A match, or within rounding when some inputs that round to the printed ones give the printed figure."""
    if rounds_to(ours, figure, unit):
        return Row(name=name, printed=figure, ours=ours, verdict="match")
    half = 0.5 * unit
    held = low <= figure + half and figure - half <= high
    return Row(
        name=name,
        printed=figure,
        ours=ours,
        verdict="within rounding" if held else "contradiction",
        reason=f"the printed coefficients' rounding allows {compact(low, 5)} to {compact(high, 5)}",
    )


def _out_of_reach(prefix: str, reason: str, *path: printed.Key) -> Iterator[Row]:
    """Every figure below a path, as not recomputable."""
    value = printed.entry(*path)
    if isinstance(value, (dict, list)):
        if isinstance(value, list) and all(not isinstance(entry, (dict, list)) for entry in value):
            shown = " to ".join(compact(number) for number in printed.numbers(*path))
            yield Row(name=prefix, printed=shown, ours=None, verdict="not recomputable", reason=reason)
            return
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _out_of_reach(f"{prefix} {key}".replace("_", " "), reason, *path, key)
        return
    shown_value = value if isinstance(value, str) else printed.number(*path)
    yield Row(name=prefix, printed=shown_value, ours=None, verdict="not recomputable", reason=reason)


def _counts(scale: str, architecture: str) -> Budget:
    return budget(PAPER_ROWS[scale, architecture], PAPER_ATTENDED_TOKENS)


def grid_rows() -> Iterator[Row]:
    """The table of matched pairs."""
    for scale, architecture in PAPER_ROWS:
        row = ("grid", "rows", row_index(scale, architecture), "printed")
        counts, baseline = _counts(scale, architecture), _counts(scale, "baseline")
        ratio_to_itself = "a Baseline's FLOPs over its own are 1; printed is the ratio of the SMELT row"
        geometry = {found.architecture: found for found in printed_geometry(scale)}[architecture]
        name = f"{scale} {architecture}"
        for figure, ours in (
            ("active", float(counts.parameters.active)),
            ("total", float(counts.parameters.total)),
            ("flop_ratio", counts.flops.training / baseline.flops.training),
            ("kv_ratio", counts.kv_bytes / baseline.kv_bytes),
            ("train_flops_per_token", counts.flops.training),
        ):
            if figure in printed.names(*row):
                label = f"{name} {figure.replace('_', ' ')}"
                yield _compared(label, printed.number(*row, figure), ours, ratio_to_itself, last_digit(figure))
        agree = geometry.printed_heads == geometry.derived_heads
        yield Row(
            name=f"{name} heads x KV heads x width",
            printed=" x ".join(map(str, geometry.printed_heads)),
            ours=" x ".join(map(str, geometry.derived_heads)),
            verdict="match" if agree else "contradiction",
            # The first is about the heads; the FLOP ratio has a row of its own.
            reason="" if agree else geometry.contradictions[0],
        )
        yield _sparsity_row(scale, architecture, counts)
        if architecture == "smelt":
            first, last = printed.numbers("architecture", "looped_layers_1_based_inclusive", scale)
            config = PAPER_ROWS[scale, architecture]
            same = (config.loop_start + 1, config.loop_stop) == (first, last)
            yield Row(
                name=f"{name} looped layers",
                printed=f"{first:.0f}-{last:.0f}",
                ours=f"{config.loop_start + 1}-{config.loop_stop}",
                verdict="match" if same else "contradiction",
                reason="" if same else "the span rule gives other layers",
            )
    yield from _largest_mismatches()


def _sparsity_row(scale: str, architecture: str, counts: Budget) -> Row:
    figure = printed.number("grid", "rows", row_index(scale, architecture), "printed", "sparsity")
    control = budget(fully_active_control(PAPER_ROWS[scale, "baseline"]), PAPER_ATTENDED_TOKENS)
    ours = sparsity(counts, control).sparsity
    name = f"{scale} {architecture} sparsity"
    if architecture == "baseline":
        return _compared(name, figure, ours, "the fully active Baseline gives another", last_digit("sparsity"))
    reason = "the control of a looped row is not printed; ours takes the fully active Baseline"
    return Row(name=name, printed=figure, ours=ours, verdict="not recomputable", reason=reason)


def _largest_mismatches() -> Iterator[Row]:
    found = [mismatch(_counts(scale, "smelt"), _counts(scale, "baseline")) for scale in PAPER_PAIRS]
    for key, ours in (
        ("flops", max(abs(pair.flops) for pair in found)),
        ("total_params", max(abs(pair.total_parameters) for pair in found)),
        ("kv_cache", max(abs(pair.kv_bytes) for pair in found)),
    ):
        figure = printed.number("grid", "max_mismatch_printed", key)
        holds = ours <= figure + 0.5 * last_digit("flop_ratio")
        yield Row(
            name=f"grid mismatch of {key.replace('_', ' ')}, at most",
            printed=figure,
            ours=ours,
            verdict="match" if holds else "contradiction",
            reason="the largest of the four pairs, within the printed bound" if holds else "a pair is beyond it",
        )


def dilemma_rows() -> Iterator[Row]:
    """The dense dilemma: what looping costs when there are no experts to add back."""
    config = PAPER_PAIRS["200M"].smelt
    executed = len(plan(config)) / config.num_layers
    other = "the middle half visited twice gives another"
    for key, ours in (
        ("executed_over_physical", executed),
        ("width_factor", math.sqrt(1 / executed)),
        ("capacity_left", 1 / executed),
    ):
        figure = printed.number("dense_dilemma", key)
        yield _compared(f"dense dilemma {key.replace('_', ' ')}", figure, ours, other)
    yield from _out_of_reach(
        "dense dilemma repeat exponent", "what it was fitted to is not printed", "dense_dilemma", "repeat_exponent"
    )


def scaling_rows() -> Iterator[Row]:
    """The scaling law, its frontier and the gains."""
    fit = ("scaling_law", "fit")
    per_architecture = printed.number(*fit, "cells") * printed.number("architecture", "decay_branches")
    yield _compared(
        "points an architecture", printed.number(*fit, "points_per_architecture"), per_architecture, "cells x branches"
    )
    yield _compared(
        "points in all", printed.number(*fit, "points_in_all"), per_architecture * len(ARCHITECTURES), "twice as many"
    )
    for architecture in ARCHITECTURES:
        corners = np.asarray(rounding_corners(architecture).gamma)
        yield _allowed(
            f"gamma {architecture}",
            printed.number("scaling_law", "gamma", architecture),
            float(printed_law(architecture).gamma),
            float(corners.min()),
            float(corners.max()),
            printed.number("scaling_law", "last_digit", "gamma"),
        )
        yield from _out_of_reach(
            f"law {architecture}", "needs the losses of the 144 points", "scaling_law", architecture
        )
    yield from _gain_rows()
    yield from _token_rows()


def _gain_rows() -> Iterator[Row]:
    table = ("scaling_law", "ce_gain", "rows")
    unit = printed.number("scaling_law", "last_digit", "gain")
    baseline, smelt = printed_law("baseline"), printed_law("smelt")
    for index in range(printed.length(*table)):
        compute = printed.number(*table, index, "compute")
        for level in printed.names(*table, index):
            if level == "compute":
                continue
            figure, low_printed, high_printed = printed.numbers(*table, index, level)
            low, high = rounding_interval(compute, float(level))
            name = f"gain at {compute:.0e} FLOPs, {level} sparse"
            ours = float(compute_gain(baseline, smelt, compute, float(level)))
            yield _allowed(name, figure, ours, low, high, unit)
            yield Row(
                name=f"{name}, 95% interval",
                printed=f"{compact(low_printed)} to {compact(high_printed)}",
                ours=None,
                verdict="not recomputable",
                reason="needs the losses of the 144 points",
            )


def _token_rows() -> Iterator[Row]:
    key = "tokens_per_dense_equivalent_parameter_at_1e21"
    compute = float(key.rpartition("_")[2])
    levels = [float(level) for level in printed.names("scaling_law", "ce_gain", "rows", 0) if level != "compute"]
    ratios = [
        float(printed_law(architecture).tokens_per_parameter(compute, level))
        for architecture in ARCHITECTURES
        for level in levels
    ]
    for end, figure, ours in zip(
        ("least", "most"), printed.numbers("scaling_law", key, "range"), (min(ratios), max(ratios)), strict=True
    ):
        yield _compared(
            f"tokens a dense-equivalent parameter at {compute:.0e}, {end}", figure, ours, "D* / (F* / 6)", 1.0
        )


def downstream_rows() -> Iterator[Row]:
    """Scores: what follows from printed counts, and what needs the runs."""
    for metric in printed.names("downstream", "win_rates"):
        wins, pairs = (int(value) for value in printed.numbers("downstream", "win_rates", metric))
        found = win_rate(wins, pairs)
        yield Row(
            name=f"win rate {metric.replace('_', ' ')}",
            printed=f"{wins} of {pairs}",
            ours=f"{found.rate:.3f} [{found.low:.3f}, {found.high:.3f}]",
            verdict="not recomputable",
            reason="needs the scores; ours is the rate with its exact 95% interval",
        )
    scales = [scale for scale in printed.names("downstream", "residuals") if scale in PAPER_PAIRS]
    for metric in printed.names("downstream", "residuals", "pooled"):
        figure = printed.number("downstream", "residuals", "pooled", metric)
        mean = sum(printed.number("downstream", "residuals", scale, metric) for scale in scales) / len(scales)
        yield _compared(
            f"excess residual {metric.replace('_', ' ')}, pooled", figure, mean, "the mean of the scales", 0.1
        )
    runs = "needs the scores of the paper's runs"
    for scale in scales:
        yield from _out_of_reach(f"excess residual {scale}", runs, "downstream", "residuals", scale)
    for key in ("domain_ce_gain_1e21_s95", "length_gain_ratio", "dyck_exact_match_k32", "few_shot_gap_pp"):
        yield from _out_of_reach(key.replace("_", " "), runs, "downstream", key)


def other_rows() -> Iterator[Row]:
    """Ablations, mechanism and serving."""
    yield from _out_of_reach(
        "200M validation loss, looped layers", "needs runs", "ablations_200M", "loop_span_val_loss"
    )
    for key in ("best_depth", "best_visits"):
        yield from _out_of_reach(f"200M {key.replace('_', ' ')}", "needs runs", "ablations_200M", key)
    for key in printed.names("mechanism"):
        if key != "sample":
            reason = "needs the paper's weights; the probes measure it on other networks"
            yield from _out_of_reach(key.replace("_", " "), reason, "mechanism", key)
    counts, baseline = _counts("200M", "smelt"), _counts("200M", "baseline")
    systems = "systems_200M"
    other = "the 200M pair gives another"
    ratio = counts.kv_bytes / baseline.kv_bytes
    yield _compared("200M KV entries ratio", printed.number(systems, "kv_entries_ratio"), ratio, other)
    passes = float(counts.executed_depth)
    yield _compared("200M KV passes", printed.number(systems, "kv_passes"), passes, other)
    block = serving(PAPER_PAIRS["200M"].smelt, gpu("h100"), Load(batch=1)).looped_block
    yield _compared(
        "200M looped block stored bytes",
        printed.number(systems, "looped_block_stored_bytes_printed"),
        block.stored_bytes,
        other,
    )
    yield _compared(
        "200M looped block active bytes",
        printed.number(systems, "looped_block_active_bytes_printed"),
        block.touched_bytes,
        "half of the printed active parameters lie in the looped block, two bytes each; no batch is named",
    )


def rows() -> list[Row]:
    """Every printed figure, budgets first."""
    return [*grid_rows(), *dilemma_rows(), *scaling_rows(), *downstream_rows(), *other_rows()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare every printed figure with ours."""

    verdict: tuple[Verdict, ...] = get_args(Verdict)
    """Show rows of these verdicts."""
    json: bool = False
    """Print JSON."""


def main() -> None:
    """Print the table of printed figures."""
    options = parse(Options, prog="python -m smelt_interp.paper", description=__doc__)
    every = rows()
    shown = [row for row in every if row.verdict in options.verdict]
    if options.json:
        print_json([asdict(row) for row in shown])
        return
    counted = ", ".join(f"{sum(row.verdict == name for row in every)} {name}" for name in get_args(Verdict))
    cells = [[row.name, _text(row.printed), _text(row.ours), row.verdict, row.reason] for row in shown]
    print_table(
        Table(
            "Printed figures of arXiv:2609.01343", ["figure", "printed", "ours", "verdict", "reason"], cells, [counted]
        )
    )


def _text(value: Value) -> str:
    return "" if value is None else value if isinstance(value, str) else compact(value, 7)


if __name__ == "__main__":
    run_command(main)
