"""Numbers are shown as a person reads them, and JSON stays JSON."""

import pytest

from smelt_interp.terminal.tables import Table, compact, percent, print_json, print_table


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
    print_table(table)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [["a", "1.5G"], ["b", "0.25"]]


def test_what_json_cannot_say_is_not_printed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})


def test_numbers_are_right_aligned_and_no_cell_is_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table("T", ["name", "n"], [["[red]a", 5], ["b", 123], ["c", None]], ["[bold]note"]))
    title, header, first, second, third, note = capsys.readouterr().out.splitlines()
    assert title.strip() == "T"
    assert header.split() == ["name", "n"]
    assert first.rstrip() == "[red]a    5"
    assert second.rstrip() == "b       123"
    assert third.rstrip() == "c         -"
    assert note == "[bold]note"


def test_a_long_title_and_note_are_not_folded_to_the_width_of_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table("long " * 40, ["n"], [[1]], ["note " * 40]))
    title, _, _, note = capsys.readouterr().out.splitlines()
    assert (title.strip(), note.strip()) == (("long " * 40).strip(), ("note " * 40).strip())


def test_a_pipe_breaks_no_short_cell_whatever_the_number_of_columns(capsys: pytest.CaptureFixture[str]) -> None:
    interval, prose = "0.629 [0.617, 0.642]", "a reason of many words, " * 8
    print_table(Table("T", [f"column {number}" for number in range(10)], [[*[interval] * 9, prose]]))
    assert capsys.readouterr().out.splitlines()[2].count(interval) == 9


def test_two_networks_side_by_side_have_their_ratio_where_both_have_a_number() -> None:
    table = Table.side_by_side("T", {"a": {"n": 3, "bound": "x", "none": 0.0}, "b": {"n": 2, "bound": "y", "none": 0}})
    assert table.columns == ["", "a", "b", "ratio"]
    assert table.rows == [["n", 3, 2, "1.5000"], ["bound", "x", "y", ""], ["none", 0.0, 0, ""]]
    assert Table.side_by_side("T", {"a": {"n": 3}}).rows == [["n", 3]]
