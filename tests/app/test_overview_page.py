"""The page of every measure by step, run in process on planted captures."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from app.widgets.answers import kept_answer
from cache.store import Capture
from probes import attention_sink, over_training
from probes.running import catalog
from smelt_interp.errors import UserError
from tests.support.app_pages import page

ROW = {"level": "headline", "quantity": "loss (nats)", "value": 2.0, "low": 1.9, "high": 2.1}
WRITTEN = {"schema": over_training.SCHEMA, "probe": "domain_loss", "command": "python -m probes.over_training runs/a",
           "results": {"code": [ROW | {"step": 100}, ROW | {"step": 200, "value": 1.5}]}}  # fmt: skip


def test_kept_results_are_rows_by_step_and_the_others_are_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("looped", "baseline"):
        shutil.copytree(folder / name, tmp_path / name, ignore=shutil.ignore_patterns("results"))
    words = ["--capture", str(tmp_path / "looped"), "--against", str(tmp_path / "baseline"), "--json"]
    monkeypatch.setattr(sys, "argv", ["probes.attention_sink", *words])
    catalog.load("attention_sink").main()
    (tmp_path / "over-training-domain_loss.json").write_text(json.dumps(WRITTEN))
    (tmp_path / "over-training-x.json").write_text("[]")
    test = page("overview", tmp_path, {}, capture="looped")
    steps, training = (json.loads(chart.proto.spec) for chart in test.get("plotly_chart"))
    (looped, baseline) = [trace for trace in steps["data"] if trace["name"] != "null"][:2]
    # The planted start mass: the first query, which has no choice, is left out of it.
    assert [round(y, 2) for y in looped["y"]] == [0.6, 0.6, 0.6, 0.02, 0.02, 0.6]
    assert (baseline["name"], baseline["x"]) == ("baseline", [0, 1, 2, 3])
    assert training["data"][0]["x"] == [100, 200]
    asked = test.code[0].value.splitlines()
    assert asked[0] == f"python -m probes.residual_updates {' '.join(words[:-1])}"
    assert [button.label for button in test.button] == ["Measure them now"]
    assert test.code[1].value == WRITTEN["command"]
    (error,) = test.error
    assert error.value.startswith(f"{tmp_path / 'over-training-x.json'} must be what probes.over_training --out wrote")
    # A kept result with a word for a number is none, and of training it is one line.
    (kept,) = (tmp_path / "looped" / "results").glob("*.json")
    captures, options = [Capture(tmp_path / name) for name in ("looped", "baseline")], attention_sink.Options()
    assert kept_answer("attention_sink", captures, options) is not None
    damaged = json.loads(kept.read_text())
    damaged["results"][0]["rows"][0]["value"] = "x"
    kept.write_text(json.dumps(damaged))
    assert kept_answer("attention_sink", captures, options) is None
    written = {**WRITTEN, "results": {"code": [ROW | {"step": 1, "value": "x"}]}}
    (tmp_path / "over-training-x.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="over_training --out wrote; value of row 1 is 'x': write it again"):
        over_training.read_result(tmp_path / "over-training-x.json")


def test_an_empty_folder_and_a_damaged_capture_are_told(folder: Path, tmp_path: Path) -> None:
    test = page("overview", tmp_path, {})
    assert f"--out {tmp_path}" in test.code[-1].value
    assert not test.error
    (error,) = page("overview", folder, {}, capture="cut").error
    assert "cut" in error.value
