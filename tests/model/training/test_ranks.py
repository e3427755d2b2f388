"""Training over ranks: two of them, whatever each holds, train as one does, and go on with each other's states."""

import json
import os
import re
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from model import ranks
from model.network import LoopedMoE
from model.training import sharding
from model.training.optimizers import Optimizers
from model.training.options import TrainOptions
from model.training.sharding import check_ranks, shard
from model.training.state import states
from model.training.train import Training, train
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from tests.support.configs import TINY
from tests.support.ranked import under_ranks

OPTIONS = TrainOptions(
    config="tiny.json", out=Path("run"), steps=6, warmup=2, decay=0.5, save_every=2, evaluate_every=6,
    balance=0.5, router_z=0.01, learning_rate=1e-3,
    mixture=MixtureOptions(
        context=16, dyck_episode=0, dyck_standard=0, code=0, prose=0, math=0, backcopy=3, source="excerpts"
    ),
)  # fmt: skip

TWO_LAYERS = replace(TINY, num_layers=2, loop_stop=2, qk_norm=True, qk_norm_over="all heads")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY.to_json()))


def losses(rows: list[Samples], optimizer: Literal["adamw", "muon"], expert_parallel: int = 1) -> list[list[float]]:
    """Every number of each step."""
    network, options = LoopedMoE(TWO_LAYERS), replace(OPTIONS, optimizer=optimizer)
    shard(network, "cpu", expert_parallel)
    run = Training(options, network, Optimizers(network, options))
    return [list(run.step(number, each).values()) for number, each in enumerate(rows)]


@pytest.mark.parametrize(("optimizer", "steps"), [("adamw", 20), ("muon", 6)])
def test_two_ranks_train_as_one_with_their_experts_divided_or_not(
    optimizer: Literal["adamw", "muon"], steps: int
) -> None:
    """Three rows a step: one rank reads two of them, the other one."""

    mixture = TrainingMixture(OPTIONS.read)
    rows = [mixture.batch(number) for number in range(steps)]

    @ranks.joined()
    def both(rank: int) -> None:
        found = [losses(rows, optimizer), losses(rows, optimizer, 2)]
        Path(f"{rank}.json").write_text(json.dumps(found))

    assert under_ranks(2, both) == [(0, "")] * 2
    expected = torch.tensor(losses(rows, optimizer))
    for rank in range(2):
        whole, divided = torch.tensor(json.loads(Path(f"{rank}.json").read_text()))
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(divided, expected, atol=1e-4, rtol=0)
    assert expected[0, 0] > expected[-1, 0]


def test_a_run_goes_on_with_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, then two that divide the experts, then one."""
    step = Training.step

    def until(stop: int) -> None:
        def stopping(run: Training, number: int, samples: Samples) -> dict[str, float]:
            if number == stop:
                raise KeyboardInterrupt
            return step(run, number, samples)

        monkeypatch.setattr(Training, "step", stopping)

    until(2)
    with pytest.raises(KeyboardInterrupt):
        train(OPTIONS)
    until(4)
    ended = under_ranks(2, ranks.joined()(lambda rank: print(train(replace(OPTIONS, expert_parallel=2)))))
    assert [code for code, _ in ended] == [130, 130]
    assert [*states(Path("run"))] == [2, 4]
    until(OPTIONS.steps)
    train(OPTIONS)
    train(replace(OPTIONS, out=Path("whole")))
    found, expected = (load_file(Path(run, "checkpoint/model.safetensors")) for run in ("run", "whole"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=2**-7)  # bfloat16 has 8 bits


@pytest.mark.parametrize(
    ("size", "changed", "message"),
    [
        (4, {}, "ranks must be at most 3, the rows of a part of a step, .*; got 4: give more rows"),
        (2, {"expert_parallel": 3}, "--expert-parallel must divide the 2 ranks and the 6 experts; got 3"),
        (3, {"expert_parallel": 2}, "--expert-parallel must divide the 3 ranks and the 6 experts; got 2"),
        (1, {"expert_parallel": 2}, "--expert-parallel must divide the 1 ranks and the 6 experts; got 2"),
    ],
)
def test_what_ranks_cannot_share_is_said(size, changed, message, monkeypatch):
    monkeypatch.setattr(sharding, "num_ranks", lambda: size)
    with pytest.raises(UserError, match=message):
        check_ranks(TINY, replace(OPTIONS, **changed))


def test_a_rank_that_dies_ends_the_others_with_one_line():
    @ranks.joined()
    def dying(rank: int) -> None:
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.wait()

    (code, said), (killed, _) = under_ranks(2, dying)
    assert (code, killed) == (2, -signal.SIGKILL)
    assert re.fullmatch(r"error: all ranks must run to the end; rank 0 lost another \(.*\): see what .* again\n", said)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "with WORLD_SIZE set, RANK must be set as torchrun does; it is not: unset WORLD_SIZE"),
        ({"RANK": "1"}, "the 2 ranks must meet at 127.0.0.1:9; .*: start them with torchrun"),
        ({"RANK": "one"}, "the 2 ranks must meet at 127.0.0.1:9; .*: start them with torchrun"),
        ({"RANK": "2"}, "the 2 ranks must meet at 127.0.0.1:9; .*: start them with torchrun"),
    ],
)
def test_ranks_that_do_not_meet_are_told(variables, message, monkeypatch):
    monkeypatch.setattr(ranks, "MEETING", timedelta(seconds=1))
    values = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"} | variables
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message), ranks.joined():
        pass
