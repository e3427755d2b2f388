"""Numbers are shown as a person reads them, and JSON stays JSON."""

import io
import sys

import pytest

from smelt_interp.terminal.tables import Progress, Table, compact, percent, print_json, print_table


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12"), (99_999, "99999"), (141_952_800, "141.953M"), (3.9e9, "3.9G"), (0.03125, "0.03125"), (1e21, "1e+21"),
     (1.5e5, "150k"), (2.25e15, "2.25P"), (-3.35e12, "-3.35T"), (0.0, "0")],
)  # fmt: skip
def test_a_number_as_a_person_reads_it(value: float, text: str) -> None:
    assert compact(value) == text


def test_a_percentage_keeps_its_sign() -> None:
    assert (percent(0.0312), percent(-0.5)) == ("+3.12%", "-50.00%")


def test_a_table_shows_the_texts_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("T", ["", "n"], [["a", 1.5e9], ["b", 0.25]])
    assert table.texts() == {" ": ["a", "b"], "n": ["1.5G", "0.25"]}
    print_table(*table)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [["a", "1.5G"], ["b", "0.25"]]


def test_what_json_cannot_say_is_not_printed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})


def test_numbers_are_right_aligned_and_no_cell_is_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("T", ["name", "n"], [["[red]a", 5], ["b", 123]], ["[bold]note"])
    title, header, first, second, note = capsys.readouterr().out.splitlines()
    assert title.strip() == "T"
    assert header.split() == ["name", "n"]
    assert first.rstrip() == "[red]a    5"
    assert second.rstrip() == "b       123"
    assert note == "[bold]note"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_says_how_much_is_left_often_to_a_terminal_and_seldom_to_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Progress("draws", 4).show(4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("smelt_interp.terminal.tables.SECONDS_BETWEEN_LINES", 0)
    Progress("draws", 4).show(1)
    assert capsys.readouterr().err.startswith("draws: 1/4, ")
    monkeypatch.undo()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress("draws", 4)
    progress.show(1)
    progress.show(4)
    first, second = terminal.getvalue().strip("\r").split("\r")
    assert first.startswith("draws: 1/4, ")
    assert second.startswith("draws: 4/4, 0 s left")
    assert second.endswith("\n")
