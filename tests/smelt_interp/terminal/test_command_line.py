"""Command lines: a dataclass comes back, and every mistake is one line."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from tests.support.planted import LOOPED, planted_batch, random_sites, text_samples
from tests.support.planted_captures import planted_capture


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the tests parse."""

    samples: int = 4
    """Rows."""
    scale: float = 1.0
    kind: Literal["raw", "centred"] = "raw"
    length: int | Literal["own"] = "own"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"samples must be at least 1; got {self.samples}")


def parsed(*args: str) -> Options:
    return parse(Options, prog="python -m tool", description="A tool.", args=args)


def test_the_dataclass_comes_back() -> None:
    assert parsed("--samples", "3", "--kind", "centred") == Options(samples=3, kind="centred")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--samples", "0"], r"^samples must be at least 1; got 0; see python -m tool --help$"),
        (["--samples", "many"], r"^--samples must be a number; got 'many'; see"),
        (["--scale", "big"], r"^--scale must be a number; got 'big'; see"),
        (["--sample", "3"], r"^Unrecognized options: --sample, 3; see"),
        (["--length", "long"], r"^--length must be INT\|\{own\}; got 'long'; see"),
        (["--kind", "mean"], r"^invalid choice 'mean' for argument '--kind'. Expected one of \('raw', 'centred'\)"),
        (["--samples"], r"^Missing value for argument '--samples'"),
    ],
)
def test_every_mistake_is_one_line(args: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        parsed(*args)
    assert "\n" not in str(raised.value)
    assert "│" not in str(raised.value)


def test_help_exits_0_and_prints_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    assert stop.value.code == 0
    assert "Rows." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (UserError("x must be 1; got 2"), 2, "error: x must be 1; got 2\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            "error: torch must be installed for this; pip install -r requirements.lock\n",
        ),
        (OSError(28, "No space left on device", "a.h5"), 1, "error: No space left on device: a.h5\n"),
        (UserError("a file must be there; got a\nb\r\nc"), 2, "error: a file must be there; got a b c\n"),
        (OSError(28, "No space left on device", "a\nb.h5"), 1, "error: No space left on device: a b.h5\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_command_ends_with_one_line_and_its_code(
    raised: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise raised

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("flag", ["--help", "--json"])
def test_output_that_nobody_takes_is_one_line_and_no_traceback(flag: str) -> None:
    command = [sys.executable, "-m", "smelt_interp.costs.budget", "--pair", "demo", flag]
    # Buffered, as a user has it: the output fails only when it is flushed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (1, "error: Broken pipe: output\n")
    with Path("/dev/full").open("w") as disk:
        full = subprocess.run(command, stdout=disk, stderr=subprocess.PIPE, text=True, env=environment)
    assert (full.returncode, full.stderr) == (1, "error: No space left on device: output\n")


@pytest.mark.parametrize("module", ["cache.info", "cache.verify"])
def test_the_work_of_a_command_is_not_part_of_reading_its_line(module: str, tmp_path: Path) -> None:
    samples = text_samples(2, 8)
    planted_capture(
        tmp_path / "some.h5", planted_batch(LOOPED, samples, random_sites(LOOPED, samples, ("hook_attn_out",)))
    )
    with Path("/dev/full").open("w") as disk:
        full = subprocess.run(
            [sys.executable, "-m", module, str(tmp_path / "some.h5")], stdout=disk, stderr=subprocess.PIPE, text=True
        )
    assert (full.returncode, full.stderr) == (1, "error: No space left on device: output\n")


def test_a_line_break_in_a_word_does_not_break_the_complaint() -> None:
    with pytest.raises(UserError) as raised:
        parsed("--samples", "a\nb")
    assert "\n" not in str(raised.value)
