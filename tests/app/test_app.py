"""The dashboard's pages, run in process on planted captures."""

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import streamlit
from streamlit.delta_generator import DeltaGenerator
from streamlit.testing.v1 import AppTest

from app.widgets.capture_folder import RECORD, capture_names
from app.widgets.options import option_help, option_words, parse_option, query_of
from cache.recording import write_capture
from cache.store import Capture
from probes.running import catalog, command, report
from smelt_interp.errors import UserError
from smelt_interp.terminal import threads
from smelt_interp.terminal.from_one import as_typed
from tests.support.answers import measure
from tests.support.app_captures import episodes
from tests.support.forked import Child
from tests.support.planted import BASELINE, LOOPED, planted_batch, random_sites

APP = Path(__file__).parents[2] / "app"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole captures, one cut short, one not finished."""
    folder = tmp_path_factory.mktemp("captures")
    for name, config in (("looped", LOOPED), ("baseline", BASELINE)):
        write_capture(folder / name, [episodes(config)], dtype="float32", command=f"record {name}")
    shutil.copytree(folder / "looped", folder / "cut")
    cut_short(folder / "cut")
    (folder / "half").mkdir()
    request = {"command": "record half", "request": {"samples": {"number": 3}}}
    (folder / "half" / "request.json").write_text(json.dumps(request))
    return folder


def cut_short(capture: Path) -> None:
    """The manifest of a capture as a full disk or a bad copy would leave it."""
    (capture / "manifest.json").write_bytes((capture / "manifest.json").read_bytes()[:500])


def page(module: str, folder: Path, *names: str, **query: str) -> AppTest:
    """A page as it is right after its address is opened."""

    def script(module: str, names: tuple[str, ...], folder: str) -> None:
        from functools import partial
        from importlib import import_module
        from pathlib import Path

        from app.widgets.address import show_mistakes
        from app.widgets.capture_folder import choose_capture

        choose_capture(Path(folder))
        partial(getattr(import_module(f"app.views.{module}"), f"{module}_page"), *names)(Path(folder))
        show_mistakes()

    test = AppTest.from_function(script, default_timeout=60, args=(module, names, str(folder)))
    test.query_params.update(query)
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def probe(name: str, folder: Path, **query: str) -> AppTest:
    return page("probe", folder, name, **query)


def maps_of(test: AppTest) -> list[np.ndarray]:
    """The matrices of the heatmaps of the only figure, top row first."""
    (chart,) = test.get("plotly_chart")
    drawn = json.loads(chart.proto.spec)["data"]
    maps = [trace["z"] for trace in drawn if trace["type"] == "heatmap"]
    arrays = [np.frombuffer(base64.b64decode(z["bdata"]), z["dtype"]) for z in maps]
    return [array.reshape([int(n) for n in z["shape"].split(",")]) for array, z in zip(arrays, maps, strict=True)]


# Pages of probes


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
    compared = any(isinstance(row["value"], float) for row in result.rows())
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
    ("attention_sink", {"t_min": "1e400"}, "t_min must be whole number; got 1e400: shown is 1"),
    ("attention_sink", {"t_min": "0"}, "t_min must be at least 1; got 0: shown is 1"),
    ("attention_sink", {"t_min": "9" * 30}, r"t_min must be at most 9\d+ on a page, .*: shown is 1"),
    ("attention_sink", {"heads": "1 x"}, "heads must be whole numbers separated by spaces; got 1 x: shown is none"),
    ("attention_sink", {"sink_threshold": "inf"}, "sink_threshold must be .*: shown is 0.3"),
    ("attention_sink", {"content": "words"}, "content must be demonstration_answers or .*; got words: shown is .*"),
    ("attention_sink", {"against": "gone"}, "against must be among baseline; got 'gone': shown are all"),
    ("expert_overlap", {"shuffles": "1001"}, "shuffles must be at most .*; got 1001: shown is .*"),
    ("massive_activations", {"times": "-1"}, "times must be at least .*; got -1.0: shown is .*"),
]


@pytest.mark.parametrize(("name", "address", "line"), WRONG)
def test_a_wrong_value_in_the_address_falls_back_and_says_so(
    name: str, address: dict[str, str], line: str, folder: Path
) -> None:
    test = probe(name, folder, capture="looped", **address)
    (mistake,) = test.warning
    assert re.fullmatch(f"The address: {line}", mistake.value)
    (wrong,) = address
    assert wrong not in test.query_params
    assert test.dataframe[0].value.equals(probe(name, folder, capture="looped").dataframe[0].value)
    assert not test.run().warning


def test_a_choice_given_twice_in_the_address_falls_back(folder: Path) -> None:
    test = probe("attention_sink", folder, capture="looped", t_min=["1", "2"])
    assert [each.value for each in test.warning] == [
        "The address: t_min must be given once in an address; got 2 values: shown is 1"
    ]


@pytest.mark.parametrize("sample", ["inf", "0", "4", "1.5", "1e400", "x"])
def test_a_sample_that_is_none_falls_back_and_says_so(sample: str, folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample=sample, layer="9")
    assert [each.value for each in test.warning] == [
        f"The address: sample must be one of 1, 2, 3; got '{sample}': shown is 1",
        "The address: layer must be one of 1, 2, 3, 4; got '9': shown is 2",
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
    assert names == {"looped", "baseline", "null: uniform"}
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


# Options


@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_page_has_the_options_of_the_command_and_no_other(name: str, folder: Path) -> None:
    test = probe(name, folder, capture="looped")
    kinds = (test.selectbox, test.multiselect, test.number_input, test.text_input, test.toggle)
    widgets = {widget.key: widget.help for kind in kinds for widget in kind}
    help_of = option_help(catalog.load(name).Options)
    assert set(widgets) == {"capture", "against", *(field.name for field in fields(catalog.load(name).Options))}
    assert {key: widgets[key] for key in help_of} == help_of
    assert all(help_of.values())


CHANGED = {
    "attention_sink": {"heads": "2 4", "t_min": "2", "content": "brackets", "sink_threshold": "0.5"},
    "projection_similarity": {"compare": "1 2", "heads": "concatenated", "t_min": "0"},
    "expert_overlap": {},
    "residual_updates": {},
    "expert_load": {},
    "massive_activations": {"floor": "50.5"},
    "dyck_icl": {},
}


@pytest.mark.parametrize("name", catalog.NAMES)
def test_address_and_command_give_the_same_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = CHANGED[name]

    def script(name: str) -> None:
        import streamlit as st

        from app.widgets.options import choose_options
        from probes.running import catalog

        st.session_state["made"] = choose_options(catalog.load(name).Options)

    test = AppTest.from_function(script, args=(name,), default_timeout=30)
    test.query_params.update(address)
    made = test.run().session_state["made"]
    module = catalog.load(name)
    arguments = command.parse(name, module, ["--capture", "x", *option_words(made)])
    assert arguments.measure == made
    for key, text in address.items():
        assert query_of({key: as_typed(made)[key]}) == {key: text.removesuffix(".0")}


def test_words_that_are_no_option_are_refused() -> None:
    assert parse_option("layers", "3 1", tuple[int, ...]) == (3, 1)
    with pytest.raises(UserError, match=r"layers must be whole numbers separated by spaces; got 1\.5"):
        parse_option("layers", "1.5", tuple[int, ...])
    with pytest.raises(UserError, match="scale must be number; got nothing"):
        parse_option("scale", "", float)


# Attention


def test_the_maps_are_both_visits_and_their_difference(folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample="2", layer="3", head="4")
    capture = Capture(folder / "looped")
    length = int(capture.samples.length_N[1])
    first, second = (capture.read("attn.hook_pattern", step, slice(1, 2), 3)[0][:length, :length] for step in (2, 4))
    seen = np.tril(np.ones((length, length), bool))
    for drawn, expected in zip(maps_of(test), (first, second, second - first), strict=True):
        np.testing.assert_array_equal(np.isnan(drawn), ~seen)
        np.testing.assert_array_equal(drawn[seen], expected[seen])
    assert not test.info


def test_only_the_matrices_on_the_page_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = Capture.read, []

    def watched(self: Capture, suffix: str, step: int, samples: slice, head: int) -> np.ndarray:
        asked.append((suffix, step, samples, head))
        return read(self, suffix, step, samples, head)

    monkeypatch.setattr(Capture, "read", watched)
    page("attention", folder, capture="looped", sample="3", layer="2", head="1")
    assert asked == [("attn.hook_pattern", step, slice(2, 3), 0) for step in (1, 3)]


def test_a_link_opens_the_same_view_and_its_python_gives_the_same_figure(folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample="3", layer="2", head="2")
    assert (test.number_input(key="sample").value, test.selectbox(key="layer").value) == (3, 2)
    assert test.selectbox(key="head").value == 2
    scope: dict[str, object] = {}
    exec(test.code[-1].value.replace("figure.show()", ""), scope)
    (chart,) = test.get("plotly_chart")
    assert json.loads(chart.proto.spec)["data"] == json.loads(scope["figure"].to_json())["data"]


def test_every_export_has_a_name_and_says_what_it_is_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, str] = {}
    button = streamlit.download_button
    offer = DeltaGenerator.download_button

    def watched(self: DeltaGenerator, label: str, data: object, name: str, *rest: object, **more: object) -> bool:
        held[name] = str(data() if callable(data) else data)
        return offer(self, label, data, name, *rest, **more)

    monkeypatch.setattr(DeltaGenerator, "download_button", watched)
    monkeypatch.setattr(streamlit, "download_button", lambda *args, **more: watched(button.__self__, *args, **more))
    digest = Capture(folder / "looped").digest
    page("attention", folder, capture="looped", sample="2", layer="3", head="4")
    for kind in ("csv", "json", "html"):
        text = held[f"attention_looped_sample-2_layer-3_head-4.{kind}"]
        assert all(word in text[:600] for word in ("looped", digest, "layer", "head", "visits", "sample"))
    probe("attention_sink", folder, capture="looped", t_min="3")
    for kind in ("csv", "html"):
        text = held[f"attention_sink_looped_dyck.{kind}"]
        assert all(word in text[:1500] for word in ("looped", "baseline", digest, "t_min: 3"))
    assert f"attention_sink_looped_{digest[:12]}.json" in held


def test_a_baseline_has_one_map_and_says_so(folder: Path) -> None:
    test = page("attention", folder, capture="baseline", layer="2")
    assert [info.value for info in test.info] == [
        "This network visits each layer once (a Baseline), so there is one map and no difference."
    ]
    assert len(maps_of(test)) == 1


def test_a_layer_outside_the_loop_says_where_the_loop_is(folder: Path) -> None:
    test = page("attention", folder, capture="looped", layer="1")
    assert test.info[0].value.startswith("Layer 1 lies outside the loop and is visited once")
    assert test.info[0].value.endswith("Layers with two visits: 2, 3.")


def test_of_three_visits_any_two_are_compared(tmp_path: Path) -> None:
    config = replace(LOOPED, num_visits=3)
    samples = episodes().samples
    batch = planted_batch(config, samples, random_sites(config, samples, ("attn.hook_pattern",)))
    write_capture(tmp_path / "three", [batch], dtype="float32")
    test = page("attention", tmp_path, capture="three", layer="2", earlier="2", later="3")
    length = int(samples.length_N[0])
    second, third = (batch.sites[step, "attn.hook_pattern"][0, 0, :length, :length] for step in (3, 5))
    np.testing.assert_array_equal(maps_of(test)[2], np.where(np.isnan(maps_of(test)[0]), np.nan, third - second))
    test = page("attention", tmp_path, capture="three", layer="2", earlier="2")
    assert test.selectbox(key="later").options == ["3"]


def test_a_capture_without_attention_says_what_it_lacks(tmp_path: Path) -> None:
    batch = episodes()
    kept = {key: array for key, array in batch.sites.items() if key[1] == "hook_resid_pre"}
    write_capture(tmp_path / "resid", [replace(batch, sites=kept, heads={})])
    (error,) = page("attention", tmp_path, capture="resid").error
    assert error.value.startswith("a capture must hold attn.hook_pattern to draw it")


# The folder


@pytest.mark.parametrize("module", ["attention", "probe"])
@pytest.mark.parametrize("name", ["cut", "half"])
def test_a_capture_that_does_not_open_shows_its_line(module: str, name: str, folder: Path) -> None:
    with pytest.raises(UserError) as problem:
        Capture(folder / name)
    names = ("expert_overlap",) if module == "probe" else ()
    test = page(module, folder, *names, capture=name)
    assert [error.value for error in test.error] == [str(problem.value)]
    assert not test.get("plotly_chart")


def main_page(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **query: str) -> AppTest:
    monkeypatch.setattr(sys, "argv", ["app/main.py", *(arguments or ("--captures", str(folder)))])
    test = AppTest.from_file(str(APP / "main.py"), default_timeout=60)
    test.query_params.update(query)
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def test_the_runs_page_lists_what_opens_and_says_why_the_others_do_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folder, tmp_path / "captures", ignore=shutil.ignore_patterns("results"))
    monkeypatch.setattr(sys, "argv", ["probes.expert_overlap", "--capture", str(folder / "looped"), "--json"])
    catalog.load("expert_overlap").main()
    monkeypatch.setattr(h5py, "File", None)  # manifests alone are read
    test = main_page(folder, monkeypatch, capture="looped")
    listed = test.dataframe[0].value
    looped = Capture(folder / "looped")
    assert listed["capture"].tolist() == ["baseline", "looped"]
    assert listed["digest"].tolist()[1] == looped.digest[:12]
    assert listed["results"].tolist() == [0, 1]
    assert listed["samples"].tolist() == [3, 3]
    assert listed["network"].tolist()[1] == "4 layers, looped 2-3, 2 visits; 4 heads; 2 of 8 experts"
    assert "half: 0 of 3 samples recorded" in [progress.proto.text for progress in test.get("progress")]
    (cut,) = test.warning
    assert "cut" in cut.value
    assert [code.value for code in test.code][:2] == ["record half", "record looped"]
    assert test.get("page_link")[0].proto.label == "Experts across visits"
    assert test.dataframe[1].value["site"].tolist() == list(looped.sites)


def test_results_that_are_broken_or_of_another_capture_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_capture(tmp_path / "run", [episodes()])
    results = tmp_path / "run" / "results"
    results.mkdir()
    (results / "a.json").write_text("{")
    other = {"probe": "x", "title": "X", "options": {}, "command": "", "networks": [{"digest": "0"}]}
    (results / "b.json").write_text(json.dumps(other))
    test = main_page(tmp_path, monkeypatch, capture="run")
    assert [warning.value for warning in test.warning] == [
        f"a result must be the JSON that a probe wrote; got {results / 'a.json'}: measure it again",
        f"a result must be of this capture; got {results / 'b.json'} of another: measure it again",
    ]


def test_the_dashboard_computes_on_one_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(threads, "limit_threads", asked.append)
    main_page(folder, monkeypatch)
    assert set(asked) == {1}


def test_a_missing_folder_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not main_page(tmp_path, monkeypatch).warning
    test = main_page(tmp_path / "gone", monkeypatch)
    (warning,) = test.warning
    assert warning.value.startswith(f"There is no folder `{tmp_path / 'gone'}`")


def test_the_folder_may_be_joined_to_its_option(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = main_page(folder, monkeypatch, f"--captures={folder}", capture="looped")
    assert "looped" in test.dataframe[0].value["capture"].tolist()


def test_an_empty_folder_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = main_page(tmp_path, monkeypatch)
    assert test.code[0].value == RECORD.format(folder=tmp_path)
    for line in RECORD.format(folder=tmp_path).splitlines():
        parsed = parsed_record(line)
        assert parsed.out.parent == tmp_path
    assert page("attention", tmp_path).code[0].value == RECORD.format(folder=tmp_path)


def parsed_record(line: str):
    import tyro

    from cache.record import RecordOptions

    return tyro.cli(RecordOptions, args=line.split()[3:])


def test_a_wrong_argument_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = main_page(folder, monkeypatch, "--folder", "x")
    assert [error.value for error in test.error] == ["what follows `--` must be `--captures DIR`; got --folder x"]


def test_a_folder_of_captures_that_is_a_file_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (folder / "looped" / "manifest.json", folder / "looped" / "manifest.json" / "below"):
        test = main_page(folder, monkeypatch, "--captures", str(path))
        said = f"the folder of captures must be readable; got {path}: Not a directory"
        assert [error.value for error in test.error] == [said]


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
@pytest.mark.parametrize("below", ["", "below"])
def test_a_folder_of_captures_without_permission_is_one_line(tmp_path: Path, mode: int, below: str) -> None:
    """As a user without rights: root may read everything."""
    (tmp_path / "locked" / "below").mkdir(mode=0o700, parents=True)
    (tmp_path / "locked").chmod(mode)

    def refused() -> None:
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setuid(65534)
        path = Path("locked") / below
        with pytest.raises(UserError, match=f"the folder of captures must be readable; got {path}: Permission denied"):
            capture_names(path)

    assert Child(refused).wait() == (0, "")


def test_a_link_to_a_capture_that_is_gone_says_so(folder: Path) -> None:
    (error,) = page("attention", folder, capture="gone").error
    assert "got gone: choose one" in error.value
    assert "looped" in error.value


# The source


def test_the_first_page_imports_neither_torch_nor_what_brings_it(folder: Path) -> None:
    script = (
        "import sys; from streamlit.testing.v1 import AppTest; "
        f"sys.argv = ['app/main.py', '--captures', {str(folder)!r}]; "
        f"test = AppTest.from_file({str(APP / 'main.py')!r}, default_timeout=60); "
        "test.query_params['capture'] = 'looped'; test.run(); assert test.dataframe and not test.exception; "
        "print(sorted({'torch', 'transformer_lens', 'nnsight', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("path", sorted(APP.glob("*.py")), ids=lambda path: path.name)
def test_a_page_does_no_arithmetic(path: Path) -> None:
    arithmetic = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.Pow, ast.FloorDiv, ast.MatMult)
    tree = ast.parse(path.read_text())
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, arithmetic)]
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not found
    assert not imported & {"numpy", "math", "statistics"}


def test_no_file_of_the_app_hides_a_module() -> None:
    # `streamlit run app/main.py` puts app/ before everything else on the path.
    names = {path.stem for path in APP.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in APP.parent.glob("*/__init__.py")}
    assert not names & (set(sys.stdlib_module_names) | packages | {"streamlit", "plotly", "pandas", "numpy"})
