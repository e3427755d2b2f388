"""The looped network that costs what a Baseline costs: FLOPs, total parameters and KV cache matched at once.

Looping executes more layers, so at equal FLOPs and KV cache the matched network is narrower; the parameters that this
frees come back as experts, which cost memory and no FLOPs. For each depth, KV heads and head width near the Baseline's
KV cache, and each width near sqrt(L_Baseline / steps) of the Baseline's, number of experts E and expert width F solve

    E (m D F + D) = total parameters left for experts, a layer
    2 D E + 2 K m D F = FLOPs left for router and experts, a step          m = 3 matrices, 2 when ungated

and the whole numbers around that solution, and around the Baseline's F / D, are counted with `budget`. Of those within
the tolerances, the one most like the Baseline is the best: first those that hold F / D, nearest first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from smelt_interp.config import ModelConfig, default_loop_scale
from smelt_interp.costs.budget import PAPER_TOLERANCE, Budget, BudgetCheck, Mismatch, budget, checks, mismatch
from smelt_interp.costs.network_choice import AttendedTokens
from smelt_interp.costs.presets import PAPER_SPAN, PAPER_VISITS, causal_mean, pair
from smelt_interp.costs.spans import LayerRange, Layers, middle_layers, span_text
from smelt_interp.costs.sparsity import with_sparsity
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, percent, print_json, print_table
from smelt_interp.validation import Share, validated

WIDTH_WINDOW = (0.7, 1.3)
"""Widths tried, as factors on the width that equal FLOPs suggest."""

Depth = Annotated[int, Field(ge=1, le=1_000)]
Heads = Annotated[int, Field(ge=1, le=10_000)]
Multiple = Annotated[int, Field(ge=1, le=10**6)]
Tolerance = Annotated[float, Field(ge=0, le=10)]


@validated
class MatchRequest:
    """What the matched network has to be."""

    visits: Annotated[int, Field(ge=1, le=1_000)] = PAPER_VISITS
    """How often the looped layers run."""
    span: Share = PAPER_SPAN
    """Share of the physical layers that is looped, in the middle, rounded to whole layers; 0 loops nothing."""
    layers: Layers | Literal["span"] = "span"
    """Looped layers, first and last counted from 1, in place of a span: 3-4."""
    loop_scale: Annotated[float, Field(gt=0, le=1)] | Literal["inverse"] = "inverse"
    """Factor on the residual updates of the looped layers; inverse: one over the visits."""
    depth: Depth | Literal["baseline", "free"] = "baseline"
    """Physical layers: the Baseline's, a number, or any from half to one and a half times the Baseline's."""
    kv_heads: Heads | Literal["baseline", "free"] = "baseline"
    """KV heads: the Baseline's, a number, or any up to twice the Baseline's."""
    query_heads: Heads | Literal["fill", "scores"] = "fill"
    """fill: heads x head width is the width; scores: as many as cost the Baseline's FLOPs of attention scores, which
    keeps the match at every context; or a number."""
    sparsity: Annotated[float, Field(gt=0, lt=1)] | Literal["own"] = "own"
    """Sparsity that the Baseline's number of experts is first set to; own: it stays as it is."""
    width_multiple: Multiple = 8
    """Widths are multiples of this."""
    head_width_multiple: Multiple = 2
    """Head widths are multiples of this."""
    expert_width_multiple: Multiple = 8
    """Expert widths are multiples of this."""
    experts_multiple: Multiple = 8
    """Numbers of experts are multiples of this."""
    least_expert_width: Multiple = 32
    """No expert is thinner than this."""
    max_shape_mismatch: Tolerance = 0.1
    """Networks whose expert width over width, F / D, changes by no more than this come first; the paper's pairs keep it
    within a tenth."""
    max_flops_mismatch: Tolerance = PAPER_TOLERANCE.flops
    """Largest mismatch of training FLOPs a token."""
    max_parameters_mismatch: Tolerance = PAPER_TOLERANCE.total_parameters
    """Largest mismatch of total non-embedding parameters."""
    max_kv_mismatch: Tolerance = PAPER_TOLERANCE.kv_bytes
    """Largest mismatch of KV bytes a token."""

    @property
    def tolerance(self) -> Mismatch:
        """The three largest mismatches as one record."""
        return Mismatch(
            flops=self.max_flops_mismatch,
            total_parameters=self.max_parameters_mismatch,
            kv_bytes=self.max_kv_mismatch,
        )

    def looped_layers(self, num_layers: int) -> LayerRange:
        """The looped layers of a network of this depth."""
        return middle_layers(num_layers, self.span) if self.layers == "span" else self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One network and how far it is from the Baseline."""

    config: ModelConfig
    mismatch: Mismatch
    """Its FLOPs are those of the attended length where they are furthest off."""
    shape_mismatch: float
    """Of F / D, as a signed fraction of the Baseline's."""
    distance: float
    """Sum of the absolute log ratios to the Baseline of F / D, KV heads, depth, and of the three mismatches."""

    def holds_shape(self, request: MatchRequest) -> bool:
        """Whether F / D is the Baseline's, within the request."""
        return BudgetCheck(name="F / D", value=self.shape_mismatch, allowed=request.max_shape_mismatch).within

    def order(self, request: MatchRequest) -> tuple[float, bool, float, int]:
        """What is beyond the tolerances, added up and 0 within all; then whether F / D changes; then the distance."""
        excess = sum(
            abs(check.value) - check.allowed for check in checks(self.mismatch, request.tolerance) if not check.within
        )
        return excess, not self.holds_shape(request), self.distance, self.config.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """What a search found."""

    baseline: ModelConfig
    """What was matched: the given Baseline, with the number of experts that a wanted sparsity needs."""
    best: tuple[Candidate, ...]
    """Within every tolerance, most like the Baseline first, each with another width, heads or depth."""
    next_best: Candidate | None
    """The nearest one outside a tolerance; None when every candidate is within all."""
    next_best_fails: str
    """Which tolerance that one breaks, and by how much; empty when there is none."""


def twin(baseline: ModelConfig, request: MatchRequest, attended_tokens: float) -> ModelConfig:
    """The network that stands beside a Baseline in a comparison: same budgets, same F / D.

    Raises `UserError` as `matched` does, and where F / D cannot be held.
    """
    best = matched(baseline, request, (attended_tokens,), 1).best[0]
    if not best.holds_shape(request):
        raise UserError(
            f"F / D must be held within {request.max_shape_mismatch:.1%}; the nearest ({shape_text(best.config)}) has "
            f"{percent(best.shape_mismatch)}: lower the multiples, or allow more"
        )
    return best.config


def matched(baseline: ModelConfig, request: MatchRequest, attended_tokens: Sequence[float], count: int = 5) -> Matching:
    """The best `count` networks that cost what the Baseline costs at each of these mean attended lengths.

    Raises `UserError` when no network of the request's multiples is within all tolerances: it names the budgets that
    the nearest one misses and by how much.
    """
    if request.sparsity != "own":
        baseline = with_sparsity(baseline, request.sparsity, attended_tokens[0], request.experts_multiple)
    references = [budget(baseline, attended) for attended in attended_tokens]
    # Of the networks with one width and attention only the best, by excess first, is kept.
    best: dict[tuple[int, ...], Candidate] = {}
    for config in {config for reference in references for config in _configs(baseline, request, reference)}:
        found = _candidate(config, baseline, references)
        key = (config.num_layers, config.num_kv_heads, config.num_heads, config.head_width, config.width)
        if key not in best or found.order(request) < best[key].order(request):
            best[key] = found
    ordered = sorted(best.values(), key=lambda found: found.order(request))
    within = [found for found in ordered if found.mismatch.within(request.tolerance)]
    next_best = next(iter(ordered[len(within) :]), None)
    fails = "" if next_best is None else _failures(next_best, request)
    if not within:
        raise UserError(_infeasible(baseline, ordered[0].config, fails))
    return Matching(baseline=baseline, best=tuple(within[:count]), next_best=next_best, next_best_fails=fails)


def _candidate(config: ModelConfig, baseline: ModelConfig, references: Sequence[Budget]) -> Candidate:
    several = [mismatch(budget(config, reference.attended_tokens), reference) for reference in references]
    off = max(several, key=lambda each: abs(each.flops))
    shape = (config.expert_width / config.width) / (baseline.expert_width / baseline.width)
    heads, depth = config.num_kv_heads / baseline.num_kv_heads, config.num_layers / baseline.num_layers
    ratios = (shape, heads, depth, 1 + off.flops, 1 + off.total_parameters, 1 + off.kv_bytes)
    distance = sum(abs(math.log(ratio)) for ratio in ratios)
    return Candidate(config=config, mismatch=off, shape_mismatch=shape - 1, distance=distance)


def _configs(baseline: ModelConfig, request: MatchRequest, reference: Budget) -> Iterator[ModelConfig]:
    """Every network worth counting at one attended length."""
    for num_layers in _choices(request.depth, baseline.num_layers, (baseline.num_layers // 2, 3 / 2)):
        looped = _looped(baseline, request, num_layers)
        for num_kv_heads in _choices(request.kv_heads, baseline.num_kv_heads, (1, 2)):
            for head_width in _head_widths(looped, request, reference, num_kv_heads):
                attention = replace(looped, num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_width=head_width)
                for shape in _widths(attention, baseline, request):
                    yield from _with_experts(shape, baseline, request, reference)


def _choices(asked: int | str, baseline: int, free: tuple[int, float]) -> Sequence[int]:
    """The Baseline's number, any from the first to so many times the Baseline's, or the number asked for."""
    if isinstance(asked, int):
        return [asked]
    return [baseline] if asked == "baseline" else range(max(1, free[0]), int(baseline * free[1]) + 1)


def _looped(baseline: ModelConfig, request: MatchRequest, num_layers: int) -> ModelConfig:
    layers = request.looped_layers(num_layers)
    num_visits = request.visits if len(layers) else 1
    scale = default_loop_scale(num_visits)
    return replace(
        baseline,
        num_layers=num_layers,
        loop_start=layers.start,
        loop_stop=layers.stop,
        num_visits=num_visits,
        loop_scale=scale if num_visits == 1 or request.loop_scale == "inverse" else request.loop_scale,
    )


def _head_widths(looped: ModelConfig, request: MatchRequest, reference: Budget, num_kv_heads: int) -> list[int]:
    """The two multiples below and the two above the head width that would match the KV cache exactly."""
    one = budget(replace(looped, num_heads=num_kv_heads, num_kv_heads=num_kv_heads)).kv_bytes / looped.head_width
    multiple = request.head_width_multiple
    below = int(reference.kv_bytes / one / multiple)
    widths = [multiple * count for count in range(max(1, below - 1), below + 3)]
    return [width for width in widths if looped.rope_base is None or width % 2 == 0]


def _widths(attention: ModelConfig, baseline: ModelConfig, request: MatchRequest) -> Iterator[ModelConfig]:
    """Widths near the one that equal FLOPs suggest, each with its query heads, multiples of the KV heads."""
    groups, head_width = attention.num_kv_heads, attention.head_width
    shrink = baseline.num_layers / attention.num_steps
    suggested = baseline.width * math.sqrt(shrink)
    fills = request.query_heads == "fill"
    unit = math.lcm(groups * head_width, request.width_multiple) if fills else request.width_multiple
    lowest, highest = (factor * suggested for factor in WIDTH_WINDOW)
    scores = baseline.num_heads * baseline.head_width * shrink / head_width
    # Where no multiple is in the window, the nearest says which budget it misses.
    for count in range(math.ceil(lowest / unit), int(highest / unit) + 1) or [max(1, round(suggested / unit))]:
        width = unit * count
        if isinstance(request.query_heads, int):
            heads = {request.query_heads}
        else:
            heads = {width // head_width} if fills else _multiples(scores, groups, groups, 1)
        for num_heads in sorted(heads):
            yield replace(attention, width=width, num_heads=num_heads)


def _with_experts(
    shape: ModelConfig, baseline: ModelConfig, request: MatchRequest, reference: Budget
) -> Iterator[ModelConfig]:
    """The whole numbers of experts and expert widths around those that match FLOPs and total parameters."""
    top_k, width = shape.top_k, shape.width
    matrices = 3 if shape.gated_experts else 2
    # What the two budgets leave for experts is the reference less a count without any.
    bare = budget(replace(shape, num_experts=top_k, expert_width=1), reference.attended_tokens)
    without = bare.parameters.total - bare.parameters.experts - bare.parameters.router
    total_left = (reference.parameters.total - without) / shape.num_layers
    flops_left = (reference.flops.forward - bare.flops.projections - bare.flops.scores) / bare.executed_depth

    def experts_of(expert_width: float) -> tuple[float, float]:
        """Numbers of experts that match the total parameters, and the FLOPs."""
        parameters = matrices * width * expert_width
        return total_left / (parameters + width), (flops_left - 2 * top_k * parameters) / (2 * width)

    def widths_of(num_experts: float) -> tuple[float, float]:
        """Expert widths that match the total parameters, and the FLOPs."""
        by_total = (total_left / num_experts - width) / (matrices * width)
        return by_total, (flops_left - 2 * width * num_experts) / (2 * top_k * matrices * width)

    def whole_experts(exact: float, reach: int) -> set[int]:
        return _multiples(exact, request.experts_multiple, top_k, reach)

    def whole_widths(exact: float, reach: int) -> set[int]:
        return _multiples(exact, request.expert_width_multiple, request.least_expert_width, reach)

    if baseline.num_experts == baseline.top_k:
        pairs = {(top_k, wide) for exact in widths_of(top_k) for wide in whole_widths(exact, 1)}
    else:
        pairs = set[tuple[int, int]]()
        held = width * baseline.expert_width / baseline.width
        for expert_width in (*_expert_widths(total_left, flops_left, width, top_k, matrices), held):
            for number in whole_experts(experts_of(expert_width)[1], 2):
                pairs |= {(number, wide) for exact in widths_of(number) for wide in whole_widths(exact, 1)}
            for wide in whole_widths(expert_width, 2):
                pairs |= {(number, wide) for exact in experts_of(wide) for number in whole_experts(exact, 1)}
    for num_experts, expert_width in pairs:
        yield replace(shape, num_experts=num_experts, expert_width=expert_width)


def _multiples(exact: float, multiple: int, least: int, reach: int) -> set[int]:
    """So many multiples below a number and above it; the least that is allowed in place of smaller ones."""
    below, smallest = math.floor(exact / multiple), math.ceil(least / multiple)
    return {multiple * max(smallest, count) for count in range(below + 1 - reach, below + 1 + reach)}


def _expert_widths(total_left: float, flops_left: float, width: int, top_k: int, matrices: int) -> set[float]:
    """The solutions for F of the two equations, or the nearest miss where there is none."""
    # With u = m D F the equations give 2 K u^2 - (flops - 2 K D) u - (flops D - 2 D total) = 0.
    linear = flops_left - 2 * top_k * width
    under_root = linear**2 + 8 * top_k * width * (flops_left - 2 * total_left)
    root = math.sqrt(max(0.0, under_root))
    return {max(0.0, (linear + sign * root) / (4 * top_k * matrices * width)) for sign in (-1, 1)}


def _failures(found: Candidate, request: MatchRequest) -> str:
    return ", ".join(
        f"{check.name} {percent(check.value)} where {check.allowed:.1%} is allowed"
        for check in checks(found.mismatch, request.tolerance)
        if not check.within
    )


def _infeasible(baseline: ModelConfig, nearest: ModelConfig, fails: str) -> str:
    line = f"all budgets must be met; the nearest ({shape_text(nearest)}) has {fails}"
    if baseline.num_experts == baseline.top_k:
        left = nearest.num_layers / nearest.num_steps
        return (
            f"{line}: a dense Baseline has no experts to add back and keeps about {left:.1%} of its capacity; give it "
            f"more than {baseline.top_k} experts"
        )
    return f"{line}: lower the multiples, free the depth or the KV heads, or allow more"


def shape_text(config: ModelConfig) -> str:
    """A network's shape in one phrase."""
    return (
        f"{config.num_layers} layers, width {config.width}, heads {config.num_heads}/{config.num_kv_heads} x "
        f"{config.head_width}, {config.num_experts} experts x {config.expert_width}"
    )


@validated
class MatchingOptions(MatchRequest):
    """Find the looped network that costs what a Baseline costs."""

    baseline: str
    """A named pair whose Baseline it is (100M, 200M, 600M, 1.6B, demo), or a config file (JSON)."""
    attended_tokens: tuple[AttendedTokens, ...] | Literal["own"] = "own"
    """Mean positions that a query attends to, one or several to match at all of them. own: 390 for the paper's grid,
    the causal mean for any other."""
    count: Annotated[int, Field(ge=1, le=1_000)] = 5
    """How many to show."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if self.attended_tokens == ():
            raise UserError("attended_tokens must be own or at least one length; got none")

    def network(self) -> tuple[ModelConfig, tuple[float, ...]]:
        """The Baseline and its attended lengths. Raises `UserError` when there is none of that name."""
        config, own = baseline_network(self.baseline)
        return config, (own,) if self.attended_tokens == "own" else self.attended_tokens


def baseline_network(name: str) -> tuple[ModelConfig, float]:
    """The Baseline of a named pair, or a config file, and its own attended length. Raises `UserError` for neither."""
    if name.endswith(".json"):
        config = ModelConfig.load(Path(name))
        return config, causal_mean(config.context)
    named = pair(name)
    return named.baseline, named.attended_tokens


def search(options: MatchingOptions) -> Matching:
    """What the command finds. Raises `UserError` as `matched` does."""
    return matched(options.network()[0], options, options.network()[1], options.count)


def main() -> None:
    """Print the best matched networks, their mismatches, and why the next best fails."""
    options = parse(MatchingOptions, prog="python -m smelt_interp.costs.matching", description=__doc__)
    found = search(options)
    if options.json:
        print_json(report(found))
    else:
        print_table(table(options, found))


def report(found: Matching) -> dict[str, object]:
    """What was found, as plain values."""
    return {
        "baseline": found.baseline.to_json(),
        "best": [_report(candidate) for candidate in found.best],
        "next_best": None if found.next_best is None else _report(found.next_best),
        "next_best_fails": found.next_best_fails,
    }


def table(request: MatchRequest, found: Matching) -> Table:
    """One line a network that was found; the notes are the span, the Baseline's shape and why the next best fails."""
    columns = ["layers", "looped", "visits", "steps", "width", "heads", "experts", "expert width"]
    notes = [f"Baseline: {shape_text(found.baseline)}"]
    if request.layers == "span":
        notes.append(span_text(found.best[0].config.num_layers, request.span))
    if found.next_best is not None:
        notes.append(f"next best: {shape_text(found.next_best.config)}: {found.next_best_fails}")
    rows = [_row(candidate) for candidate in found.best]
    return Table("Matched networks, best first", [*columns, "F / D", "FLOPs", "total", "KV"], rows, notes)


def _report(candidate: Candidate) -> dict[str, object]:
    return {
        "config": candidate.config.to_json(),
        "mismatch": asdict(candidate.mismatch) | {"largest": candidate.mismatch.largest},
        "shape_mismatch": candidate.shape_mismatch,
        "distance": candidate.distance,
    }


def _row(candidate: Candidate) -> list[Cell]:
    config = candidate.config
    return [
        config.num_layers,
        str(LayerRange(config.loop_start, config.loop_stop)) if config.num_visits > 1 else "none",
        config.num_visits,
        config.num_steps,
        config.width,
        f"{config.num_heads}/{config.num_kv_heads} x {config.head_width}",
        config.num_experts,
        config.expert_width,
        *map(percent, (candidate.shape_mismatch, *asdict(candidate.mismatch).values())),
    ]


if __name__ == "__main__":
    run_command(main)
