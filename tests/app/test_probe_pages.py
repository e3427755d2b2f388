"""The pages of probes, run in process on planted captures."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from pandas import DataFrame

from cache.recording import write_capture
from cache.store import Capture
from probes.running import catalog, command, report
from tests.support.answers import measure
from tests.support.app_captures import episodes
from tests.support.app_pages import cut_short, probe


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("capture", ["looped", "baseline"])
def test_a_page_shows_the_rows_of_its_probe(name: str, capture: str, folder: Path) -> None:
    module, opened = catalog.load(name), Capture(folder / capture)
    result = measure(module, opened.batches(module.needs(opened.architecture)))
    headline = [row for row in result.rows() if row["level"] == "headline"]
    test = probe(name, folder, capture=capture, against="")
    assert not test.error
    shown = test.dataframe[0].value
    assert len(shown) == len(headline)
    for text, row in zip(shown["value [95%]"], headline, strict=True):
        if isinstance(row["value"], float) and (row["value"] == 0 or abs(row["value"]) >= report.NEARLY_NOTHING):
            assert text.split()[0] == f"{row['value']:.3g}"
    others = [row for row in result.rows() if row["level"] != "headline"]
    assert [len(table.value) for table in test.dataframe[1:]] == ([len(others)] if others else [])
    compared = any(isinstance(row["value"], float) for row in result.rows() if row["level"] != "head")
    own = sum(bool(figure.data) for figure in result.figures.values())
    assert len(test.get("plotly_chart")) == compared + own
    assert test.title[0].value == module.TITLE
    assert test.code[-1].value == f"python -m probes.{name} --capture {folder / capture}"


def test_the_planted_start_mass_is_shown(folder: Path) -> None:
    shown = probe("attention_sink", folder, capture="looped").dataframe[0].value
    rows = shown[(shown["quantity"] == "start mass") & (shown["head"] == "mean")]
    assert [text.split()[0] for text in rows["value [95%]"]][:2] == ["0.6", "0.02"]


def test_a_baseline_stands_beside(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped", against="baseline")
    shown = test.dataframe[0].value
    start = shown[(shown["quantity"] == "start mass") & (shown["visit"] == "2")]
    assert start["baseline"].iloc[0] == "0.6"
    assert [tab.label for tab in test.tabs] == ["looped", "baseline"]
    assert f"--against {folder / 'baseline'}" in test.code[-1].value


def test_the_command_of_a_page_gives_what_the_page_shows(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = probe(
        "attention_sink", folder, capture="looped", against="", t_min="3", heads="1 2", queries="predict_answer"
    )
    words = test.code[-1].value.split()
    assert words[5:] == ["--queries", "predict_answer", "--t-min", "3", "--heads", "1", "2"]
    monkeypatch.setattr(sys, "argv", [*words[2:], "--json"])
    catalog.load("attention_sink").main()
    document = json.loads(capsys.readouterr().out)
    (expected,) = command_tables(document)
    assert test.dataframe[0].value["value [95%]"].tolist() == expected


def command_tables(document: dict[str, object]) -> Iterator[list[str]]:
    for result in document["results"]:
        yield report.readable(result["rows"], "", {}, "headline").texts()["value [95%]"]


def test_changing_an_option_measures_again(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped")
    before = test.dataframe[0].value["null: uniform"].tolist()
    test.number_input(key="t_min").set_value(9)
    test.run()
    assert test.dataframe[0].value["null: uniform"].tolist() != before
    assert test.code[-1].value.endswith("--t-min 9")


def test_a_capture_recorded_anew_under_the_same_name_is_measured_anew(tmp_path: Path) -> None:
    shown = []
    for seed, mass in ((0, 0.5), (1, 0.25)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write_capture(tmp_path / "run", [episodes(seed=seed, first_mass=mass)], dtype="float32")
        test = probe("attention_sink", tmp_path, capture="run")
        shown.append(test.dataframe[0].value["value [95%]"][0].split()[0])
    assert shown == ["0.5", "0.25"]


def test_what_a_probe_refuses_is_one_line(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped")
    test.text_input(key="heads").set_value("1 x").run()
    assert [e.value for e in test.error] == ["heads must be whole numbers separated by spaces; got 1 x"]
    assert not test.dataframe


WRONG = [
    (
        "attention_sink",
        {
            "t_min": ("1e400", "whole number; got 1e400: shown is 1"),
            "heads": ("1 x", "whole numbers separated by spaces; got 1 x: shown is none"),
            "sink_threshold": ("inf", ".*: shown is 0.3"),
            "content": ("words", "demonstration_answers or .*; got words: shown is .*"),
            "against": ("gone", "among baseline; got 'gone': shown are all"),
        },
    ),
    ("attention_sink", {"t_min": ("0", "at least 1; got 0: shown is 1")}),
    ("attention_sink", {"t_min": ("9" * 30, r"at most 9\d+ on a page, .*: shown is 1")}),
    ("expert_overlap", {"shuffles": ("1001", "at most .*; got 1001: shown is .*")}),
    ("massive_activations", {"times": ("-1", "at least .*; got -1.0: shown is .*")}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_wrong_values_in_the_address_fall_back_and_each_says_so(
    name: str, wrong: dict[str, tuple[str, str]], folder: Path
) -> None:
    test = probe(name, folder, capture="looped", **{key: value for key, (value, _) in wrong.items()})
    said = {line.removeprefix("The address: ").partition(" must be ")[::2] for line in (w.value for w in test.warning)}
    assert {key for key, _ in said} == set(wrong)
    assert len(test.warning) == len(wrong)
    for key, line in said:
        assert re.fullmatch(wrong[key][1], line)
    assert not set(wrong) & set(test.query_params)
    assert test.dataframe[0].value.equals(shown_of(name, folder))
    assert not test.run().warning


@cache
def shown_of(name: str, folder: Path) -> DataFrame:
    """The headline of a probe's page without any choice."""
    return probe(name, folder, capture="looped").dataframe[0].value


def test_a_choice_given_twice_in_the_address_falls_back(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped", t_min=["1", "2"])
    assert [each.value for each in test.warning] == [
        "The address: t_min must be given once in an address; got 2 values: shown is 1"
    ]


def test_a_shard_replaced_under_its_manifest_is_told_and_its_old_numbers_are_gone(tmp_path: Path) -> None:
    write_capture(tmp_path / "run", [episodes()], dtype="float32")
    assert probe("attention_sink", tmp_path, capture="run").dataframe
    write_capture(tmp_path / "other", [episodes(seed=1, first_mass=0.25)], dtype="float32")
    (shard,) = (tmp_path / "other").glob("*.h5")
    shutil.copy(shard, tmp_path / "run" / shard.name)
    test = probe("attention_sink", tmp_path, capture="run", against="")
    (error,) = test.error
    assert "a shard must be as it was written; this one was changed or replaced" in error.value
    assert not test.dataframe


def test_what_a_command_kept_is_shown_and_not_measured_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "looped", tmp_path / "kept")
    monkeypatch.setattr(sys, "argv", ["probes.attention_sink", "--capture", str(tmp_path / "kept"), "--json"])
    catalog.load("attention_sink").main()
    asked: list[str] = []
    measure_all = command.measure_all
    monkeypatch.setattr(command, "measure_all", lambda name, *rest: asked.append(name) or measure_all(name, *rest))
    test = probe("attention_sink", tmp_path, capture="kept")
    assert test.dataframe[0].value["value [95%]"][0].startswith("0.6 ")
    assert len(test.get("plotly_chart")) == 1
    assert not asked
    test.button[0].click().run()
    assert asked == ["attention_sink"]
    assert len(test.get("plotly_chart")) == 2


def test_no_choice_waits_for_a_button(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped", t_min="3")
    assert not test.button
    assert "--t-min 3" in test.code[-1].value


def test_every_other_network_of_the_same_samples_stands_beside_without_asking(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped")
    assert test.dataframe[0].value["baseline"].iloc[0] == "0.6"
    drawn = json.loads(test.get("plotly_chart")[0].proto.spec)
    names = {trace["name"] for trace in drawn["data"]}
    assert names == {"looped", "baseline", "null: uniform", "null: baseline at depth"}
    assert all(trace.get("visible", True) is True for trace in drawn["data"])
    first = [trace for trace in drawn["data"] if trace.get("xaxis", "x") == "x"]
    assert {trace["name"] for trace in first} == names
    assert all(trace["error_y"]["array"] for trace in first if trace["name"] in ("looped", "baseline"))


def test_only_whole_captures_of_the_same_samples_are_offered_beside(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "captures", ignore=shutil.ignore_patterns("results"))
    batch = episodes()
    other = replace(batch, samples=replace(batch.samples, ids_NT=batch.samples.ids_NT[::-1].copy()))
    write_capture(folder / "other", [other], dtype="float32")
    write_capture(folder / "twin", [episodes(seed=1)], dtype="float32")
    assert Capture(folder / "other").samples.digest() != batch.samples.digest()

    def offered() -> list[str]:
        return probe("dyck_icl", folder, capture="looped").multiselect(key="against").options

    assert offered() == ["baseline", "twin"]
    cut_short(folder / "twin")
    assert offered() == ["baseline"]
