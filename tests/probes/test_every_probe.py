"""One command measures a checkpoint with every probe, from captures that it makes once."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cache.store import Capture
from model.network import LoopedMoE
from probes.__main__ import main
from probes.running import catalog
from probes.running.claims import CLAIMS
from smelt_interp.errors import run_command
from tests.support.planted import BASELINE, LOOPED


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["probes", *arguments])
    run_command(main)


def test_every_probe_answers_on_every_network_in_one_screen_and_a_second_run_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("tiny-looped", LOOPED), ("tiny-once", BASELINE)):
        LoopedMoE(replace(config, context=160), seed=1).save_pretrained(tmp_path / name, readme="")
    folder = tmp_path / "captures"
    arguments = ("--ckpt", str(tmp_path / "tiny-looped"), "--against", str(tmp_path / "tiny-once"),
                 "--captures", str(folder), "--samples", "2", "--episodes", "2")  # fmt: skip
    run(monkeypatch, *arguments)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) <= 45
    assert not Capture(folder / "tiny-looped-dyck-shots").kept, "its probe reads predictions alone"
    names = ("looped", "once", "untrained", "null")
    assert printed[1].split() == [word for data in ("dyck", "code") for name in names for word in (data, name)]
    assert sum(line.startswith("start mass, visit") for line in printed) == 4, "in the overview and in the card"
    assert any("10 shots fit the context of 160 tokens" in line for line in printed)
    run(monkeypatch, *arguments, "--json")
    said = capsys.readouterr()
    document = json.loads(said.out)
    measured = {(result["probe"], result["group"]) for result in document["results"]}
    once = {("dyck_icl", "dyck-shots"), ("length_gain", "code")}
    others = {*catalog.NAMES} - {name for name, _ in once}
    assert measured == {(name, data) for name in others for data in ("dyck", "code")} | once
    here = [claim for claim in CLAIMS if not claim.over_baseline]
    assert len(document["paper"]) == sum(len(claim.samples) for claim in here) + 2
    assert said.err.count("recorded before, used as it is") == 9


def test_a_checkpoint_that_is_not_there_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--ckpt", str(tmp_path / "nowhere"), "--captures", str(tmp_path / "captures"))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: a checkpoint must be a folder")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "captures").exists()
