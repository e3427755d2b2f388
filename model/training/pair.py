"""Train a Baseline and the looped network that costs what it costs, on the same tokens in the same order.

    python -m model.training.pair --baseline demo --visits 2 --out runs/pair

The looped network is the twin that `smelt_interp.costs.matching` finds: same FLOPs, parameters and KV cache, F / D
held. They train in turn, or side by side with `--at-once 2`; an interrupted pair goes on. What the two know of texts,
paired by document: `python -m probes.domain_loss`.
"""

from dataclasses import asdict

from model import ranks
from model.training.members import BASELINE, Member, MemberOptions, Trained, sized, train_members
from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import budget, mismatch
from smelt_interp.costs.matching import baseline_network, shape_text
from smelt_interp.errors import run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, percent, print_table
from smelt_interp.validation import Seed, validated


@validated
class PairOptions(MemberOptions):
    """A Baseline, how its twin is sized, and how both are trained."""

    seed: Seed = 0
    """Of the weights; the mixture has its own."""


def train_pair(options: PairOptions) -> list[Trained]:
    """The Baseline, then its twin. Raises `UserError` before any trains when there is no twin."""
    baseline, attended_tokens = baseline_network(options.baseline)
    looped = sized("looped", baseline, options.match, attended_tokens)
    members = [Member(name=BASELINE, config=baseline, seed=options.seed)]
    members.append(Member(name="looped", config=looped, seed=options.seed))
    return train_members(members, options)


def shape_cells(config: ModelConfig, baseline: ModelConfig, attended_tokens: float) -> list[Cell]:
    """A network's shape, and its FLOPs, parameters and KV cache over the Baseline's."""
    off = mismatch(budget(config, attended_tokens), budget(baseline, attended_tokens))
    return [shape_text(config), *map(percent, asdict(off).values())]


def main() -> None:
    """Train both and print their losses."""
    options = parse(PairOptions, prog="python -m model.training.pair", description=__doc__ or "")
    baseline, attended_tokens = baseline_network(options.baseline)
    with ranks.joined(options.device):
        found = train_pair(options)
        domains = list(found[0].loss_nats)
        rows: list[list[Cell]] = [
            [each.member.name, *shape_cells(each.member.config, baseline, attended_tokens), *each.loss_nats.values()]
            for each in found
        ]
        ckpt, against = (each.checkpoint for each in reversed(found))
        more = f"with intervals: python -m probes.domain_loss --ckpt {ckpt} --against {against} --data code backcopy"
        notes = [f"token order of both: {found[0].digest}", more]
        print_table(Table("Held-out loss, nats a token", ["", "shape", "FLOPs", "total", "KV", *domains], rows, notes))


if __name__ == "__main__":
    run_command(main)
