"""A probe over kept states and seeds: every number is the mean of the runs' own, its interval Student's over runs."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from model.network import LoopedMoE
from model.training.kept import END, kept, network_at
from model.training.state import TrainingPlace, save_state
from probes import over_training
from probes.running.seeds import over_seeds, student_interval
from probes.statistics.bootstrap import Estimate
from probes.statistics.quantities import record
from smelt_interp.errors import UserError
from smelt_interp.scaling.csv_columns import ANY, LOSS, read_columns
from tests.support.planted import LOOPED, pick

STEPS = (3, 6)
CONFIG = replace(LOOPED, context=48)


def a_run(folder: Path, seed: int, *, visits: int = 2, steps: tuple[int, ...] = STEPS) -> Path:
    """A run's folder as the trainer leaves it: after step n the network has the weights of seed `seed` + n."""
    config = replace(CONFIG, num_visits=visits, loop_scale=1 / visits)
    folder.mkdir()
    for step in steps:
        network = LoopedMoE(config, seed=seed + step)
        remembered = {f"weight/{name}": weight.detach() for name, weight in network.named_parameters()}
        save_state(
            folder, TrainingPlace(step=step, seconds=1.0), {**remembered, "adamw/step": torch.ones(1)}, keep_every=1
        )
    (folder / "run.json").write_text(json.dumps({"config": config.to_json(), "options": {"tokenizer": "bytes"}}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    seeds = {"smelt-0": (0, 2), "smelt-1": (20, 2), "base-0": (40, 1), "base-1": (60, 1)}
    made = {name: a_run(folder / name, seed, visits=visits) for name, (seed, visits) in seeds.items()}
    LoopedMoE(CONFIG, seed=3).save_pretrained(folder / "ended", readme="")
    network_at(kept(made["smelt-0"]), 6).save_pretrained(made["smelt-0"] / "checkpoint", readme="")
    copytree(made["smelt-0"], folder / "copy")
    return made | {
        "copy": folder / "copy",
        "own": made["smelt-0"] / "checkpoint",
        "ended": folder / "ended",
        "early": a_run(folder / "early", 9, steps=(4,)),
    }


def asked(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    few = ("--samples", "3", "--length", "24")
    monkeypatch.setattr(sys, "argv", ["probes.over_training", *map(str, words), *few])
    over_training.main()


def test_a_kept_state_is_the_network_it_was(runs: dict[str, Path]) -> None:
    run = kept(runs["smelt-1"])
    assert list(run.networks) == [3, 6]
    found, expected = network_at(run, 6).state_dict(), LoopedMoE(CONFIG, seed=26).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ended = kept(runs["ended"])
    assert list(ended.networks) == [END]
    assert network_at(ended, END).config == CONFIG


def test_runs_of_several_seeds_have_their_mean_and_an_interval_over_seeds(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds, others = (runs["smelt-0"], runs["smelt-1"]), (runs["base-0"], runs["base-1"])
    asked(monkeypatch, *seeds, "--against", *others, "--probe", "domain_loss", "--data", "code", "--json")
    document = json.loads(capsys.readouterr().out)
    rows = document["results"]["code"]
    for step in STEPS:
        of_runs = [each["rows"] for each in document["by_run"] if each["step"] == step]
        assert len(of_runs) == 2
        for quantity in ("loss (nats)", "gain (nats)"):
            values = [pick(each, quantity=quantity)["value"] for each in of_runs]
            found = pick(rows, quantity=quantity, step=step)
            expected = student_interval(values)
            assert (found["value"], found["low"], found["high"], found["n"]) == pytest.approx(expected)
        own, gain = (pick(rows, quantity=quantity, step=step) for quantity in ("loss (nats)", "gain (nats)"))
        assert own["in_the other"] - own["value"] == pytest.approx(gain["value"])
    assert [row["step"] for row in rows[:2]] == list(STEPS), "a quantity's steps stand together"


def test_options_of_the_named_probe_are_taken_and_files_written(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked(monkeypatch, runs["smelt-0"], "--probe", "choice_tasks", "--data", "copy", "code", "--size", "2", "--choices",
          "2", "--shots", "1", "--against", runs["base-0"], "--at", "6", "--out", out)  # fmt: skip
    printed = capsys.readouterr().out
    assert "Choice tasks over training: tasks" in printed
    assert over_training.OTHER in printed
    asked(monkeypatch, runs["smelt-0"], "--probe", "domain_loss", "--data", "code", "--at", "6")
    assert over_training.OTHER not in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        "over-training-choice_tasks.json", "over-training-choice_tasks.html", "over-training-choice_tasks-tasks.csv",
        "over-training-choice_tasks-code.csv", "scores.csv",
    }  # fmt: skip
    scores = read_columns(out / "scores.csv", ("architecture",), {"loss": LOSS, "score": ANY}, ("group", "pair"))
    assert scores["pair"].tolist() == ["seed 1, step 6"] * 2
    assert scores["architecture"].tolist() == ["looped", "baseline"]


def test_rows_of_runs_become_one_by_students_law() -> None:
    def of(value: float, other: float | None, note: str = "") -> list[dict[str, object]]:
        row = record("headline", "loss", Estimate(value, 0.0, 9.0, 50), where={"domain": "code"},
                     nulls={"uniform": 5.0 + value}, note=note)  # fmt: skip
        return [{**row, "in_it": other, "in_it_low": 0.0, "in_it_high": 9.0}]

    (found,) = over_seeds([of(1.0, 2.0), of(2.0, 2.0), of(3.0, 2.0)])
    spread = 4.302653 / np.sqrt(3)
    assert (found["value"], found["low"], found["high"]) == pytest.approx((2.0, 2 - spread, 2 + spread), abs=1e-5)
    assert (found["n"], found["null_uniform"]) == (3, 7.0)
    assert (found["in_it"], found["in_it_low"], found["in_it_high"]) == (2.0, 2.0, 2.0)
    (missing,) = over_seeds([of(1.0, None), of(2.0, 2.0)])
    assert (missing["value"], missing["in_it"], missing["in_it_low"]) == (1.5, None, None)
    assert over_seeds([of(1.0, 2.0)]) == of(1.0, 2.0), "one run keeps its interval over documents"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"runs must be one or more folders; got none"),
        (("{smelt-0}", "--against", "{base-0}", "{base-1}"), r"--against must name as many runs .*; got 2 and 1"),
        (("{smelt-0}", "{smelt-0}"), r"runs must be one or more different values; got .*smelt-0 .*smelt-0"),
        (("{smelt-0}", "{own}"), r"runs must be one or more different values; got .*smelt-0 .*smelt-0"),
        (
            ("{smelt-0}", "{copy}", "--data", "code"),
            r"runs must have weights of their own; got .*smelt-0 and .*copy with the same",
        ),
        (("{smelt-0}", "--at", "5"), r"every run must have kept step 5; all have 3, 6: train with --keep-every"),
        (("{smelt-0}", "{early}"), r"runs must have kept a step that all have; got smelt-0 3 6; early 4"),
        (("{smelt-0}", "--at", "3", "3"), r"--at must be one or more different values; got 3 3"),
        (("{smelt-0}", "{base-0}"), r"runs must be seeds of one network; got .*smelt-0 and .*base-0"),
        (("nowhere",), r"a run must be a folder with states of a training, or a checkpoint; got nowhere"),
        (("{smelt-0}", "--probe", "domain_los"), r"a probe must be one of .*; got 'domain_los'; nearest: domain_loss"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    words: tuple[str, ...], message: str, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=message):
        asked(monkeypatch, *(word.format(**runs) for word in words))


def test_a_run_that_does_not_say_its_config_is_refused(tmp_path: Path, runs: dict[str, Path]) -> None:
    folder = a_run(tmp_path / "it", 0)
    (folder / "run.json").write_text('{"config": 3}')
    with pytest.raises(UserError, match=r"run\.json must say the config and the options of the run; got"):
        network_at(kept(folder), 3)
