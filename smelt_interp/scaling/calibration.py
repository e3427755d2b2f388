"""From loss to score: a monotone sigmoid fitted to one architecture, and what another scores beyond it.

    y(l) = b + a / (1 + exp(-d alpha (l - tau))),   a > 0, alpha > 0                     (arXiv:2609.01343)

l is a loss in nats a token, d = -1 where scores fall with loss and +1 where they rise. An excess residual is y - y(l):
what a run scores beyond what its loss predicts. The fit is least squares; intervals are percentiles over bootstrap
draws of the runs on both sides, the sigmoid refitted in each. A win is a pair in which the looped run is the better.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from smelt_interp.errors import UserError, run_command
from smelt_interp.scaling.csv_columns import ANY, BASELINE, LOSS, read_columns
from smelt_interp.scaling.robust_fit import Draws, cell_weights, interval, minimise
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, print_json, print_table
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from pandas import DataFrame

Floats = NDArray[np.float64]
Direction = Literal["falls", "rises"]

MIN_RUNS = 5
"""One more than the sigmoid has coefficients."""

MOST_PAIRS = 10**9
MOST_DRAWN_RUNS = 10_000_000
"""Runs of one architecture times draws: every draw of every run is held at once."""

# b, log a, log alpha, tau of standardised loss and score
LOWER_BOUNDS = np.array([-30.0, -3.0, -3.0, -10.0])
UPPER_BOUNDS = np.array([30.0, 3.5, 4.0, 10.0])
START_SLOPES = (0.5, 1.0, 2.0, 5.0)
START_MIDPOINTS = (-1.5, -0.5, 0.0, 0.5, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One sigmoid from loss to score, or as many as its arrays are long."""

    bottom: Floats
    """b, the lower asymptote."""
    height: Floats
    """a, above 0."""
    slope: Floats
    """alpha, per nat, above 0."""
    midpoint: Floats
    """tau, nats."""
    direction: Direction
    """Whether the score falls or rises with loss."""

    def score(self, loss: Floats) -> Floats:
        """The score that a loss predicts."""
        exponent = _sign(self.direction) * self.slope * (loss - self.midpoint)
        predicted: Floats = self.bottom + self.height * _logistic(exponent)
        return predicted


def _sign(direction: Direction) -> float:
    return -1.0 if direction == "falls" else 1.0


def _logistic(value: Floats) -> Floats:
    # tanh saturates where exp would overflow
    result: Floats = 0.5 * (1 + np.tanh(0.5 * value))
    return result


class _Sigmoid:
    """The standardised sigmoid at fixed losses."""

    def __init__(self, loss_N: Floats, direction: Direction) -> None:
        self.loss_N = loss_N
        self.sign = _sign(direction)

    def __call__(self, parameters_XP: Floats) -> tuple[Floats, Floats]:
        bottom, log_height, log_slope, midpoint = parameters_XP.T[..., None]
        height, slope = np.exp(log_height), np.exp(log_slope)
        distance_XN = self.loss_N - midpoint
        rise_XN = _logistic(self.sign * slope * distance_XN)
        by_exponent_XN = height * rise_XN * (1 - rise_XN) * self.sign * slope
        slopes = [np.ones_like(rise_XN), height * rise_XN, by_exponent_XN * distance_XN, -by_exponent_XN]
        return bottom + height * rise_XN, np.stack(slopes, axis=-1)


def fit(loss_N: Floats, score_N: Floats, direction: Direction, weights_XN: Floats | None = None) -> Calibration:
    """The least-squares sigmoid of runs, or one for each row of bootstrap weights.

    Raises `UserError` for fewer than five runs or losses or scores that are all the same.
    """
    if len(loss_N) < MIN_RUNS:
        raise UserError(f"a calibration must have at least {MIN_RUNS} runs for four coefficients; got {len(loss_N)}")
    for name, values in (("losses", loss_N), ("scores", score_N)):
        if np.ptp(values) == 0:
            raise UserError(f"the {name} of a calibration must differ; got {values[0]} in every run")
    # In standardised coordinates the bounds and the starts fit any data.
    loss_centre, loss_scale = loss_N.mean(), loss_N.std()
    score_centre, score_scale = score_N.mean(), score_N.std()
    curve = _Sigmoid((loss_N - loss_centre) / loss_scale, direction)
    target_N = (score_N - score_centre) / score_scale
    bounds = (LOWER_BOUNDS, UPPER_BOUNDS)
    starts_XP = np.array(
        [[-1.0, np.log(2.0), np.log(slope), midpoint] for slope in START_SLOPES for midpoint in START_MIDPOINTS]
    )
    whole = minimise(curve, target_N, np.ones((len(starts_XP), len(loss_N))), starts_XP, bounds, np.inf)
    best_P = whole.parameters_XP[whole.loss_X.argmin()]
    if weights_XN is None:
        found = best_P
    else:
        origins_XP = np.repeat(best_P[None], len(weights_XN), axis=0)
        found = minimise(curve, target_N, weights_XN, origins_XP, bounds, np.inf).parameters_XP
    bottom, log_height, log_slope, midpoint = np.moveaxis(found, -1, 0)
    return Calibration(
        bottom=score_centre + score_scale * bottom,
        height=score_scale * np.exp(log_height),
        slope=np.exp(log_slope) / loss_scale,
        midpoint=loss_centre + loss_scale * midpoint,
        direction=direction,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRuns:
    """Runs of one architecture, arrays of shape (N,)."""

    loss: Floats
    score: Floats
    group: NDArray[np.str_]
    """What residuals are averaged within, e.g. the scale."""


POOLED = "pooled"
"""The group of all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Mean excess residual of one group."""

    group: str
    runs: int
    mean: float
    low: float
    high: float


def excess(
    reference: ScoredRuns, looped: ScoredRuns, direction: Direction, draws: int, generator: np.random.Generator
) -> list[Excess]:
    """Mean excess residual of the looped runs over the sigmoid of the reference, by group and pooled."""
    if (drawn_runs := draws * max(len(reference.loss), len(looped.loss))) > MOST_DRAWN_RUNS:
        raise UserError(f"runs times draws must be at most {MOST_DRAWN_RUNS}; got {drawn_runs}: take fewer draws")
    residual_N = looped.score - fit(reference.loss, reference.score, direction).score(looped.loss)
    reference_weights_XN = cell_weights(np.arange(len(reference.loss)), draws, generator)
    drawn = fit(reference.loss, reference.score, direction, reference_weights_XN)
    column = Calibration(
        bottom=drawn.bottom[:, None],
        height=drawn.height[:, None],
        slope=drawn.slope[:, None],
        midpoint=drawn.midpoint[:, None],
        direction=direction,
    )
    residuals_XN = looped.score - column.score(looped.loss[None])
    found = []
    for group in dict.fromkeys((*looped.group.tolist(), POOLED)):
        chosen = np.flatnonzero((looped.group == group) | (group == POOLED))
        weights_XN = cell_weights(np.arange(len(chosen)), draws, generator)
        low, high = interval((weights_XN * residuals_XN[:, chosen]).sum(axis=1) / len(chosen))
        mean = float(residual_N[chosen].mean())
        found.append(Excess(group=group, runs=len(chosen), mean=mean, low=float(low), high=float(high)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Wins:
    """How many pairs one side wins, with the exact (Clopper and Pearson) 95% interval of its win rate."""

    wins: int
    pairs: int
    rate: float
    low: float
    high: float


def win_rate(wins: int, pairs: int) -> Wins:
    """Win rate with its exact binomial interval. Raises `UserError` unless 0 <= wins <= pairs and pairs >= 1."""
    from scipy.stats import binomtest  # more than a second to import, needed here only

    if not (1 <= pairs <= MOST_PAIRS and 0 <= wins <= pairs):
        raise UserError(f"wins must be from 0 to the number of pairs, 1 to {MOST_PAIRS}; got {wins} of {pairs}")
    low, high = binomtest(wins, pairs).proportion_ci(confidence_level=0.95, method="exact")
    return Wins(wins=wins, pairs=pairs, rate=wins / pairs, low=float(low), high=float(high))


def wins(reference_N: Floats, looped_N: Floats, direction: Direction) -> Wins:
    """Pairs of scores that the looped run wins; a tie is not a win. Raises `UserError` where there is no pair.

    A score that falls with loss is better when higher.
    """
    if len(reference_N) == 0:
        raise UserError("a pair must have a run on both sides; got no pair name that both architectures have")
    better = -_sign(direction)
    return win_rate(int((better * (looped_N - reference_N) > 0).sum()), len(reference_N))


@validated
class SigmoidOptions:
    """Fit the Baseline's sigmoid and show what the other architectures score beyond it."""

    scores: tyro.conf.Positional[Path]
    """CSV: architecture, loss (nats), score; optionally group (residuals are averaged within) and pair (a name shared
    by the two runs of a pair). The sigmoid is fitted to the architecture named baseline."""
    direction: Direction = "falls"
    """Whether the score falls or rises with loss."""
    draws: Draws = 2000
    """Bootstrap draws."""
    seed: Seed = 0
    json: bool = False
    """Print JSON."""


@validated
class WinsOptions:
    """The exact interval of a win rate."""

    wins: tyro.conf.Positional[int]
    pairs: tyro.conf.Positional[int]
    json: bool = False
    """Print JSON."""


def _sides(path: Path, scores: "DataFrame") -> dict[str, ScoredRuns]:
    if BASELINE not in set(scores["architecture"]):
        found = ", ".join(scores["architecture"].unique())
        raise UserError(f"{path} must have runs of the architecture {BASELINE}; got {found}")
    return {
        name: ScoredRuns(
            loss=side["loss"].to_numpy(),
            score=side["score"].to_numpy(),
            group=side["group"].to_numpy(str) if "group" in side else np.full(len(side), POOLED),
        )
        for name, side in scores.groupby("architecture", sort=False)
    }


def _paired_wins(path: Path, scores: "DataFrame", direction: Direction) -> dict[str, Wins]:
    """Wins by architecture over the Baseline, runs joined by the name of their pair; empty without a pair column."""
    if "pair" not in scores:
        return {}
    if (twice := scores.duplicated(["architecture", "pair"])).any():
        architecture, pair = scores.loc[twice.idxmax(), ["architecture", "pair"]]
        raise UserError(f"{path} must have one run of {architecture} a pair; got two of pair {pair}")
    joined = scores.pivot(index="pair", columns="architecture", values="score")
    both = {name: joined[[BASELINE, name]].dropna() for name in scores["architecture"].unique() if name != BASELINE}
    return {name: wins(pairs[BASELINE].to_numpy(), pairs[name].to_numpy(), direction) for name, pairs in both.items()}


def fit_report(path: Path, options: SigmoidOptions) -> dict[str, object]:
    """Everything that the command prints about a file, as plain values."""
    scores = read_columns(path, ("architecture",), {"loss": LOSS, "score": ANY}, ("group", "pair"))
    sides, won = _sides(path, scores), _paired_wins(path, scores, options.direction)
    generator = np.random.default_rng(options.seed)
    reference = sides[BASELINE]
    sigmoid = fit(reference.loss, reference.score, options.direction)
    residual_N = reference.score - sigmoid.score(reference.loss)
    return {
        "seed": options.seed,
        "draws": options.draws,
        "calibration": {
            "b": float(sigmoid.bottom),
            "a": float(sigmoid.height),
            "alpha": float(sigmoid.slope),
            "tau": float(sigmoid.midpoint),
            "direction": options.direction,
            "runs": len(reference.loss),
            "rmse": float(np.sqrt(np.mean(residual_N**2))),
        },
        "excess": [
            {"architecture": name} | asdict(row)
            for name, side in sides.items()
            if name != BASELINE
            for row in excess(reference, side, options.direction, options.draws, generator)
        ],
        "wins": [{"architecture": name} | asdict(found) for name, found in won.items()],
    }


def _chosen(
    options: tyro.conf.OmitSubcommandPrefixes[
        Annotated[SigmoidOptions, tyro.conf.subcommand("fit")] | Annotated[WinsOptions, tyro.conf.subcommand("wins")]
    ],
) -> SigmoidOptions | WinsOptions:
    return options


def main() -> None:
    """Fit a file of scores, or give the interval of a win rate."""
    options = parse(_chosen, prog="python -m smelt_interp.scaling.calibration", description=__doc__)
    if isinstance(options, WinsOptions):
        report: dict[str, object] = {"wins": [asdict(win_rate(options.wins, options.pairs))]}
    else:
        report = fit_report(options.scores, options)
    if options.json:
        print_json(report)
        return
    for title, rows in (
        ("Sigmoid", [report["calibration"]] if "calibration" in report else []),
        ("Mean score beyond what the loss predicts", report.get("excess", [])),
        ("Win rates", report["wins"]),
    ):
        assert isinstance(rows, list)
        if rows:
            print_table(Table(title, list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))
    if "seed" in report:
        print(f"low and high: 95% interval, {report['draws']} bootstrap draws over runs, seed {report['seed']}")


def _cell(value: object) -> Cell:
    assert isinstance(value, (str, int, float))
    return value


if __name__ == "__main__":
    run_command(main)
