"""Runs that are allowed and absurd give finite numbers, dashes, or one line; never a warning or JSON that is none."""

import random
from pathlib import Path

import pytest

from smelt_interp.scaling import calibration, command
from tests.support.commands import Main, run_to_the_end, valid_json


def power(choice: random.Random, low: float, high: float) -> float:
    return 10 ** choice.uniform(low, high)


def grid(choice: random.Random) -> str:
    rows = ["architecture,flops_per_token,sparsity,tokens,loss"]
    flops_range = choice.choice([(0, 40), (8, 12), (30, 40), (0, 1)])
    for architecture in ("baseline", "smelt"):
        for flops in [power(choice, *flops_range) for _ in range(choice.choice([2, 3]))]:
            for sparsity in (0, choice.choice([0.5, 0.999999999999])):
                for _ in range(3):
                    tokens = power(choice, *choice.choice([(0, 40), (9, 12)]))
                    loss = choice.choice([choice.uniform(1, 3), power(choice, -6, 6)])
                    rows.append(f"{architecture},{flops!r},{sparsity},{tokens!r},{loss!r}")
    return "\n".join(rows)


def scores(choice: random.Random) -> str:
    rows = ["architecture,loss,score,pair"]
    for architecture in ("baseline", "smelt"):
        for pair in range(8):
            score = choice.choice([-1, 1]) * power(choice, -300, 100)
            rows.append(f"{architecture},{power(choice, -6, 6)!r},{score!r},{pair}")
    return "\n".join(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("main", "text"), [(command.main, grid), (calibration.main, scores)])
def test_absurd_runs_end_in_json_or_in_one_line(
    main: Main, text, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text(random.Random(seed)))
    monkeypatch.setattr("sys.argv", ["command", "fit", str(path), "--draws", "5", "--json"])
    code = run_to_the_end(main)
    printed = capsys.readouterr()
    if code == 0:
        valid_json(printed.out)
    else:
        assert (code, printed.out, printed.err.count("\n")) == (2, "", 1)
