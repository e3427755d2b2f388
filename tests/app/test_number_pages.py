"""The pages of numbers say what their commands say, from the same words, and offer the same options."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import streamlit
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Widget

from app.views import scaling as scaling_page
from smelt_interp.costs import budget, matching, serving
from smelt_interp.costs.knobs import own_values
from smelt_interp.costs.presets import DEMO_SMELT, PAPER_PAIRS
from smelt_interp.scaling import command as scaling
from smelt_interp.scaling.curves import budgets, printed_gain
from smelt_interp.scaling.law import printed_law
from tests.support.commands import Command, Main

MAIN: dict[str, Main] = {
    "budget": budget.main,
    "matching": matching.main,
    "scaling": scaling.main,
    "serving": serving.main,
}
ASKED = [
    ("budget", {}, "--pair 200M"),
    ("budget", {"pair": "600M", "width": "1200", "span": "0.75"}, "--pair 600M --width 1200 --span 0.75"),
    ("budget", {"pair": "200M", "layers": "3-4"}, "--pair 200M --layers 3-4"),
    ("budget", {"pair": "demo", "num_visits": "3", "attended_tokens": "50"},
     "--pair demo --num-visits 3 --attended-tokens 50.0"),
    ("matching", {"baseline": "demo", "experts_multiple": "1", "kv_heads": "free", "count": "3"},
     "--kv-heads free --experts-multiple 1 --baseline demo --count 3"),
    ("matching", {"baseline": "200M", "layers": "4-9", "sparsity": "0.95", "attended_tokens": "390 400"},
     "--layers 4-9 --sparsity 0.95 --baseline 200M --attended-tokens 390.0 400.0"),
    ("scaling", {"compute": "1e21 1e23", "sparsity": "0.9"}, "printed --compute 1e+21 1e+23 --sparsity 0.9"),
    ("serving", {"pair": "demo", "gpu": "l4", "batch": "8", "cache": "ideal", "memory_bandwidth": "1e9"},
     "--pair demo --batch 8 --cache ideal --gpu l4 --memory-bandwidth 1000000000.0"),
]  # fmt: skip


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the download buttons of the pages hold, the last one last."""
    held: list[str] = []
    button = streamlit.download_button

    def watched(label: str, data: str, *rest: object, **more: object) -> bool:
        held.append(data)
        return button(label, data, *rest, **more)

    monkeypatch.setattr(streamlit, "download_button", watched)
    return held


def page(name: str, **query: str) -> AppTest:
    """A page as it is right after its address is opened."""

    def script(name: str) -> None:
        from importlib import import_module

        from app.widgets.address import show_mistakes

        getattr(import_module(f"app.views.{name}"), f"{name}_page")()
        show_mistakes()

    test = AppTest.from_function(script, default_timeout=60, args=(name,))
    test.query_params.update(query)
    return run(test)


def run(changed: AppTest | Widget) -> AppTest:
    """The page after it has run again, a widget of it being changed."""
    test = changed.run()
    assert not test.exception, test.exception[0].message
    return test


def words_of(test: AppTest, name: str) -> list[str]:
    python, flag, module, *words = shlex.split(test.code[-1].value)
    assert (python, flag, module) == ("python", "-m", f"smelt_interp.{name}")
    return words


@pytest.mark.parametrize(("name", "query", "words"), ASKED)
def test_a_page_gives_the_json_of_the_command_that_it_names_and_every_line_of_its_tables(
    name: str, query: dict[str, str], words: str, downloads: list[str], command: Command
) -> None:
    test = page(name, **query)
    assert words_of(test, name) == words.split()
    assert json.loads(downloads[-1]) == command.json(MAIN[name], *words.split())
    tables = [frame for frame in test.dataframe if "printed" not in frame.value]
    lines = [line.split() for line in command.text(MAIN[name], *words.split()).splitlines()]
    shown = [" ".join(map(str, row)).split() for table in tables for row in table.value.itertuples(index=False)]
    assert len(shown) >= 3
    assert [row for row in shown if row not in lines] == []


def option_names(options: type) -> set[str]:
    names: set[str] = set()
    for field in fields(options):
        names |= option_names(type(field.default)) if is_dataclass(field.default) else {field.name}
    return names - {"json"}


@pytest.mark.parametrize(
    ("name", "options"),
    [("budget", budget.BudgetOptions), ("matching", matching.MatchingOptions), ("serving", serving.ServingOptions),
     ("scaling", scaling.PrintedOptions)],
)  # fmt: skip
def test_a_page_has_the_options_of_its_command_and_no_other(name: str, options: type) -> None:
    keys = keys_of(page(name))
    if name in ("budget", "serving"):
        keys |= keys_of(page(name, pair="config files"))
    assert keys == option_names(options)


def keys_of(test: AppTest) -> set[str]:
    """Keys of the widgets beside the page; those on the page choose what is drawn."""
    side = test.sidebar
    return {
        widget.key
        for kind in (side.selectbox, side.number_input, side.text_input, side.slider, side.toggle)
        for widget in kind
    }


def chart(test: AppTest, index: int) -> list[dict]:
    return json.loads(test.get("plotly_chart")[index].proto.spec)["data"]


def array(values: dict | list) -> np.ndarray:
    if isinstance(values, list):
        return np.array(values, dtype=float)
    return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])


# Budget


def test_the_bars_add_up_to_what_a_network_costs() -> None:
    smelt, baseline = (
        budget.budget(config, 390) for config in (PAPER_PAIRS["200M"].smelt, PAPER_PAIRS["200M"].baseline)
    )
    bars: dict[str, list[float]] = {}
    for trace in chart(page("budget"), 0):
        axis = trace.get("xaxis", "x")
        bars[axis] = [a + b for a, b in zip(bars.get(axis, [0.0, 0.0]), array(trace["x"]).tolist(), strict=True)]
    assert bars["x"] == pytest.approx([smelt.flops.forward, baseline.flops.forward])
    assert bars["x2"] == [smelt.parameters.active, baseline.parameters.active]
    assert bars["x3"] == [smelt.parameters.total, baseline.parameters.total]


def test_a_changed_knob_shows_at_once_whether_the_match_holds() -> None:
    test = page("budget")
    assert [metric.value for metric in test.metric] == ["+2.87%", "+0.43%", "+3.12%"]
    assert all(metric.delta.startswith("within") for metric in test.metric)
    experts = test.slider(key="num_experts")
    run(experts.set_value(experts.value + 8))
    assert [metric.delta.split(" the")[0] for metric in test.metric] == ["within", "NOT within", "within"]


def test_another_pair_brings_its_own_knobs() -> None:
    test = page("budget", width="1200")
    assert test.slider(key="width").value == 1200
    run(test.selectbox(key="pair").set_value("demo"))
    assert {knob.key: knob.value for knob in test.slider} == own_values(DEMO_SMELT)
    run(test.slider(key="num_visits").set_value(3))
    run(test.button[0].click())
    assert words_of(test, "budget") == ["--pair", "demo"]


def test_the_printed_geometry_and_what_it_contradicts_is_beside() -> None:
    test = page("budget")
    assert test.dataframe[1].value["printed"].tolist() == ["16 × 4 × 80", "16 × 4 × 55"]
    assert test.dataframe[1].value["here"].tolist() == ["20 × 4 × 64", "24 × 4 × 44"]
    assert "smelt: flop_ratio is printed 1.029, the printed heads give 0.986" in test.markdown[-1].value
    assert len(page("budget", pair="demo").dataframe) == 1


def test_config_files_are_compared_like_pairs(
    tmp_path: Path, downloads: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("a looped one.json")
    path.write_text(json.dumps(replace(DEMO_SMELT, num_experts=24).to_json()))
    for name in ("budget", "serving"):
        test = page(name, pair="config files", config=shlex.quote(str(path)))
        assert words_of(test, name) == ["--config", str(path)]
        assert json.loads(downloads[-1]) == command.json(MAIN[name], "--config", path)
    assert not page("budget", pair="config files", config=shlex.quote(str(path))).metric


# Matching


def test_the_next_best_says_why_it_fails(command: Command) -> None:
    report = command.json(matching.main, "--baseline", "demo")
    test = page("matching", baseline="demo")
    assert len(test.dataframe[0].value) == len(report["best"])
    assert test.markdown[-1].value.endswith(f"{report['next_best_fails']}.")
    assert "where" in report["next_best_fails"]


# Scaling


def test_the_gain_is_drawn_with_its_band_at_each_sparsity() -> None:
    test = page("scaling", sparsity="0.85 0.97")
    compute_C = budgets((1e20, 1e21, 1e22))
    lines = chart(test, 2)
    assert len(lines) == 6
    for index, sparsity in enumerate((0.85, 0.97)):
        band = printed_gain(sparsity, compute_C)
        for trace, values in zip(lines[3 * index :], (band.low_C, band.high_C, band.value_C), strict=False):
            np.testing.assert_array_equal(array(trace["y"]), values)


def test_the_surface_is_drawn_at_the_chosen_sparsity() -> None:
    looped = chart(page("scaling", at_sparsity="0.97"), 0)[2]
    loss = printed_law("smelt").loss(array(looped["x"]), 0.97, array(looped["y"])[:, None])
    np.testing.assert_allclose(array(looped["z"]), loss.ravel())


@pytest.fixture(scope="module")
def runs() -> str:
    """A CSV of two architectures in one domain, and of one in another."""
    generator, lines = np.random.default_rng(0), ["architecture,flops_per_token,sparsity,tokens,loss,domain"]
    for domain, architecture in (("web", "baseline"), ("web", "smelt"), ("code", "smelt")):
        law = printed_law(architecture)
        for flops in (6e8, 1e9, 4e9):
            for sparsity in (0.85, 0.95):
                for tokens in (1e10, 5e10, 2e11):
                    loss = law.loss(flops, sparsity, tokens) * (1 + 0.003 * generator.standard_normal())
                    lines.append(f"{architecture},{flops},{sparsity},{tokens},{loss},{domain}")
    return "\n".join(lines)


def upload(test: AppTest, text: str) -> AppTest:
    return run(test.file_uploader[0].set_value(("runs.csv", text.encode(), "text/csv")))


def test_a_file_of_runs_is_fitted_as_the_command_fits_it_and_only_once(
    runs: str, tmp_path: Path, downloads: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_grids, draws = scaling_page.fit_grids, []

    def counted(grids: object, number: int, seed: int, show: Callable[[int], None]) -> scaling.Fits:
        draws.append(number)
        return fit_grids(grids, number, seed, show)

    monkeypatch.setattr(scaling_page, "fit_grids", counted)
    test = upload(page("scaling", compute="1e21", sparsity="0.95", draws="50"), runs)
    words = ["fit", "runs.csv", "--compute", "1e+21", "--sparsity", "0.95", "--draws", "50"]
    assert words_of(test, "scaling") == words
    (tmp_path / "runs.csv").write_text(runs)
    monkeypatch.chdir(tmp_path)
    assert json.loads(downloads[-1]) == command.json(scaling.main, *words)
    assert keys_of(test) == option_names(scaling.FitOptions) - {"runs"}
    run(test.text_input(key="compute").set_value("1e22"))
    assert len(test.get("plotly_chart")) == 3
    run(test.selectbox(key="domain").set_value("code"))
    assert [info.value for info in test.info] == [scaling.NO_GAINS]
    assert len(test.get("plotly_chart")) == 2
    assert draws == [50]
    assert list(tmp_path.iterdir()) == [tmp_path / "runs.csv"]


def test_runs_that_cannot_be_fitted_show_the_line_of_the_command(
    runs: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusals = {}
    for broken in (runs.replace("0.95", "1.5", 1), runs.replace("loss", "cost", 1), runs.replace("0.95", "0.85")):
        (tmp_path / "runs.csv").write_text(broken)
        refusals[broken] = command.refusal(scaling.main, "fit", "runs.csv")
    for broken, refusal in refusals.items():
        test = upload(page("scaling"), broken)
        assert [f"error: {error.value}\n" for error in test.error] == [refusal]
        assert not test.get("plotly_chart")


# Serving


def test_each_pass_stands_on_the_roof() -> None:
    roof, *passes = chart(page("serving", batch="4"), 0)
    found = serving.answers(serving.ServingOptions(pair="200M", load=serving.Load(batch=4)))
    drawn = {trace["name"]: (trace["x"][0], trace["y"][0]) for trace in passes}
    for name, served in found.items():
        for phase, place in (("decode", served.decode), ("prefill", served.prefill)):
            assert drawn[f"{name}, {phase}"] == (place.intensity, place.flops_per_second)
    assert max(roof["y"]) == serving.gpu("h100").peak_flops


# What is refused, and what is not imported


@pytest.mark.parametrize(
    ("name", "query", "line"),
    [
        (
            "budget",
            {"num_kv_heads": "5"},
            "num_heads must be a multiple of num_kv_heads (5); got 24",
        ),
        ("budget", {"pair": "config files"}, "the networks must be named by either --pair or --config; got neither"),
        (
            "budget",
            {"pair": "config files", "config": "'x"},
            "config must be names of files, in quotes where they hold spaces; got 'x: No closing quotation",
        ),
    ],
)
def test_what_a_command_refuses_is_one_line_on_its_page(name: str, query: dict[str, str], line: str) -> None:
    test = page(name, **query)
    assert [error.value for error in test.error] == [line]
    assert not test.dataframe


WRONG = {
    "budget": {
        "attended_tokens": ("-1", "at least 0; got -1.0"),
        "layers": ("4-3", "first-last or own; got 4-3"),
        "width": ("inf", "whole number; got inf"),
        "span": ("1e400", "number; got 1e400"),
        "pair": ("9T", "one of .*; got '9T'"),
    },
    "matching": {
        "visits": ("0", "at least 1; got 0"),
        "depth": ("deep", "whole number or baseline or free; got deep"),
        "baseline": ("9T", "one of .*; got '9T'"),
    },
    "scaling": {
        "compute.0": ("0", "above 0; got 0.0"),
        "sparsity": ("", r"a list of at least 1; got \(\)"),
        "at_sparsity": ("nan", "one of .*; got 'nan'"),
    },
    "serving": {
        "kept_share": ("2", "at most 1; got 2.0"),
        "l2_bytes": ("-1", "at least 1; got -1.0"),
        "gpu": ("abacus", "one of .*; got 'abacus'"),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_in_the_address_fall_back_and_each_says_so(name: str) -> None:
    test = page(name, **{key.removesuffix(".0"): value for key, (value, _) in WRONG[name].items()})
    said = [line.value.removeprefix("The address: ").partition(" must be ")[::2] for line in test.warning]
    assert sorted(key for key, _ in said) == sorted(WRONG[name])
    for key, line in said:
        assert re.fullmatch(f"{WRONG[name][key][1]}: shown is .*", line)
    assert test.dataframe
    assert not test.error


@pytest.mark.parametrize("name", ["budget", "serving", "matching"])
def test_a_page_opens_no_file_outside_the_folder_where_it_was_started(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "started").mkdir()
    monkeypatch.chdir(tmp_path / "started")
    (tmp_path / "secret.json").write_text(json.dumps(DEMO_SMELT.to_json()))
    Path("link.json").symlink_to(tmp_path / "secret.json")
    for path in (tmp_path / "secret.json", "../secret.json", "link.json"):
        key = "baseline" if name == "matching" else "config"
        test = page(name, **{"pair": "config files", key: str(path)})
        said = [each.value for each in (*test.error, *test.warning)]
        assert any(f"must lie below {tmp_path / 'started'}; got {path}" in line for line in said)


def test_a_page_does_not_wait_for_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.json")
    (error,) = page("budget", pair="config files", config="pipe.json").error
    assert error.value == "a config file must be a plain file; got pipe.json, a device or pipe"


def test_an_impossible_request_says_which_budget_fails_and_by_how_much(command: Command) -> None:
    words = ("--baseline", "demo", "--max-flops-mismatch", "0")
    refusal = command.refusal(matching.main, *words)
    (error,) = page("matching", baseline="demo", max_flops_mismatch="0").error
    assert refusal == f"error: {error.value}\n"
    assert "training FLOPs" in error.value


def test_no_page_of_numbers_imports_torch_or_an_optimiser_before_a_fit() -> None:
    script = (
        "import sys; from streamlit.testing.v1 import AppTest\n"
        "from streamlit.components.v2 import manifest_scanner; manifest_scanner.scan_component_manifests = list\n"
        "for name in ('budget', 'matching', 'scaling', 'serving'):\n"
        "    test = AppTest.from_string(f'from app.views.{name} import {name}_page; {name}_page()')\n"
        "    assert test.run(timeout=60).dataframe and not test.exception\n"
        "print(sorted({'torch', 'scipy', 'transformers'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120, cwd=root
    )
    assert ended.stdout.splitlines()[-1] == "[]"
