"""Every module either is a command, which the README names, or says that it is none."""

import subprocess
import sys
from pathlib import Path

import pytest

from smelt_interp.errors import EXIT_USER
from smelt_interp.terminal.command_modules import is_command, refuse_no_command

ROOT = Path(__file__).parents[3]
PACKAGES = ("smelt_interp", "model", "cache", "probes", "app")
PATHS = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PATHS]
COMMANDS = {name for name in MODULES if is_command(name, ROOT)}


def test_the_commands_are_those_that_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in COMMANDS if not name.endswith("__main__") and f"python -m {name}" not in readme} == set()


@pytest.mark.parametrize(
    "name", ["model", "model.network", "smelt_interp.scaling.law", "cache.store", "app.views.probe"]
)
def test_a_module_that_is_no_command_is_one_line_and_exit_2(name: str) -> None:
    ended = subprocess.run([sys.executable, "-m", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (EXIT_USER, "")
    assert ended.stderr == f"error: python -m must name a command; got {name}, which is only imported: see README.md\n"


def test_every_module_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What Python's own search would find of ours, in one process; and each package asks when it is imported."""
    assert len(MODULES) > 100
    for name in MODULES:
        monkeypatch.setattr("sys.argv", ["-m"])
        monkeypatch.setattr("sys.orig_argv", ["python", "-m", name, "--help"])
        if name in COMMANDS:
            refuse_no_command(ROOT)
            continue
        with pytest.raises(SystemExit, match="2"):
            refuse_no_command(ROOT)
        assert capsys.readouterr().err.startswith(f"error: python -m must name a command; got {name}, which")
    for package in PACKAGES:
        code = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
        assert code.endswith("\nrefuse_no_command(Path(__file__).parents[1])\n")


def test_importing_and_other_peoples_modules_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, original in (
        (["script.py"], ["python", "script.py", "-m", "model.network"]),
        (["-c"], ["python", "-c", "import model"]),
        (["-m"], ["python", "-m", "pytest"]),
        (["-m"], ["python", "-m", "model.absent"]),
        ([], ["python"]),
    ):
        monkeypatch.setattr("sys.argv", argv)
        monkeypatch.setattr("sys.orig_argv", original)
        refuse_no_command(ROOT)
