"""Networks that are compared: each a run of its own on the same tokens, sized before any trains, each going on from
where it stands."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.ranks import is_first_rank, wait
from model.training.metrics import METRICS, MOST_BYTES
from model.training.options import Recipe, TrainOptions
from model.training.run_folder import ANEW, CHECKPOINT, check_same
from model.training.state import newest_place
from model.training.train import train
from smelt_interp.config import ModelConfig
from smelt_interp.costs.matching import MatchRequest, twin
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input
from smelt_interp.terminal.output_files import make_folder, write_whole

BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One network, whose weights are drawn from one seed."""

    name: str
    config: ModelConfig
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What its run came to."""

    member: Member
    checkpoint: Path
    tokens: int
    loss_nats: dict[str, float]
    """Held out, nats a token, by domain."""
    exact_match: dict[int, float]
    """Dyck, by number of shots."""
    digest: str
    """Of the order of its tokens."""

    @property
    def mean_loss(self) -> float:
        """Over domains, each weighing alike."""
        return sum(self.loss_nats.values()) / len(self.loss_nats)


def sized(name: str, baseline: ModelConfig, request: MatchRequest, attended_tokens: float) -> ModelConfig:
    """The twin of a Baseline that a member is. Raises `UserError`, naming the member, when there is none."""
    try:
        return twin(baseline, request, attended_tokens)
    except UserError as error:
        raise UserError(f"{name} cannot be matched: {error}") from None


def train_members(members: Sequence[Member], recipe: Recipe, out: Path) -> list[Trained]:
    """Train, or go on with, each in a folder of its own; those that are finished are read.

    Raises `UserError` as `train` does, and when two have not read the same tokens in the same order.
    """
    found: list[Trained] = []
    for member in members:
        folder = out / f"{member.name}-seed-{member.seed}"
        config = folder / "config.json"
        make_folder(folder)
        if is_first_rank() and not config.exists():
            write_whole(config, (json.dumps(member.config.to_json(), indent=1) + "\n").encode())
        wait()
        options = recipe.run(config, folder, member.seed)
        if ModelConfig.load(config) != member.config:
            raise UserError(f"{config} must hold the network that {member.name} is now; choose another --out")
        if (folder / CHECKPOINT).exists():
            check_same(options)
        else:
            print(f"{member.name}, seed {member.seed}", flush=True)
            train(options)
        found.append(_read(member, options))
    if len({each.digest for each in found}) > 1:
        raise UserError(f"the networks in {out} must have read the same tokens in the same order; they have not")
    return found


def _read(member: Member, options: TrainOptions) -> Trained:
    path = options.out / METRICS
    text = read_input(path, "the metrics of a run", MOST_BYTES).decode("utf-8", "replace")

    def numbers(prefix: str) -> dict[str, float]:
        return {key.removeprefix(prefix): float(value) for key, value in last.items() if key.startswith(prefix)}

    try:
        last = list(csv.DictReader(text.splitlines()))[-1]
        tokens, loss_nats = int(last["tokens"]), numbers("held_out_")
        exact_match = {int(shots): match for shots, match in numbers("dyck_exact_").items()}
    except (LookupError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise UserError(f"the last line of {path} must be whole; {error!s:.60}; {ANEW}") from None
    return Trained(
        member=member, checkpoint=options.out / CHECKPOINT, tokens=tokens, loss_nats=loss_nats, exact_match=exact_match,
        digest=newest_place(options.out).digest,
    )  # fmt: skip
