"""A few seconds of every campaign, always the same cases; `python -m tests.campaigns` tries more."""

from pathlib import Path

import pytest

from tests.campaigns.campaigns import CAMPAIGNS, random_of
from tests.campaigns.options import LINES
from tests.support.readme import COMMANDS

CASES = {"captures": 80, "checkpoints": 120, "tables": 25, "hooks": 60, "kills": 15, "options": 18}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_damage_is_refused_in_one_line_or_taken_for_what_it_says(name: str, tmp_path: Path) -> None:
    case = CAMPAIGNS[name](tmp_path)
    ends = {case(random_of(0, number)) for number in range(CASES[name])}
    assert len(ends) > 1, "a campaign in which only one thing happens tries one thing"


def test_every_command_has_its_options_tried() -> None:
    assert {words[0] for words in COMMANDS} - {"smelt_interp.data.fetch_texts"} == set(LINES)
