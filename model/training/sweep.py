"""Train a Baseline and a row of networks that each differ from its looped twin in one thing, and put them in a table.

    python -m model.training.sweep scale inverse 1 --baseline demo --seeds 0 1 2 --out runs/scales

    span       shares of the layers that are looped       each member is sized to the Baseline's budgets, F / D held
    depth      numbers of physical layers                                                                        same
    visits     how often the looped layers run                                                                   same
    scale      loop factors: inverse (1/r), 1                                                                    same
    repeats    how often the looped layers of the Baseline itself run, with 1/r: its parameters, and more FLOPs
    controls   parameters: the Baseline with twice its experts; experts: twice as many, half as wide, twice as many
               of them chosen; neither is looped

With `--seeds` every member is trained so often, and what it has over the Baseline is paired by seed. All members are
sized before any trains, in turn or so many `--at-once`; an interrupted sweep goes on. It ends in `runs.csv`, which
`smelt_interp.scaling fit` and `smelt_interp.scaling.repeat` read, together with those of other budgets and horizons,
and `scores.csv` for `smelt_interp.scaling.calibration fit`.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray
from pydantic import Field

from model import ranks
from model.training.members import BASELINE, Member, MemberOptions, Trained, sized, train_members
from model.training.pair import shape_cells
from smelt_interp.config import ModelConfig, default_loop_scale
from smelt_interp.costs.budget import budget
from smelt_interp.costs.matching import MatchRequest, baseline_network
from smelt_interp.costs.sparsity import fully_active_control, sparsity
from smelt_interp.errors import UserError, run_command, shown
from smelt_interp.over_seeds import half_interval
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.output_files import write_whole
from smelt_interp.terminal.tables import Cell, Table, print_table
from smelt_interp.validation import Seed, different, validated

Axis = Literal["span", "depth", "visits", "scale", "repeats", "controls"]
Row = dict[str, str | float]
Floats = NDArray[np.float64]


@validated
class SweepOptions(MemberOptions):
    """What varies, around which network, and how all are trained."""

    axis: tyro.conf.Positional[Axis]
    """What varies."""
    values: tyro.conf.Positional[Annotated[tuple[str, ...], Field(min_length=1, max_length=100)]]
    """Its values; of controls: parameters, experts, or both."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=100)] = (0,)
    """Of the weights: one training each of every member; the mixture has its own."""

    def __post_init__(self) -> None:
        MemberOptions.__post_init__(self)
        different("values", self.values)
        different("seeds", self.seeds)


def configs(options: SweepOptions) -> dict[str, ModelConfig]:
    """The Baseline, then each member by name. Raises `UserError` for a value that is none, and for a member that
    cannot be matched."""
    baseline, attended_tokens = baseline_network(options.baseline)
    found = {BASELINE: baseline}
    for value in options.values:
        name = f"{options.axis}-{value}"
        if options.axis == "controls":
            found[name] = _control(baseline, value)
        elif options.axis == "repeats":
            visits = _whole(value)
            found[name] = replace(baseline, num_visits=visits, loop_scale=default_loop_scale(max(1, visits)))
        else:
            found[name] = sized(name, baseline, _request(options, value), attended_tokens)
    for name, config in found.items():
        if (first := next(each for each in found if found[each] == config)) != name:
            raise UserError(f"values must give networks that differ; {name} is the same as {first}: leave one out")
    return found


def _request(options: SweepOptions, value: str) -> MatchRequest:
    """The twin that a value asks for."""
    match options.axis:
        case "span":
            return replace(options.match, span=_number(value))
        case "depth":
            return replace(options.match, depth=_whole(value))
        case "visits":
            return replace(options.match, visits=_whole(value))
        case _:
            return replace(options.match, loop_scale="inverse" if value == "inverse" else _number(value))


def _control(baseline: ModelConfig, value: str) -> ModelConfig:
    """What a looped network might owe its gain to, without a loop."""
    more = replace(baseline, num_experts=2 * baseline.num_experts)
    if value == "parameters":
        return more
    if value == "experts":
        return replace(more, top_k=2 * baseline.top_k, expert_width=max(1, baseline.expert_width // 2))
    raise UserError(f"a control must be parameters or experts; got {shown(value)}")


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"a value of the axis must be a number; got {shown(value)}") from None


def _whole(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 6):
        raise UserError(f"a value of the axis must be a whole number; got {shown(value)}")
    return int(value)


def sweep(options: SweepOptions) -> tuple[Table, dict[str, bytes]]:
    """Train all members. -> the ablation table, and the CSV files by name"""
    baseline, attended_tokens = baseline_network(options.baseline)
    members = configs(options)
    found = train_members(
        [Member(name=name, config=config, seed=seed) for name, config in members.items() for seed in options.seeds],
        options,
    )  # fmt: skip
    by_name = {name: [each for each in found if each.member.name == name] for name in members}
    shots = max(found[0].exact_match, default=None)
    rows: list[list[Cell]] = []
    for name, runs in by_name.items():
        losses, over = _losses(runs), _losses(runs) - _losses(by_name[BASELINE])
        difference = [None, None] if name == BASELINE else [float(over.mean()), half_interval(over.tolist())]
        exact = [] if shots is None else [float(np.mean([each.exact_match[shots] for each in runs]))]
        shape = shape_cells(members[name], baseline, attended_tokens)
        rows.append([name, *shape, float(losses.mean()), *difference, *exact])
    columns = ["", "shape", "FLOPs", "total", "KV", "loss", "minus baseline", "+-"]
    notes = [
        f"loss: held out, nats a token, mean over {', '.join(found[0].loss_nats)}; {len(options.seeds)} seeds; "
        f"{found[0].tokens:,} tokens each",
        "+-: 95% over seeds, paired by seed (Student); - where there is one seed",
    ]
    table = Table(
        f"Sweep over {options.axis}", [*columns, *([] if shots is None else [f"exact, {shots} shots"])], rows, notes
    )
    return table, {"runs.csv": _csv(_run_rows(found, baseline, attended_tokens)), "scores.csv": _csv(_scores(found))}


def _losses(runs: Sequence[Trained]) -> Floats:
    return np.array([each.mean_loss for each in runs])


def _run_rows(found: Sequence[Trained], baseline: ModelConfig, attended_tokens: float) -> list[Row]:
    """What `smelt_interp.scaling fit` reads: one row a run and domain."""
    control = budget(fully_active_control(baseline), attended_tokens)
    rows: list[Row] = []
    for each in found:
        config = each.member.config
        counts = budget(config, attended_tokens)
        # All but the last norm belongs to layers, which are alike.
        total, looped = counts.parameters.total, config.loop_stop - config.loop_start
        repeated = (total - config.width) // config.num_layers * looped
        same: Row = {
            "architecture": each.member.name, "seed": each.member.seed, "tokens": each.tokens,
            "flops_per_token": counts.flops.training, "sparsity": sparsity(counts, control).sparsity,
            "once": total - repeated, "repeated": repeated, "visits": config.num_visits,
        }  # fmt: skip
        rows += [same | {"domain": domain, "loss": loss} for domain, loss in each.loss_nats.items()]
    return rows


def _scores(found: Sequence[Trained]) -> list[Row]:
    """What `smelt_interp.scaling.calibration fit` reads: exact match after the most demonstrations, paired by seed."""
    return [
        {"architecture": each.member.name, "loss": each.mean_loss, "score": score, "pair": f"seed {each.member.seed}"}
        for each in found
        for score in [*each.exact_match.values()][-1:]
    ]


def _csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue().encode()


def main() -> None:
    """Train all members, print the table and write the CSV files."""
    options = parse(SweepOptions, prog="python -m model.training.sweep", description=__doc__ or "")
    with ranks.joined(options.device):
        table, files = sweep(options)
        print_table(table)
        if ranks.is_first_rank():
            for name, data in files.items():
                write_whole(options.out / name, data)
                print(f"wrote {options.out / name}")


if __name__ == "__main__":
    run_command(main)
