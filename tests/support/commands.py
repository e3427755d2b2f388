"""Running a command in this process: what it prints, and how it refuses."""

import json
from collections.abc import Callable

import pytest

from smelt_interp.errors import EXIT_USER, run_command

Main = Callable[[], None]


def run_to_the_end(main: Main) -> int:
    """The code with which a command ends, its words being `sys.argv`."""
    try:
        run_command(main)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


class Command:
    """Runs a module's `main` with arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def text(self, main: Main, *arguments: object) -> str:
        """What it prints."""
        self._monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        run_command(main)
        return self._capsys.readouterr().out

    def json(self, main: Main, *arguments: object) -> dict:
        """The JSON that it prints."""
        return valid_json(self.text(main, *arguments, "--json"))

    def refusal(self, main: Main, *arguments: object) -> str:
        """The one line with which it exits 2, having printed nothing else."""
        self._monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run_command(main)
        printed = self._capsys.readouterr()
        assert stopped.value.code == EXIT_USER
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        return printed.err


def valid_json(text: str) -> dict:
    """The document; bare NaN and Infinity, which are not JSON, fail."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
