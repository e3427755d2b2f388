"""Training over ranks: two of them, whatever each holds, train as one does, and go on with each other's states."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import ranks
from model.network import LoopedMoE
from model.training.optimizers import Optimizers
from model.training.options import TrainOptions
from model.training.sharding import shard
from model.training.state import states
from model.training.train import Training, train
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.errors import run_command
from tests.support.configs import TINY
from tests.support.forked import Child

OPTIONS = TrainOptions(
    config="tiny.json", out=Path("run"), steps=6, warmup=2, decay=0.5, save_every=2, evaluate_every=6,
    balance=0.5, router_z=0.01, learning_rate=1e-3,
    mixture=MixtureOptions(
        context=16, dyck_episode=0, dyck_standard=0, code=2, prose=0, math=0, backcopy=1, source="excerpts"
    ),
)  # fmt: skip
STEPS = 20


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY.to_json()))


def under_ranks(size: int, work: Callable[[int], None]) -> list[tuple[int, str]]:
    """Run `work(rank)` in forked ranks as torchrun starts them. -> how each ended, and what it said"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def started(number: int) -> Callable[[], None]:
        def start() -> None:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            run_command(lambda: joined(number))

        return start

    def joined(number: int) -> None:
        with ranks.joined():
            work(number)

    children = [Child(started(number)) for number in range(size)]
    return [child.wait() for child in children]


def losses(expert_parallel: int) -> list[list[float]]:
    """Every number of each step."""
    network = LoopedMoE(TINY)
    shard(network, "cpu", expert_parallel)
    run = Training(OPTIONS, network, Optimizers(network, OPTIONS))
    mixture = TrainingMixture(OPTIONS.read)
    return [list(run.step(number, mixture.batch(number)).values()) for number in range(STEPS)]


def test_two_ranks_train_as_one_with_their_experts_divided_or_not():
    """Three rows a step: one rank reads two of them, the other one."""

    def both(rank: int) -> None:
        found = [losses(1), losses(2)]
        Path(f"{rank}.json").write_text(json.dumps(found))

    assert under_ranks(2, both) == [(0, "")] * 2
    expected = torch.tensor(losses(1))
    for rank in range(2):
        whole, divided = torch.tensor(json.loads(Path(f"{rank}.json").read_text()))
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(divided, expected, atol=1e-4, rtol=0)
    assert expected[0, 0] > expected[-1, 0]


def test_a_run_goes_on_with_another_number_of_ranks(monkeypatch):
    """One rank, then two that divide the experts, then one."""
    step = Training.step

    def until(stop: int) -> None:
        def stopping(run: Training, number: int, samples: object) -> dict[str, float]:
            if number == stop:
                raise KeyboardInterrupt
            return step(run, number, samples)

        monkeypatch.setattr(Training, "step", stopping)

    until(2)
    with pytest.raises(KeyboardInterrupt):
        train(OPTIONS)
    until(4)
    ended = under_ranks(2, lambda rank: print(train(replace(OPTIONS, expert_parallel=2))))
    assert [code for code, _ in ended] == [130, 130]
    assert [*states(Path("run"))] == [2, 4]
    until(OPTIONS.steps)
    train(OPTIONS)
    train(replace(OPTIONS, out=Path("whole")))
    found, expected = (load_file(Path(run, "checkpoint/model.safetensors")) for run in ("run", "whole"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=2**-7)  # bfloat16 has 8 bits
