"""Progress is said often to a terminal and seldom to a log, with the rate and the time left."""

import io
import sys

import pytest

from smelt_interp.terminal import progress
from smelt_interp.terminal.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_30_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("draws", 400)
    for second in range(0, 100, 10):
        clock[0] = float(second)
        shown.show(second)
    assert capsys.readouterr().err.splitlines() == [
        "draws: 30/400, 1.00/s, 06:10 left",
        "draws: 60/400, 1.00/s, 05:40 left",
        "draws: 90/400, 1.00/s, 05:10 left",
    ]


def test_a_terminal_has_one_line_rewritten_and_ended_by_the_last(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = Progress("draws", 4, unit="fits")
    clock[0] = 2.0
    shown.show(1)
    clock[0] = 2.01
    shown.show(2)
    shown.show(4)
    assert terminal.getvalue() == (
        "\rdraws: 1/4, 2.00s/fits, 00:06 left\x1b[K\rdraws: 4/4, 1.99fits/s, 00:00 left\x1b[K\n"
    )
