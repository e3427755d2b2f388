"""Campaigns for as long as wanted, in turns; each finding is printed with the words that bring it back.

python -m tests.campaigns --minutes 10
python -m tests.campaigns --only hooks --seed 3 --case 41
"""

import tempfile
import time
import traceback
import warnings
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import Field

from smelt_interp.errors import run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import Seed, validated
from tests.campaigns.campaigns import CAMPAIGNS, random_of


@validated
class Options:
    """Which cases are tried."""

    minutes: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    only: tuple[str, ...] = ()
    """Names of campaigns; none for all."""
    seed: Seed = 0
    case: Annotated[int, Field(ge=-1, le=10**9)] = -1
    """Try this case alone, and show where it fails; -1 for one after the other."""


def main() -> None:
    """Try cases until the time is over; exit 1 when there was a finding."""
    options = parse(Options, prog="python -m tests.campaigns", description="Damage at random, from a seed.")
    warnings.simplefilter("error")
    names = options.only or tuple(CAMPAIGNS)
    ends: dict[str, Counter[str]] = {name: Counter() for name in names}
    stop = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for name in names:
            (Path(folder) / name).mkdir()
            cases[name] = CAMPAIGNS[name](Path(folder) / name)
        for number in count() if options.case < 0 else (options.case,):
            for name in names:
                try:
                    ends[name][cases[name](random_of(options.seed, number))] += 1
                except Exception as error:  # whatever it is, it is a finding
                    ends[name]["FINDING"] += 1
                    print(
                        f"--only {name} --seed {options.seed} --case {number}: {type(error).__name__}: {error}",
                        flush=True,
                    )
                    if options.case >= 0:
                        traceback.print_exc()
            if time.monotonic() > stop:
                break
    rows = [[name, end, str(times)] for name in names for end, times in sorted(ends[name].items())]
    print_table(Table("What came of the damage", ["campaign", "end", "cases"], rows))
    if any("FINDING" in counted for counted in ends.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
