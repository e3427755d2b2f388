"""`metrics.csv`: one row a look at the network, whose columns stay the same from the first row of a run to the last."""

import csv
import io
from pathlib import Path

from model.training.evaluate import Evaluation
from model.training.run_folder import ANEW
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input
from smelt_interp.terminal.output_files import write_whole

METRICS = "metrics.csv"
MOST_BYTES = 1_000_000_000


def row_of(numbers: dict[str, float], scores: Evaluation) -> dict[str, float]:
    """What a row holds: the numbers of the step, then what was measured, steps counted from 1."""
    return (
        numbers
        | {f"held_out_{domain}": loss for domain, loss in scores.loss_nats.items()}
        | {f"dyck_exact_{shots}": match for shots, match in scores.exact_match.items()}
        | {f"load_{step}": value for step, value in enumerate(scores.load, 1)}
        | {f"residual_variance_{step}": value for step, value in enumerate(scores.residual_variance, 1)}
    )


def append(path: Path, row: dict[str, float]) -> None:
    """Add a row; the first brings the names of the columns. An `OSError` names the file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row), lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writeheader()
    writer.writerow(row)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def keep_before(path: Path, step: int) -> None:
    """Drop rows that a run which goes on will write again, and a last one that was not written to its end.

    Raises `UserError` for a row without its step.
    """
    if not path.exists():
        return
    whole, _, _ = read_input(path, "the metrics of a run", MOST_BYTES).rpartition(b"\n")
    lines = whole.splitlines()
    kept = lines[:1]
    for number, line in enumerate(lines[1:], 2):
        found = line.split(b",", 1)[0]
        if not found.isdigit():
            raise UserError(
                f"{path} must begin with a step on line {number}; got {found.decode('ascii', 'replace')!r:.40}; {ANEW}"
            )
        if int(found[:12]) <= step:
            kept.append(line)
    write_whole(path, b"".join(line + b"\n" for line in kept))
