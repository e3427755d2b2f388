"""The README's Python runs as it stands, its commands are read as they stand, and its tree is what is there."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import tyro

from tests.support.readme import BLOCK, CODE, COMMANDS, LINES, tree

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class LineRead(BaseException):
    """A command has read its line; what it would do now is another test's matter."""


def test_the_ten_lines_run_and_keep_the_visits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 16
    names: dict[str, object] = {}
    exec(code, names)
    first, second, logits, edited = (names[name] for name in ("first", "second", "logits", "edited"))
    assert first.shape == second.shape == (1, 4, 6, 6)
    assert not torch.equal(first, second)
    assert not torch.equal(logits, edited)
    table = names["result"].table
    shown = table[(table["quantity"] == "start mass") & (table["level"] == "headline")]
    assert set(shown["visit"]) >= {1, 2}


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # runpy runs it once more, as -m does
def test_every_command_takes_its_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read = tyro.cli

    def read_alone(*given: object, **named: object) -> object:
        read(*given, **named)
        raise LineRead

    monkeypatch.setattr(tyro, "cli", read_alone)
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.chdir(ROOT)
    with pytest.raises(LineRead):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def test_every_target_and_every_file_is_there() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {words[1] for words in LINES if words[:1] == ["make"]} <= set(targets)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    kept = {word for words in LINES for word in words if word.startswith(("checkpoints/", "docs/", "app/main"))}
    missing = [path for path in {*links, *kept} if not (ROOT / path).exists()]
    assert not missing
    (shown,) = re.findall(r"^    docs/ +(.*)$", README, re.MULTILINE)
    assert shown.split(", ") == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_every_test_that_a_page_names_is_there() -> None:
    pages = (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    named = {
        name for page in pages for name in re.findall(r"\b(?:tests/)?[\w/]*\btest_\w+\.py", page.read_text("utf-8"))
    }
    assert {name for name in named if not [*ROOT.glob(name), *(ROOT / "tests").rglob(name)]} == set()


def test_the_root_holds_no_output_of_a_command() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    lone = {Path(path) for path in tracked if "/" not in path}
    assert {path.suffix for path in lone} <= {"", ".md", ".toml", ".lock"}


def test_the_tree_names_every_file_once_with_the_first_words_of_its_docstring() -> None:
    (found,) = BLOCK.findall(README)
    assert found == tree(), "write it anew with: python -m tests.support.readme"
    tracked = subprocess.run(["git", "ls-files", *CODE], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for path in map(Path, tracked.split()):
        if path.suffix == ".py" and path.name != "__init__.py":
            assert f"    {path.name} " in found, path
