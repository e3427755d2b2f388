"""Planted scaling laws are found, intervals hold the truth, the frontier is a minimum, gains are at equal loss."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from smelt_interp.scaling.command import main, read_grids
from smelt_interp.scaling.fit import Grid, bootstrap, fit
from smelt_interp.scaling.law import (
    ScalingLaw,
    compute_gain,
    printed_law,
    rounding_corners,
    rounding_interval,
)
from tests.support.commands import Command

LAWS = {name: printed_law(name) for name in ("baseline", "smelt")}
HEADER = "architecture,flops_per_token,sparsity,tokens,loss"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "scaling_coverage.py"
    spec = importlib.util.spec_from_file_location("scaling_coverage", path)
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks its module up there
    sys.modules["scaling_coverage"] = module
    spec.loader.exec_module(module)
    return module


def grid(
    law: ScalingLaw, noise: float = 0.0, seed: int = 0, budgets: tuple[float, ...] = (6e8, 1e9, 4e9, 1e10)
) -> Grid:
    flops, sparsity, tokens = (
        axis.ravel() for axis in np.meshgrid(budgets, (0.85, 0.95, 0.97), np.geomspace(1e10, 2e11, 6), indexing="ij")
    )
    wobble = np.exp(noise * np.random.default_rng(seed).standard_normal(len(flops)))
    return Grid(
        flops_per_token=flops, sparsity=sparsity, tokens=tokens, loss=law.loss(flops, sparsity, tokens) * wobble
    )


def lines(grids: dict[str, Grid], domain: str = "") -> str:
    return "".join(
        f"{name},{flops!r},{sparsity!r},{tokens!r},{loss!r}{domain and ',' + domain}\n"
        for name, one in grids.items()
        for flops, sparsity, tokens, loss in zip(
            *(values.tolist() for values in (one.flops_per_token, one.sparsity, one.tokens, one.loss)), strict=True
        )
    )


@pytest.mark.parametrize("name", LAWS)
def test_exact_losses_give_the_planted_law_back(name: str) -> None:
    found = fit(grid(LAWS[name]))
    planted, fitted = LAWS[name].figures(), found.law.figures()
    assert {letter: fitted[letter] for letter in "Eabc"} == pytest.approx(
        {letter: planted[letter] for letter in "Eabc"}, rel=1e-3
    )
    assert fitted["A"] == pytest.approx(planted["A"], rel=0.02)
    assert fitted["K"] == pytest.approx(planted["K"], rel=0.02)
    assert found.rmse_nats < 1e-5


def test_a_point_that_is_plainly_wrong_does_not_move_the_law() -> None:
    clean = grid(LAWS["baseline"])
    spoilt = replace(clean, loss=np.where(np.arange(72) == 17, 3.0, clean.loss))
    assert fit(spoilt).law.gamma == pytest.approx(LAWS["baseline"].gamma, rel=5e-3)


def test_bootstrap_draws_end_where_the_optimiser_of_the_full_fit_ends() -> None:
    noisy = grid(LAWS["baseline"], noise=0.003)
    found = fit(noisy)
    generator = np.random.default_rng(0)
    drawn = bootstrap(noisy, found, 3, generator, lambda _: None)
    counts = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=3)
    for index in range(3):
        chosen = np.repeat(np.arange(72), counts[index][noisy.cell_N])
        resampled = Grid(
            **{name: getattr(noisy, name)[chosen] for name in ("flops_per_token", "sparsity", "tokens", "loss")}
        )
        assert drawn.gamma[index] == pytest.approx(fit(resampled).law.gamma, rel=2e-3)


def test_a_cell_is_all_horizons_of_one_budget_and_sparsity() -> None:
    one = grid(LAWS["baseline"])
    for cell in range(12):
        members = one.cell_N == cell
        assert members.sum() == 6
        assert len(np.unique(one.flops_per_token[members])) == len(np.unique(one.sparsity[members])) == 1


def test_the_intervals_of_planted_grids_hold_the_truth(coverage: ModuleType) -> None:
    held = [coverage.covered(seed, draws=80) for seed in range(100, 105)]
    for name in ("gamma baseline", "gamma smelt", "gain at 1e21, 95% sparse"):
        assert sum(row[name] for row in held) >= 4, name


def test_draws_are_as_many_as_asked_and_counted_as_they_are_done() -> None:
    noisy = grid(LAWS["smelt"], noise=0.003)
    found = fit(noisy)
    done: list[int] = []
    drawn = bootstrap(noisy, found, 600, np.random.default_rng(0), done.append)
    assert len(drawn.gamma) == done[-1] == 600
    assert done == sorted(done)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("compute", [1e20, 1e22])
def test_the_frontier_is_the_minimum_that_a_plain_search_finds(name: str, compute: float) -> None:
    law, sparsity = LAWS[name], 0.95
    found = minimize_scalar(
        lambda log_flops: law.loss(np.exp(log_flops), sparsity, compute / np.exp(log_flops)),
        bounds=(np.log(1e7), np.log(1e13)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert law.best_loss(compute, sparsity) == pytest.approx(found.fun, rel=1e-12)
    assert law.best_flops_per_token(compute, sparsity) == pytest.approx(np.exp(found.x), rel=1e-4)
    assert law.best_flops_per_token(compute, sparsity) * law.best_tokens(compute, sparsity) == pytest.approx(compute)


@pytest.mark.parametrize("name", LAWS)
def test_loss_above_the_floor_falls_as_compute_to_the_gamma(name: str) -> None:
    law = LAWS[name]
    above = [law.best_loss(compute, 0.9) - law.floor for compute in (1e20, 1e24)]
    assert np.log(above[0] / above[1]) / np.log(1e4) == pytest.approx(law.gamma)
    assert law.compute_for(law.best_loss(3e21, 0.9), 0.9) == pytest.approx(3e21)


@pytest.mark.parametrize(("compute", "sparsity"), [(1e20, 0.85), (1e21, 0.95), (1e22, 0.97)])
def test_a_gain_is_the_compute_saved_at_equal_loss(compute: float, sparsity: float) -> None:
    gain = compute_gain(LAWS["baseline"], LAWS["smelt"], compute, sparsity)
    assert LAWS["smelt"].best_loss(compute * (1 - gain), sparsity) == pytest.approx(
        LAWS["baseline"].best_loss(compute, sparsity)
    )
    assert compute_gain(LAWS["smelt"], LAWS["smelt"], compute, sparsity) == pytest.approx(0)


def test_a_loss_below_the_floor_is_never_reached() -> None:
    hopeless = LAWS["smelt"]._replace(floor=3.0)
    assert compute_gain(LAWS["baseline"], hopeless, 1e21, 0.95) == -np.inf


def test_every_printed_gain_lies_in_the_interval_of_the_rounding() -> None:
    table = ("scaling_law", "ce_gain", "rows")
    for index in range(printed.length(*table)):
        compute = printed.number(*table, index, "compute")
        for level in ("0.85", "0.95", "0.97"):
            low, high = rounding_interval(compute, float(level))
            assert low < compute_gain(LAWS["baseline"], LAWS["smelt"], compute, float(level)) < high
            assert low <= printed.numbers(*table, index, level)[0] <= high


def test_no_coefficients_inside_the_rounding_box_leave_the_interval_of_its_corners() -> None:
    generator = np.random.default_rng(0)
    low, high = rounding_interval(1e21, 0.95)
    for _ in range(200):
        laws = [
            ScalingLaw(*(generator.uniform(values.min(), values.max()) for values in rounding_corners(name)))
            for name in ("baseline", "smelt")
        ]
        assert low <= compute_gain(laws[0], laws[1], 1e21, 0.95) <= high


def test_the_command_fits_two_domains_and_gives_gains_with_intervals(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    noisy = {name: grid(law, noise=0.003, seed=index) for index, (name, law) in enumerate(LAWS.items())}
    better = {name: replace(one, loss=one.loss * 0.9) for name, one in noisy.items()}
    path.write_text(f"{HEADER},domain\n" + lines(noisy, "web") + lines(better, "code"))
    report = command.json(main, "fit", path, "--draws", 50, "--compute", 1e21, "--sparsity", 0.95)
    assert (report["seed"], report["draws"]) == (0, 50)
    assert {(row["domain"], row["architecture"]) for row in report["fits"]} == {
        (domain, name) for domain in ("web", "code") for name in LAWS
    }
    assert [row["domain"] for row in report["gains"]] == ["web", "code"]
    for row in report["gains"]:
        assert row["gain"]["low"] <= row["gain"]["value"] <= row["gain"]["high"]
        assert row["gain"]["value"] == pytest.approx(0.152, abs=0.08)
    web = report["fits"][0]
    assert (web["points"], web["cells"]) == (72, 12)
    assert web["coefficients"]["gamma"]["value"] == pytest.approx(fit(noisy["baseline"]).law.gamma)
    assert web["rmse_nats"] == pytest.approx(0.006, abs=0.002)
    assert report["frontier"][0]["tokens_per_parameter"]["value"] == pytest.approx(78, rel=0.2)


def test_the_same_seed_gives_the_same_intervals(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n" + lines({"mine": grid(LAWS["smelt"], noise=0.003)}))
    first, again, other = (
        command.json(main, "fit", path, "--draws", 20, "--compute", 1e21, "--seed", seed) for seed in (7, 7, 8)
    )
    assert first == again
    assert first["fits"] != other["fits"]
    assert first["gains"] == []
    text = command.text(main, "fit", path, "--draws", 20, "--seed", 7)
    assert "20 bootstrap draws over grid cells, seed 7" in text
    assert "no gains: they are measured against an architecture named baseline" in text


def test_a_gain_that_is_never_reached_is_null_and_says_never(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    hopeless = LAWS["smelt"]._replace(floor=2.5)
    path.write_text(f"{HEADER}\n" + lines({"baseline": grid(LAWS["baseline"]), "smelt": grid(hopeless)}))
    asked = ("--draws", 5, "--compute", 1e21, "--sparsity", 0.95)
    assert command.json(main, "fit", path, *asked)["gains"][0]["gain"] == {"value": None, "low": None, "high": None}
    assert "never [never, never]" in command.text(main, "fit", path, *asked)


def test_the_printed_law_can_be_asked_anywhere(command: Command) -> None:
    report = command.json(main, "printed", "--compute", 3e20, "--sparsity", 0.9)
    (gain,) = report["gains"]
    assert gain["gain"]["value"] == compute_gain(LAWS["baseline"], LAWS["smelt"], 3e20, 0.9)
    assert report["fits"][0]["coefficients"]["gamma"] == LAWS["baseline"].gamma
    assert "rounding to the printed ones" in command.text(main, "printed")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: {"sparsity": np.full(72, 0.95)}, "at least 2 different sparsity levels to fit the law; got 1"),
        (lambda one: {"flops_per_token": np.full(72, 1e9)}, "at least 2 different FLOPs a token to fit the law; got 1"),
        (lambda one: {"loss": np.full(72, 2.0)}, "losses that differ; got 2.0 in every run"),
        (lambda one: {"tokens": np.full(72, 1e10)}, "at least 3 different token horizons to fit the law; got 1"),
    ],
)
def test_a_grid_that_cannot_tell_the_coefficients_is_refused(tmp_path: Path, change, says: str) -> None:
    one = grid(LAWS["baseline"])
    flat = replace(one, **change(one))
    with pytest.raises(UserError, match=says):
        fit(flat)
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n" + lines({"baseline": flat}))
    with pytest.raises(UserError, match=f"runs.csv: architecture baseline, domain all must have {says}"):
        read_grids(path)


def test_six_points_are_too_few_for_six_coefficients(command: Command, tmp_path: Path) -> None:
    one = grid(LAWS["baseline"])
    chosen = [0, 1, 2, 18, 24, 60]
    few = Grid(**{name: getattr(one, name)[chosen] for name in ("flops_per_token", "sparsity", "tokens", "loss")})
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n" + lines({"baseline": few}))
    assert "at least 7 points for six coefficients; got 6" in command.refusal(main, "fit", path)


def test_a_file_of_more_points_than_runs_is_refused() -> None:
    one = grid(LAWS["baseline"])
    names = ("flops_per_token", "sparsity", "tokens", "loss")
    with pytest.raises(UserError, match="at most 10000 points, one a run; got 10008"):
        Grid(**{name: np.tile(getattr(one, name), 139) for name in names}).check("a grid")


def test_a_printed_gain_that_is_never_reached_is_null_and_says_never(command: Command) -> None:
    for row in command.json(main, "printed", "--compute", 1e30)["gains"]:
        assert row["gain"]["value"] is None
    assert "never [never, " in command.text(main, "printed", "--compute", 1e30)


def test_bad_files_and_options_end_in_one_line(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("architecture,flops_per_token,sparsity,tokens\n")
    assert "missing loss" in command.refusal(main, "fit", path)
    path.write_text(f"{HEADER}\nbaseline,1e-300,0.9,1e10,2\n")
    assert "line 2: flops_per_token must be a number from 1 to 1e40; got '1e-300'" in command.refusal(main, "fit", path)
    path.write_text(f"{HEADER}\nbaseline,1e9,0.9,1e10,-2\n")
    assert "line 2: loss must be a number from 1e-6 to 1e6; got '-2'" in command.refusal(main, "fit", path)
    assert "draws must be at least 1; got 0" in command.refusal(main, "fit", path, "--draws", 0)
    assert "seed must be at least 0; got -1" in command.refusal(main, "fit", path, "--seed", -1)
    assert "compute.0 must be above 0; got 0.0" in command.refusal(main, "printed", "--compute", 0)
    assert "sparsity.0 must be below 1; got 1.0" in command.refusal(main, "printed", "--sparsity", 1)
