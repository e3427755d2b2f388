"""Every block of docs/recipes.md runs after those above it, and its `answer` is what the document says, numbers to one
unit of the second digit: other processors round otherwise."""

import ast
import linecache
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "recipes.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
MARK = "# SmolLM2"
FOLDER = ROOT / "pretrained" / "smollm2"


def blocks(*, pretrained: bool) -> list[str]:
    """Those that need SmolLM2 come after all others, and begin by saying so."""
    found = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    return found if pretrained else [block for block in found if not block.startswith(MARK)]


def answers(found: list[str], names: dict[str, object]) -> list[tuple[object, object]]:
    """What each block says and what it gives, both as plain values."""
    told = []
    for block in found:
        run_block(block, names)
        said = block.rstrip().rpartition("# ")[2]
        told.append((ast.literal_eval(said), ast.literal_eval(repr(_plain(names["answer"])))))
    return told


def assert_alike(given: object, said: object) -> None:
    """The same lists of the same things."""
    if isinstance(said, (list, tuple)):
        assert isinstance(given, type(said)), given
        for mine, theirs in zip(given, said, strict=True):
            assert_alike(mine, theirs)
    else:
        assert given == (pytest.approx(said, abs=0.011) if isinstance(said, float) else said)


def run_block(block: str, names: dict[str, object]) -> None:
    """A block as a file of its own: nnsight reads the source of what it traces."""
    file = Path("recipe.py").resolve()
    file.write_text(block, encoding="utf-8")
    linecache.checkcache(str(file))
    exec(compile(block, str(file), "exec"), names)


def _plain(value: object) -> object:
    """Numbers of numpy as Python's."""
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    return value.item() if hasattr(value, "item") else value


def test_the_blocks_on_the_demo_pair_say_what_they_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_there(tmp_path, monkeypatch)
    for said, given in answers(blocks(pretrained=False), {}):
        assert_alike(given, said)


@pytest.mark.pretrained
@pytest.mark.skipif(not FOLDER.is_dir(), reason="pretrained/smollm2 is not there: make pretrained")
def test_the_blocks_on_smollm2_say_what_they_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_there(tmp_path, monkeypatch)
    names: dict[str, object] = {}
    every = blocks(pretrained=True)
    run_block(every[0], names)  # the imports
    for said, given in answers([block for block in every if block.startswith(MARK)], names):
        assert_alike(given, said)


def _run_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder from which checkpoints and networks are seen."""
    torch.set_num_threads(1)
    for name in ("checkpoints", "pretrained"):
        if (ROOT / name).is_dir():
            (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
