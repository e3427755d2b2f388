"""The table of printed figures: complete, without a second copy of a figure, and verdicts that would change."""

import re
from collections import Counter
from pathlib import Path

import pytest

import smelt_interp
from smelt_interp.paper.table import main, printed, rows
from tests.support.commands import Command

PACKAGE = Path(smelt_interp.__file__).parent


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_every_figure_has_one_row_and_every_judged_row_has_ours() -> None:
    found = rows()
    assert max(Counter(row.name for row in found).values()) == 1
    assert len(found) >= 60
    for row in found:
        assert row.ours is not None or row.verdict == "not recomputable"
        assert row.reason or row.verdict == "match"


def test_the_verdicts_are_those_known_of_the_paper() -> None:
    verdicts = {row.name: row.verdict for row in rows()}
    contradicted = {name for name, verdict in verdicts.items() if verdict == "contradiction"}
    heads = {name for name in contradicted if name.endswith("heads x KV heads x width")}
    assert len(heads) == 7
    assert contradicted - heads == {
        "1.6B baseline flop ratio",
        "200M looped block active bytes",
        "200M time to first token over the Baseline's",
        "tokens before the last decay",
        *(f"200M mismatch of flops, {attended} attended" for attended in ("1,024", "4,096", "32,768")),
    }
    assert verdicts["200M mismatch of flops, 390 attended"] == "match"
    assert verdicts["change of active parameters, 600M"] == "within rounding"
    recomputed = ("compute of the largest run", "compute of the smallest run", "pairs of runs", "change of gamma")
    assert {verdicts[name] for name in (*recomputed, "win rate dclm core, share")} == {"match"}
    assert verdicts["gamma baseline"] == "match"
    assert verdicts["gamma smelt"] == "within rounding"
    gains = [verdict for name, verdict in verdicts.items() if re.fullmatch(r"gain at .* sparse", name)]
    assert gains == ["within rounding"] * 9


def test_what_is_said_of_serving_is_counted() -> None:
    ours = {row.name: row.ours for row in rows()}
    assert ours["200M time to first token over the Baseline's"] == "1.50x"
    weights = [ours[f"200M decode weights over the Baseline's, batch {batch}"] for batch in (1, 64)]
    assert weights == pytest.approx([1.017, 1.348], abs=5e-4)
    names = ("390", "1,024", "4,096", "32,768")
    flops = [ours[f"200M mismatch of flops, {attended} attended"] for attended in names]
    assert flops == pytest.approx([0.0287, 0.0456, 0.0996, 0.1995], abs=5e-5)


def test_a_changed_figure_changes_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"capacity_left": "0.668", "gamma": "0.2702", "stable_tokens": "206e9", "flops": "0.050"}
    actual = printed.figure

    def another(*keys: printed.Key) -> printed.Figure:
        return next((printed.Figure(changed[key]) for key in keys if key in changed), None) or actual(*keys)

    monkeypatch.setattr(printed, "figure", another)
    verdicts = {row.name: row.verdict for row in rows()}
    assert verdicts["dense dilemma capacity left"] == "contradiction"
    assert verdicts["gamma smelt"] == "contradiction"
    assert verdicts["tokens before the last decay"] == "match"
    assert verdicts["200M mismatch of flops, 1,024 attended"] == "match"


def test_no_figure_is_typed_in_the_code() -> None:
    """Distinctive figures of the paper stand in its data file alone."""
    figures = [
        *(printed.number("scaling_law", name, letter) for name in ("baseline", "smelt") for letter in "EAKabc"),
        *(printed.number("scaling_law", "gamma", name) for name in ("baseline", "smelt")),
        *(printed.number("dense_dilemma", name) for name in ("width_factor", "capacity_left")),
        *(printed.entry("grid", "rows", index, "n_experts") for index in range(8)),
        *(printed.entry("grid", "rows", index, "d_model") for index in range(8)),
    ]
    spellings = {text for value in figures for text in (repr(value), f"{value:g}", f"{value:.0f}") if len(text) > 2}
    files = {path for folder in ("costs", "scaling", "paper") for path in (PACKAGE / folder).glob("*.py")}
    files.remove(PACKAGE / "scaling" / "robust_fit.py")  # its most steps are 300, as is a printed width
    assert len(files) > 15
    for path in files:
        code = path.read_text(encoding="utf-8")
        numbers = set(re.findall(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e-?\d+)?", code))
        assert not numbers & spellings, path


def test_the_command_gives_name_printed_ours_and_verdict(command: Command) -> None:
    report = command.json(main)
    assert len(report) == len(rows())
    assert {"name", "printed", "ours", "verdict"} <= set(report[0])
    only = command.json(main, "--verdict", "contradiction")
    assert {row["verdict"] for row in only} == {"contradiction"}
    assert "contradiction, " in command.text(main).splitlines()[-1]
