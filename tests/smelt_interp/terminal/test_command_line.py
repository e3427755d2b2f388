"""Command lines: a dataclass comes back, and every mistake is one line."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.validation import validated
from tests.support.planted import LOOPED, planted_batch, random_sites, text_samples
from tests.support.planted_captures import planted_capture


@validated
class Options:
    """What the tests parse."""

    samples: Annotated[int, Field(ge=1)] = 4
    """Rows."""
    scale: float = 1.0
    kind: Literal["raw", "centred"] = "raw"
    length: int | Literal["own"] = "own"


def parsed(*args: str) -> Options:
    return parse(Options, prog="python -m tool", description="A tool.", args=args)


def test_the_dataclass_comes_back() -> None:
    assert parsed("--samples", "3", "--kind", "centred") == Options(samples=3, kind="centred")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--samples", "0"], r"^samples must be at least 1; got 0; see python -m tool --help$"),
        (["--samples", "many"], r"^--samples must be a whole number; got 'many'; see"),
        (["--scale", "big"], r"^--scale must be a number; got 'big'; see"),
        (["--sample", "3"], r"^Unrecognized options: --sample, 3; see"),
        (["--length", "long"], r"^--length must be INT\|\{own\}; got 'long'; see"),
        (["--kind", "mean"], r"^invalid choice 'mean' for argument '--kind'. Expected one of \('raw', 'centred'\)"),
        (["--samples"], r"^Missing value for argument '--samples'"),
    ],
)
def test_every_mistake_is_one_line(args: list[str], says: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
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
        (UserError("x must be short; got \x1b[31m" + "y" * 9999), 2, None),
        (
            MemoryError("Unable to allocate 9 TiB"),
            1,
            "error: this machine's memory must hold what is asked for; Unable to allocate 9 TiB\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_command_ends_with_one_line_and_its_code(
    raised: BaseException, code: int, says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise raised

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == code
    printed = capsys.readouterr().err
    assert says is None or printed == says
    assert len(printed) < 310
    assert printed.strip("\n").isprintable()


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


COMMANDS = [
    ["smelt_interp.costs.budget", "--pair", "demo"],
    ["smelt_interp.costs.matching", "--pair", "demo"],
    ["smelt_interp.costs.sparsity", "--pair", "demo"],
    ["smelt_interp.costs.serving", "--pair", "demo"],
    ["smelt_interp.costs.residual_variance", "--pair", "demo"],
    ["smelt_interp.scaling", "printed"],
    ["smelt_interp.scaling.calibration", "wins", "3", "4"],
    ["smelt_interp.paper"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_closed_output_is_one_line(command: list[str]) -> None:
    words = shlex.join([sys.executable, "-m", *command])
    closed = subprocess.run(["sh", "-c", f"{words} >&-"], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (
        1,
        "error: the output must be open; got a closed one: send it to /dev/null\n",
    )


def test_a_closed_error_stream_takes_nothing_away_from_the_output() -> None:
    words = shlex.join([sys.executable, "-m", "smelt_interp.costs.budget"])
    ran = subprocess.run(["sh", "-c", f"{words} --pair demo --json 2>&-"], stdout=subprocess.PIPE, text=True)
    assert (ran.returncode, list(json.loads(ran.stdout))) == (0, ["budgets", "mismatch"])
    refused = subprocess.run(["sh", "-c", f"{words} --pair none 2>&-"], stdout=subprocess.PIPE, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_an_output_that_lacks_a_letter_gets_its_number() -> None:
    script = "from smelt_interp.errors import run_command; run_command(lambda: print('a\\udcffb\\u2500'))"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, "a\\udcffb\\u2500\n", "")


INTERRUPTED = """
import signal, time, weakref
from smelt_interp.errors import run_command

class Thing:
    pass

def main():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    for _ in range(1000):
        time.sleep(0.01)
    print("went on to the end")

run_command(main)
"""


def test_ctrl_c_that_python_drops_still_ends_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, preexec_fn=_hears_ctrl_c
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


def _hears_ctrl_c() -> None:
    """As in a terminal, whatever started the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
