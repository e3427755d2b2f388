"""How much one more visit of the same layers is worth: the exponent of the dense dilemma, fitted to runs.

    python -m smelt_interp.scaling.repeat runs.csv

    L = E + A / (once + r^phi repeated)^a + K / D^c

`once` and `repeated` are the parameters outside and inside the loop, r the visits, D training tokens. With phi 0 a
visit more is worth nothing, with 1 as much as new layers; the paper reports 0.46 (arXiv:2609.01343). Fitted as the
scaling law is: Huber loss of the log loss; 95% intervals are percentiles over bootstrap draws of cells, a cell being
all horizons of one network. Of 24 planted laws (0.46, noise of a thousandth on 48 runs) they hold 20.
"""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from numpy.typing import NDArray

from smelt_interp.errors import UserError, run_command
from smelt_interp.scaling.csv_columns import LARGE, LOSS, Rule, read_columns
from smelt_interp.scaling.fit import HUBER_DELTA
from smelt_interp.scaling.robust_fit import Draws, cell_weights, interval, minimise
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_json, print_table
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from pandas import DataFrame

Floats = NDArray[np.float64]

NAMES = ("E", "A", "K", "a", "c", "phi")
VISITS = Rule("be a number from 1 to 1000", lambda values: (values >= 1) & (values <= 1000))
COLUMNS = {"once": LARGE, "repeated": LARGE, "visits": VISITS, "tokens": LARGE, "loss": LOSS}
# log E, log of the other two terms at the runs' centre (nats), a, c, phi
LOWER = np.array([-10.0, -30.0, -30.0, 0.01, 0.01, -1.0])
UPPER = np.array([10.0, 10.0, 10.0, 3.0, 3.0, 3.0])
LEAST = {"visits": 2, "tokens": 3, "once": 2}
"""Different values that six coefficients need."""


class RepeatCurve:
    """The log of the law at the runs; lengths and sizes are measured from their geometric means."""

    def __init__(self, runs: "DataFrame") -> None:
        self.once_N, self.repeated_N, self.visits_N = (runs[name].to_numpy() for name in ("once", "repeated", "visits"))
        size_N, tokens_N = np.log(self.once_N + self.repeated_N), np.log(runs["tokens"].to_numpy())
        self.size_centre, self.token_centre = float(size_N.mean()), float(tokens_N.mean())
        self.tokens_N = tokens_N - self.token_centre

    def __call__(self, parameters_XP: Floats) -> tuple[Floats, Floats]:
        floor, size_scale, token_scale, a, c, phi = parameters_XP.T[..., None]
        worth_XN = self.visits_N**phi * self.repeated_N
        whole_XN = self.once_N + worth_XN
        size_XN = np.log(whole_XN) - self.size_centre
        terms = (np.exp(floor) + np.zeros_like(size_XN), np.exp(size_scale - a * size_XN),
                 np.exp(token_scale - c * self.tokens_N))  # fmt: skip
        by_phi_XN = -a * terms[1] * worth_XN / whole_XN * np.log(self.visits_N)
        slopes = [*terms, -size_XN * terms[1], -self.tokens_N * terms[2], by_phi_XN]
        loss_XN = sum(terms)
        return np.log(loss_XN), np.stack(slopes, axis=-1) / np.asarray(loss_XN)[..., None]

    def coefficients(self, parameters_XP: Floats) -> Floats:
        """By NAMES, in the coordinates of the law: (X, 6)."""
        floor, size_scale, token_scale, a, c, phi = parameters_XP.T
        scales = np.exp(size_scale + a * self.size_centre), np.exp(token_scale + c * self.token_centre)
        return np.stack([np.exp(floor), *scales, a, c, phi], axis=-1)


def fit(runs: "DataFrame", draws: int, seed: int) -> tuple[Floats, Floats]:
    """Coefficients by NAMES (6,), and those of each draw (draws, 6). Raises `UserError` for runs that cannot tell."""
    for name, least in LEAST.items():
        if (found := runs[name].nunique()) < least:
            raise UserError(f"runs must have at least {least} different {name} to tell the exponent; got {found}")
    curve = RepeatCurve(runs)
    target_N = np.log(runs["loss"].to_numpy())
    middle = float(target_N.mean())
    starts_XP = np.array([
        [middle + np.log(share), middle + np.log((1 - share) / 2), middle + np.log((1 - share) / 2), a, c, phi]
        for share, a, c, phi in itertools.product((0.3, 0.6, 0.9), (0.2, 0.5), (0.2, 0.5), (0.2, 0.8))
    ])  # fmt: skip
    ones_XN = np.ones((len(starts_XP), len(target_N)))
    reached = minimise(curve, target_N, ones_XN, starts_XP, (LOWER, UPPER), HUBER_DELTA)
    best_P = reached.parameters_XP[reached.loss_X.argmin()]
    # Each draw from the best minimum of all.
    cell_N = runs.groupby(["once", "repeated", "visits"]).ngroup().to_numpy()
    weights_XN = cell_weights(cell_N, draws, np.random.default_rng(seed))
    origins_XP = np.repeat(best_P[None], draws, axis=0)
    drawn = minimise(curve, target_N, weights_XN, origins_XP, (LOWER, UPPER), HUBER_DELTA)
    return curve.coefficients(best_P[None])[0], curve.coefficients(drawn.parameters_XP)


@validated
class RepeatOptions:
    """Fit what a visit is worth."""

    runs: tyro.conf.Positional[Path]
    """CSV: once, repeated (parameters outside and inside the loop), visits, tokens, loss (nats)."""
    draws: Draws = 500
    """Bootstrap draws."""
    seed: Seed = 0
    """Of the bootstrap."""
    json: bool = False
    """Print JSON."""


def main() -> None:
    """Print the coefficients with their intervals."""
    options = parse(RepeatOptions, prog="python -m smelt_interp.scaling.repeat", description=__doc__ or "")
    found, drawn = fit(read_columns(options.runs, (), COLUMNS, ()), options.draws, options.seed)
    ends = np.stack([found, *interval(drawn)], axis=-1).tolist()
    if options.json:
        print_json(
            {
                name: dict(zip(("value", "low", "high"), each, strict=True))
                for name, each in zip(NAMES, ends, strict=True)
            }
        )
    else:
        rows = [[name, *each] for name, each in zip(NAMES, ends, strict=True)]
        print_table(Table("What a visit is worth", ["", "value", "low", "high"], rows))


if __name__ == "__main__":
    run_command(main)
