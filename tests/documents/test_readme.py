"""The README's Python runs as it stands, and what it shows is so."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_the_ten_lines_run_and_keep_the_visits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 14
    names: dict[str, object] = {}
    exec(code, names)
    first, second, logits, edited = (names[name] for name in ("first", "second", "logits", "edited"))
    assert first.shape == second.shape == (1, 4, 6, 6)
    assert not torch.equal(first, second)
    assert not torch.equal(logits, edited)
    rows = names["result"].rows()
    assert {row["visit"] for row in rows if row["quantity"] == "start mass" and row["level"] == "headline"} >= {1, 2}


@pytest.mark.parametrize("folder", ["smelt_interp", "model", "cache", "probes", "app", "checkpoints", "docs", "tests"])
def test_the_tree_names_folders_that_are_there(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert re.search(rf"^    {folder}/ +\w", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
