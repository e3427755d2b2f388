"""The command of every probe: what it prints and writes, on a capture without torch, and how it ends on bad input."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from cache.parts import write_capture as write_parts
from probes.__main__ import Options as EveryProbe
from probes.attention_sink import needs
from probes.running import catalog, command, report
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
        runpy.run_module("probes." + probe, run_name="__main__")
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
    sites = random_sites(config, samples, needs(config))
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
    assert "Attention sink: looped on code (5 samples)" in printed
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
    batch = planted_batch(LOOPED, samples, random_sites(LOOPED, samples, needs(LOOPED)))
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
    assert (result["data"], result["samples"], len(result["data_digest"])) == ("code", 5, 64)
    for visit in (1, 2):
        found = pick(result["rows"], level="headline", quantity="start mass", visit=visit, head="mean")
        assert found["in_baseline"] == pytest.approx(0.45, abs=5e-4), "a Baseline stands beside both visits"
        assert found["in_baseline_low"] is not None
    own = pick(result["beside"]["baseline"], level="headline", quantity="start mass", visit=1, head="mean")
    assert own["value"] == pytest.approx(0.45, abs=5e-4)


def test_the_result_lies_beside_the_capture_under_what_was_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = write_capture(folder / "again.h5", LOOPED, 0.5, 0.1)
    results = folder / "again.results"
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
    assert "Attention sink: looped on code" in (out / "attention_sink.html").read_text()


def test_nothing_is_left_of_a_file_that_cannot_be_finished(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(IsADirectoryError):
        report.write_atomically(tmp_path / "result.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--capture", "nowhere.h5"), "error: a capture must be a file; got nowhere.h5"),
        (("--ckpt", "nowhere"), "error: a checkpoint must be a folder; got nowhere"),
        (("--capture", "{folder}/looped.h5", "--shots", "3"), "error: data options must be left out with --capture"),
        (("--capture", "{folder}/looped.h5", "--layers", "9"), "error: layers must be recorded layers of 1 to 4"),
        (("--capture", "{folder}/looped.h5", "--out", "{folder}/looped.h5/out"), "error: the output folder must be"),
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
    "out", ["{folder}/looped.h5", "{folder}/looped.h5/out", "/proc/x", "/proc", "{folder}/" + "x" * 300]
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
    assert refusal.startswith(f"error: the output folder must be writable; got {out.format(folder=folder)}: ")


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
        catalog.load("attention_sink").Options(heads=(2, 2))


@pytest.mark.parametrize("field", ["samples", "episodes"])
@pytest.mark.parametrize("number", [-1, 0, 10**23])
def test_every_probe_at_once_has_its_bounds_too(field: str, number: int) -> None:
    with pytest.raises(UserError, match=f"{field} must be at "):
        EveryProbe(ckpt=Path("x"), **{field: number})


# Side by side


def test_rows_of_two_networks_meet_where_they_say_the_same_thing() -> None:
    def one(visit: int | str, value: float, layers: str = "looped 2-3", level: str = "headline") -> report.Row:
        return {"level": level, "quantity": "q", "layers": layers, "visit": visit, "value": value, "low": value,
                "high": value, "n": 1, "note": ""}  # fmt: skip

    rows = [one(1, 0.1), one(2, 0.2), one("2 - 1", 0.1), one(1, 0.3, "2", "layer")]
    joined = report.beside(rows, [one(1, 7.0, "all 1-4"), one(1, 8.0, "3", "layer")], "other", once=True)
    assert [row["in_other"] for row in joined] == [7.0, 7.0, "needs two visits", None]
    twice = report.beside(joined, [one(1, 1.0), one(2, 2.0)], "third", once=False)
    assert [row["in_third"] for row in twice] == [1.0, 2.0, None, None]
    assert report.keys_of(twice) == ("quantity", "layers", "visit")


def printed_lines(capsys: pytest.CaptureFixture[str], rows: list[report.Row], **others: str) -> list[str]:
    """What the terminal shows of the headline, spaces apart."""
    report.print_tables([report.table(rows, "Title [x]", others, "headline")], [])
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_table_says_once_what_is_the_same_and_puts_long_notes_below(capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"level": "headline", "layers": "looped 2-3", "low": None, "high": None, "n": 5}
    rows: list[report.Row] = [
        {**shared, "quantity": "a", "visit": 1, "value": 0.123456, "null_uniform": 0.5, "note": "a note that is long"},
        {**shared, "quantity": "b", "visit": 2, "value": 1e-9, "null_uniform": None, "note": "short"},
        {**shared, "quantity": "c", "visit": 2, "value": 1.0, "note": "", "level": "head", "head": 2},
    ]
    lines = printed_lines(capsys, rows)
    assert lines[:2] == ["", "Title [x]; layers looped 2-3, n 5"]
    assert lines[2:4] == ["null:", "quantity visit value [95%] uniform"]
    assert lines[5:] == ["a 1 0.123 0.5 (1)", "b 2 ~0 - short", "(1) a note that is long"]


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


def test_a_network_that_visits_once_has_a_column_where_it_has_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    def one(visit: int | str, other: report.Cell) -> report.Row:
        return {"level": "headline", "quantity": "q", "visit": visit, "value": 1234.5, "low": None, "high": None,
                "n": 1, "in_once-dyck": other, "in_third-dyck": 0.12345, "note": ""}  # fmt: skip

    names = {"once-dyck": "once", "third-dyck": "third"}
    below = ["once is once-dyck, third is third-dyck",
             "once visits each layer once: it has no number where visits are compared"]  # fmt: skip
    both = printed_lines(capsys, [one(1, 0.5), one("2 - 1", report.NEEDS_TWO_VISITS)], **names)
    assert "visit value [95%] once third" in both
    assert both[-4:] == ["1 1234 0.5 0.123", "2 - 1 1234 - 0.123", *below]
    compared = printed_lines(capsys, [one("2 - 1", report.NEEDS_TWO_VISITS)], **names)
    assert "value [95%] third" in compared
    assert compared[-2:] == below


def test_what_is_not_a_number_is_nothing_in_json() -> None:
    assert json.loads(report.json_text({"value": None})) == {"value": None}
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.json_text({"value": float("nan")})
