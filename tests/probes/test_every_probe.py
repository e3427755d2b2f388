"""One command measures a checkpoint with every probe, from captures that it makes once."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cache.record import DEFAULT_SITES
from model.network import LoopedMoE
from probes.__main__ import Options, data_sets, main, record_all
from probes.running import catalog
from smelt_interp.errors import run_command
from tests.support.planted import BASELINE, LOOPED


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["probes", *arguments])
    run_command(main)


def test_every_probe_answers_on_every_network_and_a_second_run_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("tiny-looped", LOOPED), ("tiny-once", BASELINE)):
        LoopedMoE(replace(config, context=160), seed=1).save_pretrained(tmp_path / name, readme="")
    folder = tmp_path / "captures"
    arguments = ("--ckpt", str(tmp_path / "tiny-looped"), "--against", str(tmp_path / "tiny-once"),
                 "--captures", str(folder), "--samples", "2", "--episodes", "2")  # fmt: skip
    run(monkeypatch, *arguments)
    printed = capsys.readouterr().out
    tables = [line for line in printed.splitlines() if " on dyck (" in line or " on code (" in line]
    titles = [catalog.load(name).TITLE for name in catalog.NAMES]
    assert [line.split(":")[0] for line in tables] == [*titles[:4], *titles[:4], titles[4]]
    assert "untrained network: not measured" not in printed
    assert "Baseline: not measured" not in printed
    assert "The paper's figures against tiny-looped; n 2" in printed
    assert "10 shots fit the context of 160 tokens" in printed
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.h5")}
    assert sorted(path.stem for path in written) == sorted(
        f"{name}-{data}"
        for name in ("tiny-looped", "tiny-looped-untrained", "tiny-once")
        for data in ("code", "dyck", "shots")
    )
    options = Options(ckpt=tmp_path / "tiny-looped", against=(tmp_path / "tiny-once",), captures=folder, samples=2,
                      episodes=2)  # fmt: skip
    for data in data_sets(options, DEFAULT_SITES):
        assert set(record_all(options, data)) <= written.keys()
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.h5")} == written


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
