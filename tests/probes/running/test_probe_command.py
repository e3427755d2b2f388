"""The command of every probe: what it prints and writes, on a capture without torch, and how it ends on bad input."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from cache.recording import write_capture as write_parts
from model.network import LoopedMoE
from probes.__main__ import EveryProbe
from probes.attention_sink import PATTERN, VALUE
from probes.running import catalog, command, report
from probes.statistics.quantities import Record
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from tests.support.commands import Command
from tests.support.planted import BASELINE, LOOPED, pick, planted_batch, random_sites, start_pattern, text_samples
from tests.support.planted_captures import planted_capture

BLOCKED = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
for probe in sys.argv.pop(1).split(","):
    try:
        runpy.run_module("probes." + probe, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, end.code
"""


def without(blocked: tuple[str, ...], probes: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The probes' commands, one after the other, in a process that cannot import the blocked packages."""
    code = BLOCKED.format(blocked=set(blocked))
    argv = [sys.executable, "-c", code, ",".join(probes), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"probes.{name}", *arguments])
    catalog.load(name).main()


def write_capture(path: Path, config: ModelConfig, first: float, second: float) -> Path:
    """Text with start mass `first` on visit 1 and `second` on visit 2 of the looped layers."""
    samples = text_samples(5, 20)
    sites = random_sites(config, samples, (PATTERN, VALUE))
    for s, step in enumerate(plan(config)):
        mass = (first, second)[step.visit]
        sites[s, "attn.hook_pattern"] = start_pattern(samples, config.num_heads, mass).astype(np.float32)
    planted_capture(path, planted_batch(config, samples, sites))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    write_capture(folder / "looped.h5", LOOPED, 0.6, 0.02)
    write_capture(folder / "baseline.h5", BASELINE, 0.45, 0.45)
    return folder


# Without torch


def test_a_capture_is_measured_without_torch(folder: Path) -> None:
    ended = without(
        ("torch", "transformer_lens", "nnsight", "transformers"),
        ("attention_sink",), "--capture", str(folder / "looped.h5"), "--json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    found = pick(document["results"][0]["rows"], level="headline", quantity="start mass", visit=1, head="mean")
    assert found["value"] == pytest.approx(0.6, abs=5e-4)


def test_no_help_needs_torch_or_hdf5() -> None:
    ended = without(("torch", "transformer_lens", "nnsight", "h5py", "plotly", "streamlit"), catalog.NAMES, "--help")
    assert ended.returncode == 0, ended.stderr
    for name in catalog.NAMES:
        assert f"usage: python -m probes.{name}" in ended.stdout


# What is printed and written


def test_the_table_has_intervals_nulls_and_the_way_to_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"))
    printed = capsys.readouterr().out
    assert "Attention sink: looped on code (5 documents, 100 tokens)" in printed
    assert "0.6 [0.6, 0.6]" in printed
    assert "untrained network: not measured; add --against a capture recorded with" in printed
    assert "Baseline: not measured; add --against" in printed
    run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"), "--against",
        str(folder / "baseline.h5"), "--level", "head")  # fmt: skip
    printed = capsys.readouterr().out
    assert "baseline" in printed
    assert "baseline visits each layer once" in printed
    assert "Baseline: not measured" not in printed


def test_an_untrained_capture_beside_it_is_the_untrained_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = text_samples(5, 20)
    batch = planted_batch(LOOPED, samples, random_sites(LOOPED, samples, (PATTERN, VALUE)))
    write_parts(folder / "looped-untrained.h5", [batch], source={"untrained_seed": 0})
    for name, expected in (("looped-untrained", False), ("baseline", True)):
        against = str(folder / f"{name}.h5")
        run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"), "--against", against)
        assert ("untrained network: not measured" in capsys.readouterr().out) == expected


def test_the_json_says_what_made_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--capture", str(folder / "looped.h5"), "--against", str(folder / "baseline.h5"), "--t-min", "2")
    run(monkeypatch, "attention_sink", *arguments, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "smelt.result"
    assert document["probe"] == "attention_sink"
    assert document["options"]["t_min"] == 2
    assert document["command"].endswith("--t-min 2 --json")
    assert [network["name"] for network in document["networks"]] == ["looped", "baseline"]
    assert all(len(network["digest"]) == 64 for network in document["networks"])
    (result,) = document["results"]
    assert (result["data"], len(result["data_digest"])) == ("code", 64)
    assert (result["samples"], result["documents"], result["tokens"]) == (5, 5, 100)
    for visit in (1, 2):
        found = pick(result["rows"], level="headline", quantity="start mass", visit=visit, head="mean")
        assert found["in_baseline"] == pytest.approx(0.45, abs=5e-4), "a Baseline stands beside both visits"
        assert found["in_baseline_low"] is not None
    own = pick(result["others"]["baseline"], level="headline", quantity="start mass", visit=1, head="mean")
    assert own["value"] == pytest.approx(0.45, abs=5e-4)


def test_the_result_lies_beside_the_capture_under_what_was_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = write_capture(folder / "again.h5", LOOPED, 0.5, 0.1)
    results = capture / "results"
    for arguments, count in (((), 1), ((), 1), (("--t-min", "3"), 2), (("--level", "layer"), 2)):
        run(monkeypatch, "attention_sink", "--capture", str(capture), "--json", *arguments)
        capsys.readouterr()
        files = sorted(results.iterdir())
        assert len(files) == count
        assert all(path.name.startswith("attention_sink-") for path in files)
    assert {json.loads(path.read_text())["options"]["t_min"] for path in files} == {1, 3}
    monkeypatch.chdir(folder)
    run(monkeypatch, "attention_sink", "--capture", "again.h5", "--json")
    assert len(list(results.iterdir())) == 2, "the same capture by another path"


def test_a_folder_gets_figures_rows_and_result(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"), "--out", str(out), "--json")
    document = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in out.iterdir()) == [
        "attention_sink-code.csv", "attention_sink.html", "attention_sink.json"
    ]  # fmt: skip
    assert json.loads((out / "attention_sink.json").read_text()) == document
    rows = list(csv.DictReader((out / "attention_sink-code.csv").read_text().splitlines()))
    assert len(rows) == len(document["results"][0]["rows"])
    assert float(rows[0]["value"]) == document["results"][0]["rows"][0]["value"]
    assert "Attention sink, masses: looped on code" in (out / "attention_sink.html").read_text()


def test_two_data_files_of_one_name_have_a_table_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LoopedMoE(LOOPED, seed=1).save_pretrained(tmp_path / "tiny", readme="")
    texts = [tmp_path / folder / "notes.txt" for folder in ("one", "two")]
    for number, text in enumerate(texts):
        text.parent.mkdir()
        text.write_text(f"{number} words and more words\n" * 40)
    out = ("--out", str(tmp_path / "out"))
    run(monkeypatch, "attention_sink", "--ckpt", str(tmp_path / "tiny"), "--no-untrained", *out,
        "--data", *map(str, texts), "--samples", "3", "--length", "20")  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "out").glob("*.csv")) == [
        "attention_sink-notes-2.csv", "attention_sink-notes.csv"
    ]  # fmt: skip


def test_a_closed_pipe_leaves_whole_files_and_one_line(folder: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "probes.attention_sink", "--capture", str(folder / "looped.h5"), "--level", "head"]
    shell = f"{shlex.join([*argv, '--out', str(tmp_path / 'out')])} | true"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=Path(__file__).parents[3],
                           check=False)  # fmt: skip
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert ended.stderr in ("", "error: Broken pipe: output\n")


def test_a_folder_that_may_not_be_written_keeps_nothing_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise UserError(f"the output folder must be writable; got {path}")

    run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"))
    assert re.search(r"^result: .*attention_sink-[0-9a-f]{16}\.json$", capsys.readouterr().out, re.M)
    monkeypatch.setattr(report, "make_folder", refuse)
    run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"))
    printed = capsys.readouterr().out
    assert "0.6 [0.6, 0.6]" in printed
    assert re.search(r"^result: not kept, since .* cannot be written; --out DIR keeps it elsewhere$", printed, re.M)


def test_nothing_is_left_of_a_file_that_cannot_be_finished(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(IsADirectoryError):
        report.write_text(tmp_path / "result.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--capture", "nowhere.h5"), "error: a capture must be a folder with a manifest.json; got nowhere.h5"),
        (("--ckpt", "nowhere"), "error: a checkpoint must be a folder; got nowhere"),
        (("--capture", "{folder}/looped.h5", "--shots", "3"), "error: data options must be left out with --capture"),
        (("--capture", "{folder}/looped.h5", "--layers", "9"), "error: layers must be recorded layers of 1 to 4"),
        (
            ("--capture", "{folder}/looped.h5", "--out", "{folder}/looped.h5/manifest.json/out"),
            "error: the output folder must be",
        ),
    ],
)
def test_a_mistake_ends_with_one_line_and_exit_code_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "attention_sink", *(argument.format(folder=folder) for argument in arguments))
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--nothing",), ("--ckpt", "a", "--t-min", "0"), ()])
def test_a_wrong_option_ends_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "attention_sink", *arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "out",
    [
        "{folder}/looped.h5/manifest.json",
        "{folder}/looped.h5/manifest.json/out",
        "/proc/x",
        "/proc",
        "{folder}/" + "x" * 300,
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured before the folder was tried")

    monkeypatch.setattr(command, "measure_all", measured)
    refusal = Command(monkeypatch, capsys).refusal(
        catalog.load("attention_sink").main, "--capture", folder / "looped.h5", "--out", out.format(folder=folder)
    )
    assert refusal.startswith("error: the output folder must be writable; got ")
    named = out.format(folder=folder)
    assert f"got {named}: " in refusal or len(named) > 200  # a name as long as that is cut in the middle


def number_options() -> list[tuple[str, str, type]]:
    """Every option of every probe that is one number, and its type."""
    return [
        (name, field, kind)
        for name in catalog.NAMES
        for field, kind in get_type_hints(catalog.load(name).Options).items()
        if kind in (int, float)
    ]


@pytest.mark.parametrize(("name", "field", "kind"), number_options())
def test_no_number_is_beyond_a_probe(name: str, field: str, kind: type) -> None:
    options = catalog.load(name).Options
    absurd = [-1, 10**23] if kind is int else [-1.0, float("nan"), float("inf"), -float("inf"), 1e30]
    for number in absurd:
        with pytest.raises(UserError, match=f"^{field} must be .*; got "):
            options(**{field: number})


def test_a_head_counts_once() -> None:
    with pytest.raises(UserError, match="heads must be different numbers; got 2 2"):
        catalog.load("attention_sink").Options(heads=(1, 1))


def test_layers_and_heads_count_from_one_on_the_command_line_and_in_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = command.parse("attention_sink", catalog.load("attention_sink"), ["--layers", "2", "3", "--heads", "4"])
    assert (asked.measure.layers, asked.measure.heads) == ((1, 2), (3,))  # type: ignore[attr-defined]  # its Options
    run(monkeypatch, "attention_sink", "--capture", str(folder / "looped.h5"), "--layers", "2", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["options"]["layers"] == [2]
    assert document["results"][0]["rows"][0]["layers"] == "looped 2"
    with pytest.raises(UserError, match=r"must count from 1 .*; got 0"):
        command.parse("attention_sink", catalog.load("attention_sink"), ["--layers", "0"])


@pytest.mark.parametrize("field", ["samples", "episodes"])
@pytest.mark.parametrize("number", [-1, 0, 10**23])
def test_every_probe_at_once_has_its_bounds_too(field: str, number: int) -> None:
    with pytest.raises(UserError, match=f"{field} must be at "):
        EveryProbe(ckpt=Path("x"), **{field: number})


# Side by side


def one(visit: int | str, value: float | None, layers: str = "looped 2-3", level: str = "headline") -> Record:
    return {"level": level, "quantity": "q", "layers": layers, "visit": visit, "value": value, "low": value,
            "high": value, "n": 1, "note": ""}  # fmt: skip


def test_rows_of_two_networks_meet_where_they_say_the_same_thing() -> None:
    rows = [one(1, 0.1), one(2, 0.2), one("2 - 1", 0.1), one(1, 0.3, "2", "layer")]
    other = [one(1, 7.0, "middle 2-3"), one("2 - 1", None, "middle 2-3"), one(1, 8.0, "3", "layer")]
    joined, notes = report.join_networks(rows, other, "other", once=True)
    assert [row["in_other"] for row in joined] == [7.0, 7.0, None, None]
    assert notes == ["other visits each layer once: it has no number where visits are compared"]
    twice, none = report.join_networks(joined, [one(1, 1.0), one(2, 2.0)], "third", once=False)
    assert [row["in_third"] for row in twice] == [1.0, 2.0, None, None]
    assert none == []
    assert report.keys_of(twice) == ("quantity", "layers", "visit")


def test_other_layers_beside_these_are_named() -> None:
    joined, notes = report.join_networks([one(1, 0.1)], [one(1, 7.0, "middle 3-6")], "other", once=True)
    assert [row["in_other"] for row in joined] == [7.0]
    assert notes == ["other: layers middle 3-6 beside looped 2-3"]


def test_two_loops_meet_their_own() -> None:
    rows = [one(1, 0.1), one(1, 0.2, "looped 5")]
    joined, notes = report.join_networks(rows, [one(1, 1.0, "middle 5"), one(1, 2.0, "middle 2-3")], "other", once=True)
    assert ([row["in_other"] for row in joined], notes) == ([2.0, 1.0], [])


def test_a_table_says_once_what_is_the_same_and_puts_long_notes_below() -> None:
    shared = {"level": "headline", "layers": "looped 2-3", "low": None, "high": None, "n": 5}
    rows: list[Record] = [
        {**shared, "quantity": "a", "visit": 1, "value": 0.123456, "null_uniform": 0.5, "note": "a note that is long"},
        {**shared, "quantity": "b", "visit": 2, "value": 1e-9, "null_uniform": None, "note": "short"},
        {**shared, "quantity": "c", "visit": 2, "value": 1.0, "note": "", "level": "head", "head": 2},
    ]
    shown = report.readable(rows, "Title [x]", {}, "headline", ["last"])
    assert shown.title == "Title [x]; layers looped 2-3, n 5"
    assert shown.columns == ["quantity", "visit", "value [95%]", "null: uniform", "note"]
    assert shown.rows == [["a", "1", "0.123", "0.5", "(1)"], ["b", "2", "~0", "-", "short"]]
    assert shown.notes == ["(1) a note that is long", "last"]


@pytest.mark.parametrize(
    ("first", "others", "short"),
    [
        ("demo-smelt-dyck", ["demo-baseline-dyck", "demo-smelt-untrained-dyck"], ["demo-baseline", "untrained"]),
        ("demo-smelt", ["demo-baseline", "untrained"], ["demo-baseline", "untrained"]),
        ("looped", [], []),
        ("a-x", ["b-x", "a-b-x"], ["b-x", "a-b-x"]),  # both would be called b
        ("run/looped", ["twin/looped"], ["twin/looped"]),
    ],
)
def test_a_column_is_named_by_what_sets_its_network_apart(first: str, others: list[str], short: list[str]) -> None:
    assert report.short_names(first, others) == dict(zip(others, short, strict=True))


def test_a_short_name_is_explained_and_large_numbers_are_whole() -> None:
    rows = [{**one(1, 1234.5), "low": None, "in_once-dyck": 0.5, "in_third-dyck": 0.12345}]
    shown = report.readable(rows, "Title", {"once-dyck": "once", "third-dyck": "third"}, "headline")
    assert shown.columns == ["value [95%]", "once", "third"]
    assert shown.rows == [["1234", "0.5", "0.123"]]
    assert shown.notes == ["once is once-dyck, third is third-dyck"]


def test_what_is_not_a_number_is_nothing_in_json() -> None:
    assert json.loads(report.json_text({"value": None})) == {"value": None}
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.json_text({"value": float("nan")})
