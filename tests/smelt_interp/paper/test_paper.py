"""The table of printed figures: complete, without a second copy of a figure, and verdicts that would change."""

import re
from collections import Counter
from pathlib import Path

import pytest

import smelt_interp
from smelt_interp.paper.table import last_place, main, printed, rounds_to, rows
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
    assert contradicted - heads == {"1.6B baseline flop ratio", "200M looped block active bytes"}
    assert verdicts["gamma baseline"] == "match"
    assert verdicts["gamma smelt"] == "within rounding"
    gains = [verdict for name, verdict in verdicts.items() if re.fullmatch(r"gain at .* sparse", name)]
    assert gains == ["within rounding"] * 9


@pytest.mark.parametrize(
    ("value", "unit"),
    [(0.816, 1e-3), (1.5, 0.1), (56.0, 1.0), (3.9e9, 1e8), (8.4e8, 1e7), (1.03125, 1e-5), (18.0, 1.0)],
)
def test_the_last_place_of_a_printed_decimal(value: float, unit: float) -> None:
    assert last_place(value) == pytest.approx(unit)


def test_a_figure_one_digit_off_does_not_match() -> None:
    assert rounds_to(0.8165, 0.816, 1e-3)
    assert not rounds_to(0.8166, 0.816, 1e-3)


def test_a_changed_figure_changes_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = printed.number

    def one_digit_more(*keys: printed.Key) -> float:
        value = actual(*keys)
        if keys[-1] == "capacity_left":
            return value + 0.001
        return value + 0.02 if keys[:2] == ("scaling_law", "gamma") else value

    monkeypatch.setattr(printed, "number", one_digit_more)
    verdicts = {row.name: row.verdict for row in rows()}
    assert verdicts["dense dilemma capacity left"] == "contradiction"
    assert verdicts["gamma smelt"] == "contradiction"


def test_no_figure_is_typed_in_the_code() -> None:
    """Distinctive figures of the paper stand in its data file alone."""
    figures = [
        *(printed.entry("scaling_law", name, letter) for name in ("baseline", "smelt") for letter in "EAKabc"),
        *(printed.entry("scaling_law", "gamma", name) for name in ("baseline", "smelt")),
        *(printed.entry("dense_dilemma", name) for name in ("width_factor", "capacity_left")),
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
