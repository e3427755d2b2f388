"""The page of answers along the steps, run in process on planted captures."""

import json
import shutil
from pathlib import Path

import pytest

from cache.store import Capture
from probes.answer_lens import FILE, read_answers
from smelt_interp.errors import UserError
from tests.support.app_captures import plant_answers
from tests.support.app_pages import page
from tests.support.planted_captures import planted_capture, random_batch


@pytest.fixture
def answered(folder: Path, tmp_path: Path) -> Path:
    """A folder of one capture whose answers are kept."""
    shutil.copytree(folder / "looped", tmp_path / "looped")
    plant_answers(Capture(tmp_path / "looped"))
    return tmp_path


def test_right_and_wrong_episodes_stand_side_by_side(answered: Path) -> None:
    test = page("answers", answered, {}, capture="looped", right="3")
    assert [each.value for each in test.subheader][:2] == ["Answered right: 2 of 3", "Answered wrong: 1 of 3"]
    right, wrong = (each.value for each in test.dataframe)
    assert (right["sample"].tolist(), wrong["sample"].tolist()) == ([1, 3], [2])
    assert (right["stands after"].tolist(), wrong["stands after"].tolist()) == (["layer 4, visit 1"] * 2, ["never"])
    assert len(test.get("plotly_chart")) == 3  # the means, and an episode of each kind
    assert (test.selectbox(key="right").value, test.selectbox(key="wrong").value) == (3, 2)
    capture = Capture(answered / "looped")
    assert [each.value for each in test.code[1:3]] == [capture.text(2).strip(), capture.text(1).strip()]
    (warning,) = page("answers", answered, {}, capture="looped", right="2").warning
    assert "right must be one of 1, 3; got '2': shown is 1" in warning.value


def test_without_answers_the_page_says_what_to_type(folder: Path, tmp_path: Path) -> None:
    test = page("answers", folder, {}, capture="looped")
    assert test.code[1].value == (f"python -m probes.answer_lens --ckpt checkpoints/NAME --capture {folder / 'looped'}")
    assert not page("answers", tmp_path, {}).error
    (error,) = page("answers", folder, {}, capture="cut").error
    assert "cut" in error.value


def test_samples_that_ask_nothing_are_told_without_a_command_that_would_refuse_them(tmp_path: Path) -> None:
    planted_capture(tmp_path / "text", random_batch(2))
    test = page("answers", tmp_path, {}, capture="text")
    (info,) = test.info
    assert info.value.startswith("text holds no Dyck episodes; choose a capture that does")
    assert len(test.code) == 1  # the definition


def test_damaged_answers_are_one_line(answered: Path) -> None:
    (answered / "looped" / "results" / FILE).write_text("{}")
    (error,) = page("answers", answered, {}, capture="looped").error
    assert error.value.endswith("write it again")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("rows", 0), None),
        (("rows", 1, "low"), [1]),
        (("episodes", 1, "sample"), 0),
        (("episodes", 1, "sample"), 99),
        (("episodes", 0, "tokens", 0), {}),
        (("episodes", 0, "rank"), {}),
        (("episodes", 0, "rank", "stream", 1), ["a", 1]),
        (("episodes", 0, "top", "stream"), []),
        (("episodes", 2, "probability", "stream", 0), [0.5]),
    ],
)
def test_one_wrong_value_within_answers_is_one_line(
    answered: Path, place: tuple[str | int, ...], value: object
) -> None:
    capture, path = Capture(answered / "looped"), answered / "looped" / "results" / FILE
    inner = document = json.loads(path.read_text())
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    assert read_answers(capture) is not None
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"must be what probes\.answer_lens wrote of this capture; .*: write it again"):
        read_answers(capture)
