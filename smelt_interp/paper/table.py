"""Every figure of the paper that can be recomputed, recomputed: printed, ours, and whether they agree.

match              ours rounds to the printed figure
within rounding    ours does not, but lies where the rounding of the printed figures it is computed from allows
contradiction      the printed figure disagrees with figures printed beside it; the reason says how
not recomputable   needs the paper's runs, weights or data, or a definition that is not printed
not printed        what a printed claim rests on, and no figure says
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np

from smelt_interp.costs.budget import Budget, budget, mismatch, printed_geometry, row_index
from smelt_interp.costs.presets import PAPER_ATTENDED_TOKENS, PAPER_PAIRS, PAPER_ROWS, PAPER_SPAN
from smelt_interp.costs.serving import Load, Serving, gpu, serving
from smelt_interp.costs.spans import LayerRange, middle_layers
from smelt_interp.costs.sparsity import fully_active_control, sparsity
from smelt_interp.paper import printed
from smelt_interp.paper.printed import Figure
from smelt_interp.scaling.calibration import win_rate
from smelt_interp.scaling.law import Architecture, compute_gain, printed_law, rounding_corners, rounding_interval
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, compact, print_json, print_table
from smelt_interp.validation import validated

Verdict = Literal["match", "within rounding", "contradiction", "not recomputable", "not printed"]

ARCHITECTURES: tuple[Architecture, ...] = ("baseline", "smelt")
ATTENDED_LENGTHS = (PAPER_ATTENDED_TOKENS, 1024.0, 4096.0, 32_768.0)
"""Mean attended lengths at which the FLOP match is asked."""
BATCHES = (1, 64)
"""Sequences decoded at once, at which the traffic of weights is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One printed figure beside ours."""

    name: str
    printed: str
    """Empty where nothing is printed."""
    ours: str | float | None
    """None where there is nothing to compute it from."""
    verdict: Verdict
    reason: str = ""


def judge(
    name: str, figure: Figure, ours: float, otherwise: str, allowed: tuple[float, float] = (math.inf, -math.inf)
) -> Judged:
    """A match, or within rounding when the inputs' rounding allows the figure, or a contradiction for a reason."""
    verdict: Verdict = "match"
    if not figure.agrees(ours):
        least, most = figure.bounds
        verdict = "within rounding" if allowed[0] <= most and least <= allowed[1] else "contradiction"
    if allowed[0] <= allowed[1]:
        otherwise = f"the printed inputs' rounding allows {compact(allowed[0], 5)} to {compact(allowed[1], 5)}"
    reason = "" if verdict == "match" else otherwise
    return Judged(name=name, printed=figure.shown(), ours=ours, verdict=verdict, reason=reason)


def judge_words(name: str, words: str, ours: str, otherwise: str) -> Judged:
    """A match of what is not one number, or a contradiction for a reason."""
    same = words == ours
    verdict: Verdict = "match" if same else "contradiction"
    return Judged(name=name, printed=words, ours=ours, verdict=verdict, reason="" if same else otherwise)


def _out_of_reach(prefix: str, reason: str, *path: printed.Key) -> Iterator[Judged]:
    """Every figure below a path, as not recomputable; a list of two is a range."""
    value = printed.entry(*path)
    if isinstance(value, dict):
        for key in value:
            yield from _out_of_reach(f"{prefix} {key}".replace("_", " "), reason, *path, key)
        return
    shown = " to ".join(figure.shown() for figure in printed.figures(*path))
    yield Judged(name=prefix, printed=shown, ours=None, verdict="not recomputable", reason=reason)


def _counts(scale: str, architecture: str, attended_tokens: float = PAPER_ATTENDED_TOKENS) -> Budget:
    return budget(PAPER_ROWS[scale, architecture], attended_tokens)


def grid_rows() -> Iterator[Judged]:
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
                yield judge(label, printed.figure(*row, figure), ours, ratio_to_itself)
        # The first contradiction is about the heads; the FLOP ratio has a row of its own.
        words, ours_in_words = (
            " x ".join(map(str, heads)) for heads in (geometry.printed_heads, geometry.derived_heads)
        )
        otherwise = next(iter(geometry.contradictions), "")
        yield judge_words(f"{name} heads x KV heads x width", words, ours_in_words, otherwise)
        yield _sparsity_row(scale, architecture, counts)
        if architecture == "smelt":
            first, last = printed.numbers("architecture", "looped_layers_1_based_inclusive", scale)
            layers = middle_layers(PAPER_ROWS[scale, architecture].num_layers, PAPER_SPAN)
            words = str(LayerRange(int(first) - 1, int(last)))
            yield judge_words(f"{name} looped layers", words, str(layers), "the span rule gives other layers")
    yield from _mismatches()


def _sparsity_row(scale: str, architecture: str, counts: Budget) -> Judged:
    figure = printed.figure("grid", "rows", row_index(scale, architecture), "printed", "sparsity")
    control = budget(fully_active_control(PAPER_ROWS[scale, "baseline"]), PAPER_ATTENDED_TOKENS)
    ours = sparsity(counts, control).sparsity
    name = f"{scale} {architecture} sparsity"
    if architecture == "baseline":
        return judge(name, figure, ours, "the fully active Baseline gives another")
    reason = "the control of a looped row is not printed; ours takes the fully active Baseline"
    return Judged(name=name, printed=figure.shown(), ours=ours, verdict="not recomputable", reason=reason)


def _mismatches() -> Iterator[Judged]:
    """What is said of the budgets of looped row and Baseline beside one another."""
    found = [mismatch(_counts(scale, "smelt"), _counts(scale, "baseline")) for scale in PAPER_PAIRS]
    total, kv_bytes = (max(abs(getattr(pair, name)) for pair in found) for name in ("total_parameters", "kv_bytes"))
    yield _at_most("grid mismatch of total params, at most", "total_params", total, "a pair is beyond it")
    yield _at_most("grid mismatch of kv cache, at most", "kv_cache", kv_bytes, "a pair is beyond it")
    flops = max(abs(pair.flops) for pair in found)
    yield _at_most("grid mismatch of flops, at most", "flops", flops, "a pair is beyond it")
    for attended in ATTENDED_LENGTHS:
        pair = (_counts("200M", name, attended) for name in reversed(ARCHITECTURES))
        name = f"200M mismatch of flops, {attended:,.0f} attended"
        yield _at_most(name, "flops", mismatch(*pair).flops, "looping pays its scores on more steps")
    low, high = (
        printed.figure("grid", "rows", row_index("600M", name), "printed", "active").bounds
        for name in reversed(ARCHITECTURES)
    )
    ours = _counts("600M", "smelt").parameters.active / _counts("600M", "baseline").parameters.active - 1
    allowed = (low[0] / high[1] - 1, low[1] / high[0] - 1)
    yield judge("change of active parameters, 600M", printed.figure("grid", "active_change"), ours, "", allowed)


def _at_most(name: str, key: str, ours: float, otherwise: str) -> Judged:
    figure = printed.figure("grid", "max_mismatch_printed", key)
    holds = abs(ours) <= figure.bounds[1]
    verdict: Verdict = "match" if holds else "contradiction"
    reason = "within the printed bound" if holds else otherwise
    return Judged(name=name, printed=figure.shown(), ours=ours, verdict=verdict, reason=reason)


def dilemma_rows() -> Iterator[Judged]:
    """The dense dilemma: what looping costs when there are no experts to add back."""
    config = PAPER_PAIRS["200M"].smelt
    executed = config.num_steps / config.num_layers
    other = "the middle half visited twice gives another"
    for key, ours in (
        ("executed_over_physical", executed),
        ("width_factor", math.sqrt(1 / executed)),
        ("capacity_left", 1 / executed),
    ):
        yield judge(f"dense dilemma {key.replace('_', ' ')}", printed.figure("dense_dilemma", key), ours, other)
    yield from _out_of_reach(
        "dense dilemma repeat exponent", "what it was fitted to is not printed", "dense_dilemma", "repeat_exponent"
    )


def run_rows() -> Iterator[Judged]:
    """How many runs, over how many tokens and FLOPs."""
    batch, context, steps, branches, decay = (
        printed.number("architecture", key)
        for key in ("batch_sequences", "train_context_tokens", "stable_steps", "decay_branches", "decay_tokens")
    )
    stable, cells = batch * context * steps, printed.number("scaling_law", "fit", "cells")
    yield judge(
        "tokens before the last decay", printed.figure("training_run", "stable_tokens"), stable,
        "batch x context x steps: the figure is cut, not rounded",
    )  # fmt: skip
    yield judge(
        "compute of the largest run", printed.figure("training_run", "most_compute"),
        _counts("1.6B", "smelt").flops.training * (stable + decay), "1.6B SMELT over all its tokens gives another",
    )  # fmt: skip
    # Where the first branch leaves is not printed: here after as many tokens as it then decays over.
    yield judge(
        "compute of the smallest run", printed.figure("training_run", "least_compute"),
        _counts("100M", "baseline").flops.training * 2 * decay, "100M Baseline over twice the decay gives another",
    )  # fmt: skip
    pairs = len(PAPER_PAIRS) * printed.length("sparsity", "levels") * branches
    yield judge("pairs of runs", printed.figure("downstream", "pairs"), pairs, "scales x sparsities x branches")
    points = printed.figure("scaling_law", "fit", "points_in_all")
    yield judge("points of both laws", points, len(ARCHITECTURES) * cells * branches, "cells x branches")


def scaling_rows() -> Iterator[Judged]:
    """The scaling law, its frontier and the gains."""
    corners = {name: np.asarray(rounding_corners(name).gamma) for name in ARCHITECTURES}
    gammas = {name: float(printed_law(name).gamma) for name in ARCHITECTURES}
    for name in ARCHITECTURES:
        allowed = float(corners[name].min()), float(corners[name].max())
        yield judge(f"gamma {name}", printed.figure("scaling_law", "gamma", name), gammas[name], "", allowed)
        yield from _out_of_reach(f"law {name}", "needs the losses of the points", "scaling_law", name)
    allowed = (
        float(corners["smelt"].min() / corners["baseline"].max() - 1),
        float(corners["smelt"].max() / corners["baseline"].min() - 1),
    )
    change = gammas["smelt"] / gammas["baseline"] - 1
    yield judge("change of gamma", printed.figure("scaling_law", "gamma_change"), change, "", allowed)
    yield from _gain_rows()
    yield from _token_rows()


def _gain_rows() -> Iterator[Judged]:
    table = ("scaling_law", "ce_gain", "rows")
    baseline, smelt = printed_law("baseline"), printed_law("smelt")
    for index in range(printed.length(*table)):
        compute = printed.number(*table, index, "compute")
        for level in printed.names(*table, index)[1:]:
            gain, low, high = printed.figures(*table, index, level)
            name = f"gain at {compute:.0e} FLOPs, {level} sparse"
            ours = float(compute_gain(baseline, smelt, compute, float(level)))
            yield judge(name, gain, ours, "", rounding_interval(compute, float(level)))
            yield Judged(
                name=f"{name}, 95% interval",
                printed=f"{low.shown()} to {high.shown()}",
                ours=None,
                verdict="not recomputable",
                reason="needs the losses of the points",
            )


def _token_rows() -> Iterator[Judged]:
    key = "tokens_per_dense_equivalent_parameter_at_1e21"
    compute = float(key.rpartition("_")[2])
    levels = [float(level) for level in printed.names("scaling_law", "ce_gain", "rows", 0)[1:]]
    ratios = [
        float(printed_law(architecture).tokens_per_parameter(compute, level))
        for architecture in ARCHITECTURES
        for level in levels
    ]
    least, most = printed.figures("scaling_law", key, "range")
    name = f"tokens a dense-equivalent parameter at {compute:.0e}"
    yield judge(f"{name}, least", least, min(ratios), "D* / (F* / 6)")
    yield judge(f"{name}, most", most, max(ratios), "D* / (F* / 6)")


def downstream_rows() -> Iterator[Judged]:
    """Scores: what follows from printed counts, and what needs the runs."""
    for metric in printed.names("downstream", "win_rates"):
        wins, pairs = (int(value) for value in printed.numbers("downstream", "win_rates", metric))
        found = win_rate(wins, pairs)
        yield Judged(
            name=f"win rate {metric.replace('_', ' ')}",
            printed=f"{wins} of {pairs}",
            ours=f"{found.rate:.3f} [{found.low:.3f}, {found.high:.3f}]",
            verdict="not recomputable",
            reason="needs the scores; ours is the rate with its exact 95% interval",
        )
        if metric == "dclm_core":
            rate = printed.figure("downstream", "core_win_rate")
            yield judge(f"win rate {metric.replace('_', ' ')}, share", rate, wins / pairs, "wins over pairs")
    scales = [scale for scale in printed.names("downstream", "residuals") if scale in PAPER_PAIRS]
    for metric in printed.names("downstream", "residuals", "pooled"):
        figure = printed.figure("downstream", "residuals", "pooled", metric)
        mean = sum(printed.number("downstream", "residuals", scale, metric) for scale in scales) / len(scales)
        yield judge(f"excess residual {metric.replace('_', ' ')}, pooled", figure, mean, "the mean of the scales")
    runs = "needs the scores of the paper's runs"
    for scale in scales:
        yield from _out_of_reach(f"excess residual {scale}", runs, "downstream", "residuals", scale)
    for key in ("domain_ce_gain_1e21_s95", "length_gain_ratio", "dyck_exact_match_k32", "few_shot_gap_pp"):
        yield from _out_of_reach(key.replace("_", " "), runs, "downstream", key)


def other_rows() -> Iterator[Judged]:
    """Ablations and mechanism."""
    yield from _out_of_reach(
        "200M validation loss, looped layers", "needs runs", "ablations_200M", "loop_span_val_loss"
    )
    for key in ("best_depth", "best_visits"):
        yield from _out_of_reach(f"200M {key.replace('_', ' ')}", "needs runs", "ablations_200M", key)
    for key in printed.names("mechanism"):
        if key != "sample":
            reason = "needs the paper's weights; the probes measure it on other networks"
            yield from _out_of_reach(key.replace("_", " "), reason, "mechanism", key)


def serving_rows() -> Iterator[Judged]:
    """Serving of the 200M pair on an H100."""
    pair, systems = PAPER_PAIRS["200M"], "systems_200M"

    def on_h100(batch: int) -> tuple[Serving, Serving]:
        load = Load(batch=batch)
        return serving(pair.smelt, gpu("h100"), load), serving(pair.baseline, gpu("h100"), load)

    # What the looped block takes, then what the pair takes side by side.
    other = "the 200M pair gives another"
    yield judge("200M KV passes", printed.figure(systems, "kv_passes"), pair.smelt.num_steps, other)
    smelt, baseline = on_h100(1)
    stored = printed.figure(systems, "looped_block_stored_bytes_printed")
    yield judge("200M looped block stored bytes", stored, smelt.looped_block.stored_bytes, other)
    yield judge(
        "200M looped block active bytes", printed.figure(systems, "looped_block_active_bytes_printed"),
        smelt.looped_block.touched_bytes,
        "half of the printed active parameters lie in the looped block, two bytes each; no batch is named",
    )  # fmt: skip
    yield judge_words(
        "200M time to first token over the Baseline's", printed.text(systems, "time_to_first_token"),
        f"{smelt.prefill.seconds / baseline.prefill.seconds:.2f}x",
        f"one prompt of {Load().context} tokens on an H100 is bound by {smelt.prefill.bound}: each visit reads its "
        "layers again",
    )  # fmt: skip
    for batch in BATCHES:
        smelt, baseline = on_h100(batch)
        yield Judged(
            name=f"200M decode weights over the Baseline's, batch {batch}",
            printed="",
            ours=smelt.decode.weight_bytes / baseline.decode.weight_bytes,
            verdict="not printed",
            reason="equal FLOPs are not equal memory traffic: a batch touches more of the added experts",
        )


def rows() -> list[Judged]:
    """Every printed figure, budgets first."""
    parts = (grid_rows, dilemma_rows, run_rows, scaling_rows, downstream_rows, other_rows, serving_rows)
    return [row for part in parts for row in part()]


@validated
class PaperOptions:
    """Compare every printed figure with ours."""

    verdict: tuple[Verdict, ...] = get_args(Verdict)
    """Show rows of these verdicts."""
    json: bool = False
    """Print JSON."""


def main() -> None:
    """Print the table of printed figures."""
    options = parse(PaperOptions, prog="python -m smelt_interp.paper", description=__doc__)
    every = rows()
    shown = [row for row in every if row.verdict in options.verdict]
    if options.json:
        print_json([asdict(row) for row in shown])
        return
    counted = ", ".join(f"{sum(row.verdict == name for row in every)} {name}" for name in get_args(Verdict))
    cells = [[row.name, row.printed, _text(row.ours), row.verdict, row.reason] for row in shown]
    columns = ["figure", "printed", "ours", "verdict", "reason"]
    print_table(Table("Printed figures of arXiv:2609.01343", columns, cells, [counted]))


def _text(value: str | float | None) -> str:
    return "" if value is None else value if isinstance(value, str) else compact(value, 7)
