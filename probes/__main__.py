"""Every probe on a checkpoint, the networks beside it, and itself untrained, from captures that stay for the dashboard.

    python -m probes --ckpt checkpoints/demo-smelt --against checkpoints/demo-baseline

Each network is recorded once on each data set; a capture that is there already is used as it is, and an interrupted
one goes on. At the end the figures that the paper reports stand beside what was measured.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from probes import reproduction
from probes.running import catalog, command, report
from probes.running.contract import MOST_SAMPLES, check_number
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import run_command
from smelt_interp.terminal.command_line import parse

SHOTS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is recorded and measured."""

    ckpt: Path
    """Folder of the checkpoint."""
    against: tuple[Path, ...] = ()
    """Folders of checkpoints to measure beside it, such as its Baseline."""
    captures: Path = Path("captures")
    """Folder of the captures."""
    samples: int = 64
    """Rows of Dyck and of code."""
    episodes: int = 256
    """Dyck episodes at each number of shots, 0 1 2 4 8, for the in-context curve."""

    def __post_init__(self) -> None:
        check_number("samples", self.samples, 1, MOST_SAMPLES)
        check_number("episodes", self.episodes, 1, MOST_SAMPLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One set of samples, and what is recorded on them."""

    name: str
    data: DataOptions
    sites: tuple[str, ...]
    probes: tuple[str, ...]


def data_sets(options: Options, sites: tuple[str, ...]) -> tuple[DataSet, ...]:
    """Dyck and code with every site, and Dyck at several numbers of shots with the network's output alone."""
    by_site = tuple(name for name in catalog.NAMES if name != "dyck_icl")
    return (
        DataSet(name="dyck", data=DataOptions(data=("dyck",), samples=options.samples), sites=sites, probes=by_site),
        DataSet(name="code", data=DataOptions(data=("code",), samples=options.samples), sites=sites, probes=by_site),
        DataSet(
            name="shots",
            data=DataOptions(data=("dyck",), samples=options.episodes, shots=SHOTS),
            sites=(),
            probes=("dyck_icl",),
        ),
    )


def record_all(options: Options, data: DataSet) -> list[Path]:
    """The captures of one data set: the checkpoint's, those beside it, the untrained network's."""
    from cache.record import RecordOptions, record_checkpoint

    captures = []
    for ckpt, untrained in [(options.ckpt, False), *((ckpt, False) for ckpt in options.against), (options.ckpt, True)]:
        out = options.captures / f"{ckpt.resolve().name}{'-untrained' if untrained else ''}-{data.name}.h5"
        wanted = RecordOptions(ckpt=ckpt, out=out, data=data.data, sites=data.sites, untrained=untrained)
        record_checkpoint(wanted, " ".join(["python", "-m", "probes", *sys.argv[1:]]))
        captures.append(out)
    return captures


def main() -> None:
    """Record, then run each probe's own command on the captures, and set the paper's figures beside the answers."""
    options = parse(Options, prog="python -m probes", description=__doc__ or "")
    from cache.record import DEFAULT_SITES  # after the options are read: torch takes seconds to import

    results: dict[tuple[str, str], command.Measured] = {}
    for data in data_sets(options, DEFAULT_SITES):
        first, *others = (str(path) for path in record_all(options, data))
        for name in data.probes:
            (results[data.name, name],) = command.run(name, ["--capture", first, "--against", *others])
    report.print_tables([reproduction.table(results, options.ckpt.resolve().name)], reproduction.REMARKS)


if __name__ == "__main__":
    run_command(main)
