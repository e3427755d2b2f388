"""The list of captures, and the folder of captures that it shows."""

import json
import os
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import h5py
import pytest
from streamlit.testing.v1 import AppTest

from app.widgets.capture_folder import RECORD, capture_names
from cache.recording import write_capture
from cache.store import Capture
from probes.running import catalog
from smelt_interp.errors import UserError
from smelt_interp.terminal import threads
from tests.support.app_captures import episodes, plant_answers
from tests.support.app_pages import main_page, page
from tests.support.forked import Child


def tables(test: AppTest) -> list[dict[str, list[str]]]:
    """The tables of the page, each by column."""
    found = [each.proto.body.partition("<table")[2] for each in test.get("html") if "<table" in each.proto.body]
    trees = [ElementTree.fromstring(f"<table{text}") for text in found]
    rows = [[[cell.text or "" for cell in row] for row in tree.iter("tr")] for tree in trees]
    return [dict(zip(head, map(list, zip(*body, strict=True)), strict=True)) for head, *body in rows]


@pytest.mark.parametrize("module", ["attention", "probe"])
@pytest.mark.parametrize("name", ["cut", "half"])
def test_a_capture_that_does_not_open_shows_its_line(module: str, name: str, folder: Path) -> None:
    with pytest.raises(UserError) as problem:
        Capture(folder / name)
    names = ("expert_overlap",) if module == "probe" else ()
    test = page(module, folder, *names, capture=name)
    assert [error.value for error in test.error] == [str(problem.value)]
    assert not test.get("plotly_chart")


def test_the_captures_page_lists_what_opens_and_says_why_the_others_do_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folder, tmp_path / "captures", ignore=shutil.ignore_patterns("results"))
    monkeypatch.setattr(sys, "argv", ["probes.expert_overlap", "--capture", str(folder / "looped"), "--json"])
    catalog.load("expert_overlap").main()
    plant_answers(Capture(folder / "looped"))
    monkeypatch.setattr(h5py, "File", None)  # manifests alone are read
    test = main_page(folder, monkeypatch, capture="looped")
    listed, sites = tables(test)
    looped = Capture(folder / "looped")
    assert listed["capture"] == ["baseline", "looped"]
    assert listed["digest"][1] == looped.digest[:12]
    assert listed["results"] == ["0", "2"]
    assert listed["samples"] == ["3", "3"]
    assert listed["network"][1] == "4 layers, looped 2-3, 2 visits; 4 heads; 2 of 8 experts"
    assert "half: 0 of 3 samples recorded" in [progress.proto.text for progress in test.get("progress")]
    (cut,) = test.warning
    assert "cut" in cut.value
    assert [code.value for code in test.code][:2] == ["record half", "record looped"]
    assert [(link.proto.label, link.proto.page) for link in test.get("page_link")] == [
        ("Answers", "answers"),
        ("Experts across visits", "expert_overlap"),
    ]
    assert sites["site"] == list(looped.sites)


def test_results_that_are_broken_or_of_another_capture_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_capture(tmp_path / "run", [episodes()])
    results = tmp_path / "run" / "results"
    results.mkdir()
    (results / "a.json").write_text("{")
    other = {"probe": "x", "title": "X", "options": {}, "command": "", "networks": [{"digest": "0"}]}
    (results / "b.json").write_text(json.dumps(other))
    (results / "c.json").write_text(json.dumps(other | {"options": 5}))
    os.mkfifo(results / "d.json")
    test = main_page(tmp_path, monkeypatch, capture="run")
    assert [warning.value for warning in test.warning] == [
        f"a result must be the JSON that a probe wrote; got {results / 'a.json'}: measure it again",
        f"a result must be of this capture; got {results / 'b.json'} of another: measure it again",
        f"a result must be the JSON that a probe wrote; got {results / 'c.json'}: measure it again",
        f"a result must be the JSON that a probe wrote; got {results / 'd.json'}: measure it again",
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
    assert "looped" in tables(test)[0]["capture"]


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
