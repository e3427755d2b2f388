"""A planted sigmoid is recovered, excess is what was added to it, and win rates have their exact interval."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit
from scipy.stats import binomtest

from smelt_interp.errors import UserError
from smelt_interp.scaling.calibration import ScoredRuns, excess, fit, main, win_rate, wins
from smelt_interp.scaling.csv_columns import BASELINE
from tests.support.commands import Command

LOSSES = np.linspace(1.5, 2.6, 24)
EXCESS = 0.02


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def planted(loss: np.ndarray, direction: str = "falls") -> np.ndarray:
    sign = -1 if direction == "falls" else 1
    return 0.25 + 0.5 / (1 + np.exp(-sign * 4.0 * (loss - 2.0)))


def scored(seed: int, more: float = 0.0, noise: float = 0.003) -> np.ndarray:
    return planted(LOSSES) + more + noise * np.random.default_rng(seed).standard_normal(len(LOSSES))


@pytest.mark.parametrize("direction", ["falls", "rises"])
def test_a_planted_calibration_is_recovered(direction: str) -> None:
    found = fit(LOSSES, planted(LOSSES, direction), direction)
    values = [float(value) for value in (found.bottom, found.height, found.slope, found.midpoint)]
    assert values == pytest.approx([0.25, 0.5, 4.0, 2.0], rel=1e-4)
    np.testing.assert_allclose(found.score(LOSSES), planted(LOSSES, direction), atol=1e-7)


def test_a_noisy_calibration_is_scipys_least_squares() -> None:
    score_N = scored(1)
    found = fit(LOSSES, score_N, "falls")
    reference, _ = curve_fit(
        lambda loss, b, a, alpha, tau: b + a / (1 + np.exp(alpha * (loss - tau))),
        LOSSES,
        score_N,
        p0=[0.2, 0.6, 3, 2.1],
    )
    assert [float(value) for value in (found.bottom, found.height, found.slope, found.midpoint)] == pytest.approx(
        reference.tolist(), rel=1e-3
    )


@pytest.mark.parametrize(("direction", "sign"), [("falls", -1), ("rises", 1)])
def test_a_calibration_is_monotone_in_its_direction_whatever_the_data(direction: str, sign: int) -> None:
    score_N = np.random.default_rng(0).standard_normal(len(LOSSES))
    found = fit(LOSSES, score_N, direction)
    assert (sign * np.diff(found.score(np.linspace(0, 5, 200))) >= 0).all()


def test_excess_is_what_was_added_to_the_calibrated_scores() -> None:
    groups = np.where(np.arange(24) < 8, "small", "large")
    covered = 0
    for seed in range(20):
        reference = ScoredRuns(loss=LOSSES, score=scored(seed), group=groups)
        looped = ScoredRuns(loss=LOSSES, score=scored(seed + 100, EXCESS), group=groups)
        rows = excess(reference, looped, "falls", 200, np.random.default_rng(seed))
        assert [(row.group, row.runs) for row in rows] == [("small", 8), ("large", 16), ("pooled", 24)]
        assert rows[2].mean == pytest.approx(EXCESS, abs=0.004)
        covered += rows[2].low <= EXCESS <= rows[2].high
    assert covered >= 15


def test_the_reference_has_no_excess_over_itself() -> None:
    reference = ScoredRuns(loss=LOSSES, score=scored(0), group=np.full(24, "all"))
    pooled = excess(reference, reference, "falls", 50, np.random.default_rng(0))[-1]
    assert pooled.mean == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("won", "pairs"), [(0, 7), (7, 7), (83, 96), (96, 96), (29, 30), (1, 2)])
def test_the_interval_of_a_win_rate_is_the_exact_binomial_one(won: int, pairs: int) -> None:
    found = win_rate(won, pairs)
    exact = binomtest(won, pairs).proportion_ci(confidence_level=0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert found.rate == won / pairs


def test_a_tie_is_no_win_and_the_better_score_depends_on_the_direction() -> None:
    found = wins(np.ones(3), np.array([2.0, 1.0, 0.5]), "falls")
    assert (found.wins, found.pairs) == (1, 3)
    assert wins(np.ones(3), np.array([0.5, 0.4, 2.0]), "rises").wins == 2


@pytest.mark.parametrize(("won", "pairs"), [(3, 2), (-1, 2), (0, 0), (1, 10**12)])
def test_an_impossible_count_of_wins_is_refused(won: int, pairs: int) -> None:
    with pytest.raises(
        UserError, match=f"wins must be from 0 to the number of pairs, 1 to 1000000000; got {won} of {pairs}"
    ):
        win_rate(won, pairs)


def test_too_few_or_equal_runs_are_refused() -> None:
    with pytest.raises(UserError, match="at least 5 runs for four coefficients; got 4"):
        fit(LOSSES[:4], planted(LOSSES[:4]), "falls")
    with pytest.raises(UserError, match=r"the losses of a calibration must differ; got 2\.0 in every run"):
        fit(np.full(6, 2.0), planted(LOSSES[:6]), "falls")
    with pytest.raises(UserError, match=r"the scores of a calibration must differ; got 0\.5 in every run"):
        fit(LOSSES[:6], np.full(6, 0.5), "falls")
    with pytest.raises(UserError, match="a pair must have a run on both sides"):
        wins(np.array([]), np.array([]), "falls")


def table(path: Path) -> Path:
    rows = ["architecture,loss,score,group,pair"]
    for name, score_N in ((BASELINE, scored(0)), ("smelt", scored(1, EXCESS))):
        rows += [
            f"{name},{loss!r},{score!r},g{index // 12},p{index}"
            for index, (loss, score) in enumerate(zip(LOSSES.tolist(), score_N.tolist(), strict=True))
        ]
    path.write_text("\n".join(rows))
    return path


def test_the_command_reports_sigmoid_excess_and_wins(command: Command, tmp_path: Path) -> None:
    path = table(tmp_path / "scores.csv")
    report = command.json(main, "fit", path, "--draws", 100)
    assert report["calibration"]["alpha"] == pytest.approx(4.0, rel=0.2)
    assert [row["group"] for row in report["excess"]] == ["g0", "g1", "pooled"]
    assert report["excess"][2]["mean"] == pytest.approx(EXCESS, abs=0.004)
    assert (report["wins"][0]["wins"], report["wins"][0]["pairs"]) == (24, 24)
    without_one = path.with_name("fewer.csv")
    without_one.write_text(path.read_text().replace(",p7\n", ",alone\n", 1))
    assert command.json(main, "fit", without_one, "--draws", 10)["wins"][0]["pairs"] == 23
    assert command.json(main, "fit", path, "--draws", 100) == report
    assert "100 bootstrap draws over runs, seed 0" in command.text(main, "fit", path, "--draws", 100)
    assert command.json(main, "wins", 83, 96)["wins"][0]["rate"] == 83 / 96


def test_bad_input_ends_in_one_line(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("architecture,loss\nbaseline,2\n")
    assert "missing score" in command.refusal(main, "fit", path)
    path.write_text("architecture,loss,score\nsmelt,2,0.5\n")
    assert "must have runs of the architecture baseline; got smelt" in command.refusal(main, "fit", path)
    path.write_text("architecture,loss,score,pair\nbaseline,2,0.5,a\nbaseline,2.1,0.4,a\n")
    assert "one run of baseline a pair; got two of pair a" in command.refusal(main, "fit", path)
    path.write_text("architecture,loss,score\nbaseline,2,nan\n")
    assert "line 2: score must be a finite number within 1e100; got 'nan'" in command.refusal(main, "fit", path)
    assert "wins must be from 0" in command.refusal(main, "wins", 3, 2)
    assert "draws must be at least 1; got 0" in command.refusal(main, "fit", path, "--draws", 0)
    path.write_text("architecture,loss,score\n" + "".join(f"{name},{2 + run / 999},0.{run}\n"
                    for name in ("baseline", "smelt") for run in range(101)))  # fmt: skip
    assert "runs times draws must be at most 10000000; got 10100000" in command.refusal(
        main, "fit", path, "--draws", 100_000
    )
