"""Sparsity as the paper measures it: against the fully active control, by compute (arXiv:2609.01343).

    S = 1 - N_eq / N,   N_eq = (F / F0) N0

F and N are a network's training FLOPs a token and total non-embedding parameters, F0 and N0 those of the control. The
paper does not print its control. Here it is the unlooped Baseline with as many experts as a token uses, which gives
every printed S of a Baseline; a looped network is measured against the control of the Baseline that it is matched to.
Beside it stands 1 - active / total, which is blind to looping: parameters that are visited twice count once.
"""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import Budget, budget, row_index
from smelt_interp.costs.network_choice import AttendedTokens, NetworkChoice
from smelt_interp.costs.presets import PAPER_PAIRS
from smelt_interp.errors import UserError, run_command
from smelt_interp.paper import printed
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_json, print_table
from smelt_interp.validation import validated


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """How sparse one network is."""

    sparsity: float
    """S."""
    dense_equivalent_parameters: float
    """N_eq: the parameters of a fully active network with the same FLOPs."""
    parameter_ratio_sparsity: float
    """1 - active / total."""


def fully_active_control(baseline: ModelConfig) -> ModelConfig:
    """The Baseline with every expert active. Raises `UserError` for a network that visits a layer twice."""
    if baseline.num_visits > 1:
        raise UserError(
            f"a control must be of an unlooped network; got num_visits {baseline.num_visits}: give the Baseline that "
            "the network is matched to as well"
        )
    return replace(baseline, num_experts=baseline.top_k)


def sparsity(network: Budget, control: Budget) -> Sparsity:
    """Sparsity of a network against its control, both counted at the same attended length."""
    equivalent = network.flops.training / control.flops.training * control.parameters.total
    return Sparsity(
        sparsity=1 - equivalent / network.parameters.total,
        dense_equivalent_parameters=equivalent,
        parameter_ratio_sparsity=1 - network.parameters.active / network.parameters.total,
    )


def with_sparsity(baseline: ModelConfig, wanted: float, attended_tokens: float, multiple: int = 1) -> ModelConfig:
    """The Baseline with the multiple of experts whose sparsity is nearest to the wanted one.

    Raises `UserError` for a sparsity that no number of experts of this width gives.
    """
    dense, one_more = (
        budget(replace(baseline, num_experts=number), attended_tokens)
        for number in (baseline.top_k, baseline.top_k + 1)
    )
    # S = 1 - (F / F0) N0 / N, where F and N grow linearly with the experts beyond the top k.
    parameters = one_more.parameters.total / dense.parameters.total - 1
    flops = one_more.flops.training / dense.flops.training - 1
    if (per_expert := (1 - wanted) * parameters - flops) <= 0:
        raise UserError(
            f"sparsity must be below {1 - flops / parameters:.4f}, where the router's FLOPs outgrow what experts of "
            f"width {baseline.expert_width} add; got {wanted}"
        )
    experts = baseline.top_k + wanted / per_expert
    smallest = -(-baseline.top_k // multiple) * multiple
    return replace(baseline, num_experts=max(smallest, multiple * round(experts / multiple)))


@validated
class SparsityOptions(NetworkChoice):
    """Measure sparsity against the fully active control of the Baseline, which is named second."""

    attended_tokens: AttendedTokens | Literal["own"] = "own"
    """Mean positions that a query attends to. own: 390 for the paper's grid, (context + 1) / 2 for any other."""
    json: bool = False
    """Print JSON."""


def main() -> None:
    """Print the sparsity of one network or two and the control's budgets."""
    options = parse(SparsityOptions, prog="python -m smelt_interp.costs.sparsity", description=__doc__)
    networks = options.networks(options.attended_tokens)
    control = budget(fully_active_control(networks[-1].config), networks[-1].attended_tokens)
    rows: list[dict[str, str | float]] = []
    for network in networks:
        measured = sparsity(budget(network.config, network.attended_tokens), control)
        row: dict[str, str | float] = {"network": network.name, **asdict(measured)}
        if options.pair in PAPER_PAIRS:
            index = row_index(options.pair, network.name)
            row["printed_sparsity"] = printed.number("grid", "rows", index, "printed", "sparsity")
        rows.append(row)
    control_row = {"training_flops": control.flops.training, "total_parameters": float(control.parameters.total)}
    if options.json:
        print_json({"control": control_row, "networks": rows})
        return
    note = (
        f"control: {control_row['training_flops']:.6g} training FLOPs, {control_row['total_parameters']:.6g} parameters"
    )
    print_table(Table("Sparsity", list(rows[0]), [list(row.values()) for row in rows], [note]))


if __name__ == "__main__":
    run_command(main)
