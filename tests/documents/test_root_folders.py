"""What lies in the root folder beside the project's own folders changes no check."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("smelt_interp", "model", "cache", "probes", "app", "benchmarks", "tests")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda _, names: [n for n in names if "." in n[:-3]])
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def ruff(clone: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["check", "format"])
def test_a_users_folders_bring_no_finding(arguments: tuple[str, ...], clone: Path) -> None:
    without = ruff(clone, *arguments)
    for name in ("captures", "runs", "numpy", "torch", "pytest", "mine"):
        (clone / name).mkdir()
        (clone / name / "notes.py").write_text("import  os, sys\n", encoding="utf-8")
    assert ruff(clone, *arguments) == without


def test_what_breaks_a_rule_in_the_projects_folders_is_found(clone: Path) -> None:
    (clone / "cache" / "wrong.py").write_text("import tests.support\nimport numpy\n", encoding="utf-8")
    assert "cache/wrong.py:1" in ruff(clone, "check", "--select", "I001")
