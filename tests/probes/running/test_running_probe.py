"""A probe that runs the network: a small whole one, by Python and by its command, on a checkpoint and on a capture."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from cache.batch import Batch
from cache.record import record, run_batches
from model.hooks.looped_model import LoopedModel
from model.network import LoopedMoE
from probes.running import command
from probes.running.passes import pass_inputs
from probes.running.probe import Result, accumulate, answer, run
from probes.statistics.along_steps import predicts
from probes.statistics.arrays import ratio
from probes.statistics.grid import Grid
from probes.statistics.quantities import Quantity
from probes.statistics.sums import Reduced, Sums, Totals
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError
from smelt_interp.sites import hook_name
from smelt_interp.validation import validated
from tests.support.commands import Command
from tests.support.dense import DenseNested
from tests.support.networks import tiny_network
from tests.support.planted import LOOPED, pick, same_numbers, text_samples


@validated
class Options:
    """Nothing to choose."""


def needs(architecture: Architecture) -> tuple[str, ...]:
    return ()


def start_on(network: LoopedModel, options: Options) -> Sums[Grid, Options]:
    return Sums(network.architecture, options, lay_out, partial(reduce, network), quantities)


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grid:
    steps = tuple(range(len(batch.architecture.steps)))
    return Grid(architecture=batch.architecture, loops=loops, steps=steps)


def reduce(network: LoopedModel, batch: Batch, grid: Grid, options: Options) -> Reduced:
    """How far the right token's log-probability falls without each step's attention."""
    tokens_BT, asked = pass_inputs(network, batch)
    next_BT1, counted_BT = tokens_BT.roll(-1, 1)[..., None], torch.from_numpy(predicts(batch))
    found = []
    for step in grid.steps:
        cut = [(hook_name(step, "hook_attn_out"), lambda x, hook: x * 0)]
        with torch.no_grad():
            logits_BTW = network.run_with_hooks(tokens_BT, fwd_hooks=cut, **asked)
        lost_BT = batch.logprob_BT - logits_BTW.log_softmax(-1).gather(-1, next_BT1)[..., 0]
        found.append((lost_BT * counted_BT).sum(1))
    return Reduced(
        by_sample={"lost": torch.stack(found, 1), "tokens": counted_BT.sum(1)},
        defined={"samples": counted_BT.any(1).numpy()},
    )


def quantities(totals: Totals[Grid, Options]) -> list[Quantity]:
    value_RL = ratio(totals.sums["lost"], totals.sums["tokens"][:, None])
    places = totals.layout.places(("headline", "layer"))
    return [Quantity(name="nats lost", value_RLH=value_RL[..., None], places=places, n=totals.n["samples"])]


def result(sums: Sums[Grid, Options]) -> Result:
    return answer(sums, lambda totals: {})


PROBE = ModuleType("probes.cut_attention", "What is lost without a step's attention?")
vars(PROBE).update(
    TITLE="Cut attention", Options=Options, DATA=DataOptions(data=("code",), samples=3, length=24), OVERVIEW=(),
    needs=needs, start_on=start_on, result=result,
)  # fmt: skip
ASKED = {"cut": (PROBE, Options())}


def measured(network: LoopedModel, batch_size: int) -> list[dict[str, object]]:
    batches = run_batches(network, text_samples(4, 12, padding=2), (), batch_size=batch_size)
    return run(batches, ASKED, network=network)["cut"].rows()


@pytest.mark.parametrize("network", [tiny_network(LOOPED), DenseNested()], ids=["ours", "nested"])
def test_it_measures_any_hooked_network_whatever_the_batches(network: LoopedModel) -> None:
    rows = measured(network, 4)
    assert same_numbers(rows, measured(network, 1), 1e-5)
    assert len([row for row in rows if row["level"] == "layer"]) == len(network.plan)


def test_a_step_whose_attention_writes_nothing_loses_nothing() -> None:
    network = tiny_network(LOOPED)
    with torch.no_grad():
        network.layers[1].attn.o_proj.weight.zero_()
    rows = measured(network, 4)
    for visit in (1, 2):
        assert pick(rows, level="layer", layers="2", visit=visit)["value"] == 0
    assert pick(rows, level="layer", layers="3", visit=2)["value"] != 0


def test_sums_of_parts_merge() -> None:
    network, samples = tiny_network(LOOPED), text_samples(4, 12, padding=2)
    first, second = (
        accumulate(run_batches(network, samples, (), rows=rows), ASKED, network=network)["cut"]
        for rows in ((0, 1), (2, 3))
    )
    first.merge(second)
    assert same_numbers(result(first).rows(), measured(network, 2), 1e-5)


def test_without_the_network_it_is_refused() -> None:
    batches = run_batches(tiny_network(LOOPED), text_samples(2, 8), ())
    with pytest.raises(UserError, match=r"Cut attention must be given the network that it runs; got batches alone"):
        run(batches, ASKED)


def test_its_command_measures_a_checkpoint_and_refuses_a_capture_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = LoopedMoE(replace(LOOPED, context=24))
    network.save_pretrained(tmp_path / "tiny", readme="")
    asked = Command(monkeypatch, capsys)
    main = partial(command.main, PROBE)
    document = asked.json(main, "--ckpt", tmp_path / "tiny")
    assert [each["name"] for each in document["networks"]] == ["tiny", "untrained"]
    assert np.isfinite([row["value"] for row in document["results"][0]["rows"]]).all()
    capture = tmp_path / "seen"
    record(network, text_samples(2, 8), capture, suffixes=("hook_attn_out",))
    said = asked.refusal(main, "--capture", capture)
    assert "Cut attention cannot be measured; seen: a capture holds no weights to run" in said
    assert "--ckpt" in said
    beside = asked.text(main, "--ckpt", tmp_path / "tiny", "--no-untrained", "--against", capture)
    assert "seen: a capture holds no weights" in beside
