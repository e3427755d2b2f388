"""Networks that are compared: each a run of its own on the same tokens, sized before any trains, each going on from
where it stands, in turn or several at once."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from model.ranks import is_first_rank, num_ranks, wait
from model.training.at_once import train_at_once
from model.training.metrics import METRICS, MOST_BYTES
from model.training.options import Recipe, TrainOptions
from model.training.run_folder import ANEW, CHECKPOINT, RUN, check_same
from model.training.state import newest_place
from model.training.train import train
from smelt_interp.config import ModelConfig
from smelt_interp.costs.matching import MatchRequest, twin
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input
from smelt_interp.terminal.output_files import make_folder, write_whole
from smelt_interp.validation import validated

BASELINE = "baseline"


@validated
class MemberOptions(Recipe):
    """A Baseline, how its twins are sized, and how all are trained."""

    baseline: str
    """A named pair whose Baseline it is (100M, 200M, 600M, 1.6B, demo), or a config file (JSON)."""
    out: Path
    """Folder of all runs."""
    at_once: Annotated[int, Field(ge=1, le=1024)] = 1
    """So many train at the same time, each a process; with --device cuda each has a GPU of its own."""
    match: tyro.conf.OmitArgPrefixes[MatchRequest] = MatchRequest()


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


def train_members(members: Sequence[Member], options: MemberOptions) -> list[Trained]:
    """Train, or go on with, each in a folder of its own; those that are finished are read.

    Raises `UserError` as `train` and `train_at_once` do, before any trains where a folder holds another run, and when
    two have not read the same tokens in the same order.
    """
    if num_ranks() > 1 and options.at_once > 1:
        raise UserError(f"--at-once must be 1 under torchrun, whose ranks train one together; got {options.at_once}")
    runs = {f"{each.name}, seed {each.seed}": _run(each, options) for each in members}
    unfinished = {name: run for name, run in runs.items() if not (run.out / CHECKPOINT).exists()}
    if options.at_once > 1 and unfinished:
        train_at_once(unfinished, options.at_once)
    else:
        for name, run in unfinished.items():
            print(name, flush=True)
            train(run)
    found = [_read(member, run) for member, run in zip(members, runs.values(), strict=True)]
    if len({each.digest for each in found}) > 1:
        raise UserError(
            f"the networks in {options.out} must have read the same tokens in the same order; they have not"
        )
    return found


def _run(member: Member, options: MemberOptions) -> TrainOptions:
    """The run of a member, whose config is in its folder. Raises `UserError` when the folder holds another run."""
    folder = options.out / f"{member.name}-seed-{member.seed}"
    config = folder / "config.json"
    make_folder(folder)
    if is_first_rank() and not config.exists():
        write_whole(config, (json.dumps(member.config.to_json(), indent=1) + "\n").encode())
    wait()
    run = options.run(config, folder, member.seed)
    if ModelConfig.load(config) != member.config:
        raise UserError(f"{config} must hold the network that {member.name} is now; choose another --out")
    if (folder / RUN).exists() or (folder / CHECKPOINT).exists():
        check_same(run)
    return run


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
