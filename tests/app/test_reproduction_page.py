"""The page of the paper's figures, of a card that was planted."""

import json
from pathlib import Path

import pytest

from probes import reproduction
from probes.running.verdicts import Ours, Printed
from smelt_interp.errors import UserError
from smelt_interp.paper.printed import Figure
from tests.support.app_pages import page

PAPER = Printed(figures=(Figure("0.60"),))


def planted(folder: Path) -> dict[str, object]:
    """A card of one claim that matches and one that nothing can show."""
    found = reproduction._row("start mass, visit 1", "dyck", PAPER, [Ours(value=0.59, low=0.5, high=0.7)], null=0.05,
                              baseline=0.4, equal_depth=0.3, untrained=0.06, reason="")  # fmt: skip
    missing = reproduction._row("best visits", "", PAPER, [], reason="takes runs over budgets")
    document = {"schema": reproduction.SCHEMA, "pairs": [["runs/a", "runs/b"]], "intervals": "95%, over documents",
                "rows": [found, missing], "command": "python -m probes.reproduction --pair runs/a runs/b"}  # fmt: skip
    (folder / reproduction.CARD).write_text(json.dumps(document))
    return document


def test_the_page_shows_the_card_of_the_folder_and_its_command(tmp_path: Path) -> None:
    document = planted(tmp_path)
    test = page("reproduction", tmp_path)
    shown = test.dataframe[0].value
    assert shown["verdict"].tolist() == ["matches", "not testable"]
    assert shown.iloc[0][["paper", "ours", "chance", "baseline", "equal depth", "untrained"]].tolist() == [
        "0.60", "0.59 [0.5, 0.7]", "0.05", "0.4", "0.3", "0.06",
    ]  # fmt: skip
    assert test.subheader[0].value == "a"
    assert test.code[-1].value == document["command"]


def test_a_folder_without_a_card_says_what_to_type(tmp_path: Path) -> None:
    test = page("reproduction", tmp_path)
    assert not test.error
    assert [each.value for each in test.info] == [f"There is no card in `{tmp_path}` yet. This writes one; then reload "
                                                  "this page:"]  # fmt: skip
    assert f"--out {tmp_path}" in test.code[-1].value


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other", "pairs": [], "rows": []}', '{"rows": [3]}'])
def test_another_file_of_that_name_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / reproduction.CARD).write_text(text)
    with pytest.raises(UserError, match=r"reproduction\.json must be what probes\.reproduction --out wrote; "):
        reproduction.read_card(tmp_path)
