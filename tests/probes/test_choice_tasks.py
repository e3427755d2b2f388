"""Tasks are scored as they were planted, whatever the batches, and as a network's own logits say."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.batch import Batch, take
from model.network import LoopedMoE
from probes import choice_tasks, few_shot_gap
from probes.choice_tasks import Asking, Options, TaskSamples, choose_samples, lay_out
from probes.running.source import SampleSet, Subject
from probes.statistics.sums import Sums
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError
from smelt_interp.scaling.csv_columns import ANY, LOSS, read_columns
from tests.support.planted import LOOPED, pick, planted_batch, same_numbers, split_batch

LONG = replace(LOOPED, context=160)
Right = Callable[[int, int], bool]
"""right(item, shots): whether a planted network answers the item of every task."""


def subject(network: LoopedMoE | None = None) -> Subject:
    asked = LoopedMoE(LONG, seed=0) if network is None else network
    return Subject(name="it", architecture=asked.architecture, described={}, network=asked,
                   batches=lambda *_: iter(()))  # fmt: skip


def asked(probe=choice_tasks, num: int = 6, **data) -> TaskSamples:
    return choose_samples(subject(), replace(probe.DATA, data=choice_tasks.TASKS, samples=num, **data), Options())[0]


def planted(data: TaskSamples, right: Right) -> Callable[[Samples], Iterator[Batch]]:
    """A network that gives the right candidate of an item -1 nat and every other -2, or the other way round, and whose
    most likely tokens are the right ones or all `x`."""
    known = {}
    for tasks in data.asked:
        for row, item in enumerate(tasks.item_N):
            answers = right(int(item), tasks.options.shots)
            known[tasks.samples.ids_NT[row, : tasks.samples.length_N[row]].tobytes()] = (answers, tasks.right_N[row])

    def passes(samples: Samples) -> Iterator[Batch]:
        logprob_NT = np.zeros(samples.ids_NT.shape, np.float32)
        argmax_NT = np.roll(samples.ids_NT, -1, axis=1).astype(np.int32)
        for row, length in enumerate(samples.length_N):
            answers, is_right = known[samples.ids_NT[row, :length].tobytes()]
            last = int(np.argmax(samples.role_NT[row] == Role.ANSWER)) - 1
            logprob_NT[row, last] = -1.0 if answers == is_right else -2.0
            argmax_NT[row] = argmax_NT[row] if answers else ord("x")
        yield from split_batch(planted_batch(LONG, samples, {}, logprob_BT=logprob_NT, argmax_BT=argmax_NT), 3)

    return passes


def summed(data: TaskSamples, right: Right, *, size: int = 8, probe=choice_tasks, shuffle: bool = False) -> Sums:
    """Sums of a planted network, fed batches of `size`."""
    sums = Sums(LONG.architecture(), Options(), lay_out, Asking(data, planted(data, right)).reduce, probe.quantities)
    batch = planted_batch(LONG, data.samples, {})
    batch = take(batch, np.random.default_rng(0).permutation(len(data.samples))) if shuffle else batch
    for each in split_batch(batch, size):
        sums.add(each)
    return sums


def rows(sums: Sums) -> list[dict[str, object]]:
    return [row for quantity in sums.quantities() for row in quantity.rows()]


def test_items_that_were_answered_right_are_scored_right() -> None:
    found = rows(summed(asked(), lambda item, _: item < 4))
    for task in choice_tasks.TASKS:
        for score in ("acc", "acc_norm", "exact"):
            row = pick(found, quantity=score, task=task)
            assert (row["value"], row["n"], row["shots"]) == (pytest.approx(4 / 6), 6, 4)
    mean = pick(found, quantity="acc", task="all")
    assert (mean["value"], mean["n"], mean["null_chance"]) == (pytest.approx(4 / 6), 24, pytest.approx(1 / 4))
    assert pick(found, quantity="exact", task="recall")["null_best_shortcut"] is not None
    assert pick(found, quantity="exact", task="recall").get("null_chance") is None, "nothing is offered"


def test_the_answer_does_not_depend_on_the_batches() -> None:
    data = asked()
    whole = rows(summed(data, lambda item, _: item % 2 == 0, size=24))
    assert same_numbers(rows(summed(data, lambda item, _: item % 2 == 0, size=5, shuffle=True)), whole)


def test_a_gain_over_another_network_is_paired_by_item() -> None:
    data = asked()
    own, other = (summed(data, lambda item, _, most=most: item < most).totals() for most in (5, 2))
    gains = [row for quantity in choice_tasks.against(own, other) for row in quantity.rows()]
    assert pick(gains, quantity="acc, gain", task="all")["value"] == pytest.approx(0.5)
    same = [row for quantity in choice_tasks.against(own, own) for row in quantity.rows()]
    assert {(row["value"], row["low"], row["high"]) for row in same} == {(0.0, 0.0, 0.0)}


def test_a_planted_few_shot_gap_comes_back() -> None:
    """Both answer 2 of 6 without a demonstration; with some, one answers 5 and the other 3."""
    data = asked(few_shot_gap, shots=(0, 1, 2))
    own, other = (summed(data, lambda item, shots, most=most: item < (most if shots else 2), probe=few_shot_gap)
                  for most in (5, 3))  # fmt: skip
    found = rows(own)
    values = {row["shots"]: row["value"] for row in found if row["level"] == "headline"}
    assert values == pytest.approx({"0": 2 / 6, "1-2": 5 / 6, "1-2 - 0": 3 / 6})
    assert pick(found, quantity="acc", task="copy", shots="2")["value"] == pytest.approx(5 / 6)
    gaps = [row for quantity in few_shot_gap.against(own.totals(), other.totals()) for row in quantity.rows()]
    values = {(row["quantity"], row["shots"]): row["value"] for row in gaps if row["level"] == "headline"}
    assert values == pytest.approx(
        {("acc, gap", "0"): 0, ("acc, gap", "1-2"): 2 / 6, ("shots' worth, gap", "1-2 - 0"): 2 / 6}
    )
    with pytest.raises(UserError, match=r"^shots must hold 0 and another number; got 1 2"):
        few_shot_gap.choose_samples(subject(), replace(few_shot_gap.DATA, shots=(1, 2)), Options())
    with pytest.raises(UserError, match=r"^data must name tasks, copy, .*; got 'recal'"):
        few_shot_gap.choose_samples(subject(), replace(few_shot_gap.DATA, data=("copy", "recal")), Options())


@torch.no_grad()
def test_a_network_is_scored_as_its_logits_say() -> None:
    network = LoopedMoE(LONG, seed=1).eval()
    data = asked(num=3)
    sums = choice_tasks.start_with(network, data, Options())
    sums.add(planted_batch(LONG, data.samples, {}))
    for tasks in data.asked:
        best = []
        for item in range(3):
            of_rows = []
            for row in np.flatnonzero(tasks.item_N == item):
                ids = torch.from_numpy(tasks.samples.ids_NT[row, : tasks.samples.length_N[row]].astype(np.int64))
                logprob = network(ids[None]).double().log_softmax(-1)[0]
                where = np.flatnonzero(tasks.samples.role_NT[row] == Role.ANSWER)
                of_rows.append(sum(float(logprob[t - 1, ids[t]]) for t in where))
            right = tasks.right_N[tasks.item_N == item]
            best.append(float(right[int(np.argmax(of_rows))]))
        assert pick(rows(sums), quantity="acc", task=tasks.options.task)["value"] == pytest.approx(np.mean(best))


def test_data_without_a_task_a_capture_and_a_network_of_nan_are_refused() -> None:
    with pytest.raises(UserError, match=r"^data must name one or more tasks, copy, .*; got code"):
        choose_samples(subject(), replace(choice_tasks.DATA, data=("code",)), Options())
    with pytest.raises(UserError, match=r"^choice tasks must be asked of a network; got a capture"):
        choose_samples(replace(subject(), network=None), choice_tasks.DATA, Options())
    network, data = LoopedMoE(LONG, seed=0), asked(num=2)
    with torch.no_grad():
        network.ln_final.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"must be finite|must have finite log-probabilities"):
        choice_tasks.start_with(network, data, Options()).add(planted_batch(LONG, data.samples, {}))


def test_the_command_writes_scores_that_calibration_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, visits in (("looped", 2), ("once", 1)):
        config = replace(LONG, num_visits=visits, loop_scale=1 / visits)
        LoopedMoE(config, seed=visits).save_pretrained(tmp_path / name, readme="")
    words = ["--ckpt", tmp_path / "looped", "--against", tmp_path / "once", "--samples", "2", "--out", tmp_path / "out",
             "--data", "copy", "code"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["probes.choice_tasks", *map(str, words)])
    choice_tasks.main()
    printed = capsys.readouterr().out
    assert "Choice tasks: looped on tasks" in printed
    assert "Choice tasks: looped on code" in printed
    frame = read_columns(tmp_path / "out" / "scores.csv", ("architecture",), {"loss": LOSS, "score": ANY},
                         ("group", "pair"))  # fmt: skip
    assert frame["architecture"].tolist() == ["looped", "baseline"], "the untrained network is left out"
    assert (frame["loss"] > 1).all()
    assert frame["score"].between(0, 1).all()
    assert frame["pair"].tolist() == ["looped"] * 2


def test_text_alone_gives_its_loss() -> None:
    samples = planted_batch(LONG, asked(num=2).samples, {}).samples
    data = SampleSet(name="text", samples=samples)
    sums = Sums(
        LONG.architecture(), Options(), lay_out, Asking(data, lambda _: iter(())).reduce, choice_tasks.quantities
    )
    sums.add(planted_batch(LONG, samples, {}, logprob_BT=np.full(samples.ids_NT.shape, -2.5, np.float32)))
    assert pick(rows(sums), quantity="loss (nats)")["value"] == pytest.approx(2.5)
