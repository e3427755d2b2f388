"""The looped network that costs what a Baseline costs: FLOPs, total parameters and KV cache matched at once.

Looping executes more layers, so at equal FLOPs and KV cache the matched network is narrower; the parameters that this
frees come back as experts, which cost memory and no FLOPs. For each depth, KV heads and head width near the Baseline's
KV cache, and each width near sqrt(L_Baseline / steps) of the Baseline's, number of experts E and expert width F solve

    E (m D F + D) = total parameters left for experts, a layer
    2 D E + 2 K m D F = FLOPs left for router and experts, a step          m = 3 matrices, 2 when ungated

and the whole numbers around that solution are counted with `budget`. Query heads fill the width, Q C = D, as in the
paper's grid.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from smelt_interp.config import ModelConfig, default_loop_scale
from smelt_interp.costs.budget import PAPER_TOLERANCE, Budget, Mismatch, budget, mismatch, verdicts
from smelt_interp.costs.knobs import looped_span
from smelt_interp.costs.network_choice import Network
from smelt_interp.costs.presets import causal_mean, pair
from smelt_interp.errors import UserError, run_command
from smelt_interp.plan import plan
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, percent, print_json, print_table

MISMATCH_STEP = 0.005
"""Candidates whose mismatches add up to the same multiple of this count as equally close."""

WIDTH_WINDOW = (0.7, 1.3)
"""Widths tried, as factors on the width that equal FLOPs suggest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the matched network has to be."""

    visits: int = 2
    """How often the looped span runs."""
    span: float = 0.5
    """Share of the physical layers that is looped, in the middle; 0 loops nothing."""
    depth: int | Literal["baseline", "free"] = "baseline"
    """Physical layers: the Baseline's, a number, or any from half to one and a half times the Baseline's."""
    kv_heads: int | Literal["baseline", "free"] = "baseline"
    """KV heads: the Baseline's, a number, or any up to twice the Baseline's."""
    width_multiple: int = 8
    """Widths are multiples of this."""
    head_width_multiple: int = 2
    """Head widths are multiples of this."""
    expert_width_multiple: int = 8
    """Expert widths are multiples of this."""
    experts_multiple: int = 8
    """Numbers of experts are multiples of this."""
    max_flops_mismatch: float = PAPER_TOLERANCE.flops
    """Largest mismatch of training FLOPs a token."""
    max_parameters_mismatch: float = PAPER_TOLERANCE.total_parameters
    """Largest mismatch of total non-embedding parameters."""
    max_kv_mismatch: float = PAPER_TOLERANCE.kv_bytes
    """Largest mismatch of KV bytes a token."""

    def __post_init__(self) -> None:
        if self.visits < 1:
            raise UserError(f"visits must be at least 1; got {self.visits}")
        if not 0 <= self.span <= 1:
            raise UserError(f"span must be a share of the layers, from 0 to 1; got {self.span}")
        for name in ("depth", "kv_heads"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise UserError(f"{name} must be at least 1, baseline or free; got {value}")
        for name in ("width_multiple", "head_width_multiple", "expert_width_multiple", "experts_multiple"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("max_flops_mismatch", "max_parameters_mismatch", "max_kv_mismatch"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a fraction of 0 or more; got {getattr(self, name)}")

    @property
    def tolerance(self) -> Mismatch:
        """The three largest mismatches as one record."""
        return Mismatch(
            flops=self.max_flops_mismatch,
            total_parameters=self.max_parameters_mismatch,
            kv_bytes=self.max_kv_mismatch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One network and how far it is from the Baseline."""

    config: ModelConfig
    mismatch: Mismatch
    shape_change: float
    """Sum of the absolute log ratios to the Baseline of F / D, KV heads and physical depth."""

    @property
    def rank(self) -> tuple[int, float, float]:
        """Closest first; among the equally close, the one most like the Baseline."""
        added = abs(self.mismatch.flops) + abs(self.mismatch.total_parameters) + abs(self.mismatch.kv_bytes)
        return int(added / MISMATCH_STEP), self.shape_change, added


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """What a search found."""

    best: tuple[Candidate, ...]
    """Within every tolerance, best first, each with another width, head width, KV heads or depth."""
    next_best: Candidate | None
    """The nearest one outside a tolerance; None when every candidate is within all."""
    next_best_fails: str
    """Which tolerance that one breaks, and by how much; empty when there is none."""


def matched(baseline: ModelConfig, request: Request, attended_tokens: float, count: int = 5) -> Matching:
    """The best `count` networks that cost what the Baseline costs.

    Raises `UserError` when no network of the request's multiples is within all tolerances: it names the budgets that
    the nearest one misses and by how much.
    """
    reference, tolerance = budget(baseline, attended_tokens), request.tolerance

    def preference(found: Candidate) -> tuple[bool, tuple[int, float, float]]:
        # Closest in sum may still be outside one tolerance.
        return not found.mismatch.within(tolerance), found.rank

    nearest: dict[tuple[int, int, int, int], Candidate] = {}
    for config in _configs(baseline, request, reference):
        found = Candidate(
            config=config,
            mismatch=mismatch(budget(config, attended_tokens), reference),
            shape_change=_shape_change(config, baseline),
        )
        key = (config.num_layers, config.num_kv_heads, config.head_width, config.width)
        if key not in nearest or preference(found) < preference(nearest[key]):
            nearest[key] = found
    within = sorted((found for found in nearest.values() if found.mismatch.within(tolerance)), key=lambda c: c.rank)
    outside = [found for found in nearest.values() if not found.mismatch.within(tolerance)]
    next_best = min(outside, key=lambda found: _excess(found.mismatch, tolerance), default=None)
    fails = "" if next_best is None else _failures(next_best.mismatch, tolerance)
    if not within:
        raise UserError(_infeasible(baseline, next_best, fails))
    return Matching(best=tuple(within[:count]), next_best=next_best, next_best_fails=fails)


def _configs(baseline: ModelConfig, request: Request, reference: Budget) -> Iterator[ModelConfig]:
    """Every network worth counting: the whole numbers around each solution of the two equations."""
    for num_layers in _depths(baseline, request):
        looped = _looped(baseline, request, num_layers)
        steps = len(plan(looped))
        suggested = baseline.width * math.sqrt(baseline.num_layers / steps)
        lowest, highest = (factor * suggested for factor in WIDTH_WINDOW)
        for num_kv_heads in _kv_heads(baseline, request):
            for head_width in _head_widths(looped, request, reference, num_kv_heads):
                unit = math.lcm(num_kv_heads * head_width, request.width_multiple)
                counts = range(math.ceil(lowest / unit), int(highest / unit) + 1)
                # Where no multiple is in the window, the nearest says which budget it misses.
                for count in counts or [max(1, round(suggested / unit))]:
                    width = unit * count
                    shape = replace(
                        looped,
                        width=width,
                        num_heads=width // head_width,
                        num_kv_heads=num_kv_heads,
                        head_width=head_width,
                    )
                    yield from _with_experts(shape, baseline, request, reference)


def _looped(baseline: ModelConfig, request: Request, num_layers: int) -> ModelConfig:
    loop_start, loop_stop = looped_span(num_layers, request.span)
    num_visits = request.visits if loop_stop > loop_start else 1
    return replace(
        baseline,
        num_layers=num_layers,
        loop_start=loop_start,
        loop_stop=loop_stop,
        num_visits=num_visits,
        loop_scale=default_loop_scale(num_visits),
    )


def _depths(baseline: ModelConfig, request: Request) -> list[int]:
    if request.depth == "baseline":
        return [baseline.num_layers]
    if request.depth == "free":
        return list(range(max(1, baseline.num_layers // 2), baseline.num_layers * 3 // 2 + 1))
    return [request.depth]


def _kv_heads(baseline: ModelConfig, request: Request) -> list[int]:
    if request.kv_heads == "baseline":
        return [baseline.num_kv_heads]
    if request.kv_heads == "free":
        return list(range(1, 2 * baseline.num_kv_heads + 1))
    return [request.kv_heads]


def _head_widths(looped: ModelConfig, request: Request, reference: Budget, num_kv_heads: int) -> list[int]:
    """The two multiples below and the two above the head width that would match the KV cache exactly."""
    one = budget(replace(looped, num_heads=num_kv_heads, num_kv_heads=num_kv_heads)).kv_bytes / looped.head_width
    multiple = request.head_width_multiple
    below = int(reference.kv_bytes / one / multiple)
    widths = [multiple * count for count in range(max(1, below - 1), below + 3)]
    return [width for width in widths if looped.rope_base is None or width % 2 == 0]


def _with_experts(
    shape: ModelConfig, baseline: ModelConfig, request: Request, reference: Budget
) -> Iterator[ModelConfig]:
    """The whole numbers of experts and expert widths around those that match FLOPs and total parameters."""
    top_k, width = shape.top_k, shape.width
    matrices = 3 if shape.gated_experts else 2
    # One expert-free count: what is left for experts is the reference less this.
    smallest = budget(replace(shape, num_experts=top_k, expert_width=1), reference.attended_tokens)
    without = smallest.parameters.total - smallest.parameters.experts - smallest.parameters.router
    total_left = (reference.parameters.total - without) / shape.num_layers
    flops_left = (
        reference.flops.forward - smallest.flops.projections - smallest.flops.scores
    ) / smallest.executed_depth

    def experts_of(expert_width: float) -> tuple[float, float]:
        parameters = matrices * width * expert_width
        return total_left / (parameters + width), (flops_left - 2 * top_k * parameters) / (2 * width)

    def widths_of(num_experts: float) -> tuple[float, float]:
        by_total = (total_left / num_experts - width) / (matrices * width)
        return by_total, (flops_left - 2 * width * num_experts) / (2 * top_k * matrices * width)

    def whole_experts(exact: float, reach: int) -> set[int]:
        return _multiples(exact, request.experts_multiple, top_k, reach)

    def whole_widths(exact: float, reach: int) -> set[int]:
        return _multiples(exact, request.expert_width_multiple, 1, reach)

    if baseline.num_experts == baseline.top_k:
        pairs = {(top_k, wide) for exact in widths_of(top_k) for wide in whole_widths(exact, 1)}
    else:
        pairs = set[tuple[int, int]]()
        for expert_width in _expert_widths(total_left, flops_left, width, top_k, matrices):
            for number in whole_experts(experts_of(expert_width)[1], 2):
                pairs |= {(number, wide) for exact in widths_of(number) for wide in whole_widths(exact, 1)}
            for wide in whole_widths(expert_width, 2):
                pairs |= {(number, wide) for exact in experts_of(wide) for number in whole_experts(exact, 1)}
    for num_experts, expert_width in sorted(pairs):
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


def _shape_change(config: ModelConfig, baseline: ModelConfig) -> float:
    return (
        abs(math.log(config.expert_width / config.width * baseline.width / baseline.expert_width))
        + abs(math.log(config.num_kv_heads / baseline.num_kv_heads))
        + abs(math.log(config.num_layers / baseline.num_layers))
    )


def _excess(found: Mismatch, tolerance: Mismatch) -> float:
    return sum(max(0.0, abs(verdict.value) - verdict.allowed) for verdict in verdicts(found, tolerance))


def _failures(found: Mismatch, tolerance: Mismatch) -> str:
    return ", ".join(
        f"{verdict.name} {percent(verdict.value)} where {verdict.allowed:.1%} is allowed"
        for verdict in verdicts(found, tolerance)
        if not verdict.within
    )


def _infeasible(baseline: ModelConfig, nearest: Candidate | None, fails: str) -> str:
    assert nearest is not None
    config = nearest.config
    line = f"a matched network must meet all three budgets; the nearest ({shape_text(config)}) has {fails}"
    if baseline.num_experts == baseline.top_k:
        left = config.num_layers / len(plan(config))
        return (
            f"{line}: a dense Baseline is infeasible, it has no experts to add back, and at equal FLOPs about "
            f"{left:.1%} of its capacity is left; give it more experts than the {baseline.top_k} that a token uses"
        )
    return f"{line}: lower the multiples, free the depth or the KV heads, or allow more"


def shape_text(config: ModelConfig) -> str:
    """A network's shape in one phrase."""
    return (
        f"{config.num_layers} layers, width {config.width}, heads {config.num_heads}/{config.num_kv_heads} x "
        f"{config.head_width}, {config.num_experts} experts x {config.expert_width}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Request):
    """Find the looped network that costs what a Baseline costs."""

    baseline: str
    """A named pair whose Baseline it is (100M, 200M, 600M, 1.6B, demo), or a config file (JSON)."""
    attended_tokens: float | Literal["own"] = "own"
    """Mean positions that a query attends to. own: 390 for the paper's grid, the causal mean for any other."""
    count: int = 5
    """How many to show."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if self.count < 1:
            raise UserError(f"--count must be at least 1; got {self.count}")

    def network(self) -> Network:
        """The Baseline. Raises `UserError` when there is none of that name."""
        if self.baseline.endswith(".json"):
            config = ModelConfig.load(Path(self.baseline))
            own = causal_mean(config.context)
        else:
            named = pair(self.baseline)
            config, own = named.baseline, named.attended_tokens
        attended = own if self.attended_tokens == "own" else self.attended_tokens
        return Network(name=self.baseline, config=config, attended_tokens=attended)


def search(options: Options) -> Matching:
    """What the command finds. Raises `UserError` as `matched` does."""
    baseline = options.network()
    return matched(baseline.config, options, baseline.attended_tokens, options.count)


def main() -> None:
    """Print the best matched networks, their mismatches, and why the next best fails."""
    options = parse(Options, prog="python -m smelt_interp.costs.matching", description=__doc__)
    found = search(options)
    if options.json:
        print_json(report(found))
    else:
        print_table(table(options.network().config, found))


def report(found: Matching) -> dict[str, object]:
    """What was found, as plain values."""
    return {
        "best": [_report(candidate) for candidate in found.best],
        "next_best": None if found.next_best is None else _report(found.next_best),
        "next_best_fails": found.next_best_fails,
    }


def table(baseline: ModelConfig, found: Matching) -> Table:
    """One line a network that was found; the notes are the Baseline's shape and why the next best fails."""
    columns = ["layers", "span", "visits", "steps", "width", "heads", "experts", "expert width", "FLOPs", "total", "KV"]
    notes = [f"Baseline: {shape_text(baseline)}"]
    if found.next_best is not None:
        notes.append(f"next best: {shape_text(found.next_best.config)}: {found.next_best_fails}")
    return Table("Matched networks, best first", columns, [_row(candidate) for candidate in found.best], notes)


def _report(candidate: Candidate) -> dict[str, object]:
    return {
        "config": candidate.config.to_json(),
        "mismatch": asdict(candidate.mismatch) | {"largest": candidate.mismatch.largest},
        "shape_change": candidate.shape_change,
    }


def _row(candidate: Candidate) -> list[Cell]:
    config = candidate.config
    return [
        config.num_layers,
        f"{config.loop_start + 1}-{config.loop_stop}" if config.num_visits > 1 else "none",
        config.num_visits,
        len(plan(config)),
        config.width,
        f"{config.num_heads}/{config.num_kv_heads} x {config.head_width}",
        config.num_experts,
        config.expert_width,
        percent(candidate.mismatch.flops),
        percent(candidate.mismatch.total_parameters),
        percent(candidate.mismatch.kv_bytes),
    ]


if __name__ == "__main__":
    run_command(main)
