"""The folder of a run: locked while it trains, and what it is in `run.json`, against which going on is compared."""

import errno
import fcntl
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import numpy as np
import torch

from model.training.options import TrainOptions
from model.training.state import states
from smelt_interp.config import ModelConfig
from smelt_interp.data.mixture import TrainingMixture
from smelt_interp.errors import UserError, shown
from smelt_interp.input_files import read_input
from smelt_interp.terminal.output_files import write_whole

RUN, LOCK, CHECKPOINT = "run.json", ".lock", "checkpoint"
MOST_BYTES = 10_000_000
ANEW = "remove the run to start anew, or choose another --out"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone; the lock is the system's, so a process that is killed holds it no longer.

    Raises `UserError` when another process trains there.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"a run must be trained by one process at a time; another trains in {folder}: wait, or choose "
                "another --out"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            raise UserError(
                f"the folder of a run must be on a disk that can lock files; got {folder}: choose another --out"
            ) from None
        yield


def write_or_compare(options: TrainOptions, config: ModelConfig, mixture: TrainingMixture) -> None:
    """Say in `run.json` what the run is, or compare it with what is there.

    Raises `UserError` that names the first key which differs: an option, a field of the config, a text that changed.
    """
    path = options.out / RUN
    parts = {
        "options": options.deciding(),
        "config": config.to_json(),
        "corpora": {corpus.domain: asdict(corpus) for corpus in mixture.corpora},
    }
    if not path.exists():
        if states(options.out):
            raise UserError(f"{path} must say what the run is whose states are there; it is missing; {ANEW}")
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        run = {"command": options.command(), **parts, "versions": versions}
        write_whole(path, (json.dumps(run, indent=1) + "\n").encode())
        return
    before = read_run(path)
    if isinstance(said := before.get("config"), dict):
        # A field that is younger than the run was its default then.
        before["config"] = {each.name: each.default for each in fields(config) if each.default is not MISSING} | said
    for part, values in parts.items():
        _compare(path, part, before.get(part), json.loads(json.dumps(values)))


def check_same(options: TrainOptions) -> None:
    """Compare the options of a run that is there with those that are asked for. Raises as `write_or_compare`."""
    path = options.out / RUN
    _compare(path, "options", read_run(path).get("options"), json.loads(json.dumps(options.deciding())))


def read_run(path: Path) -> dict[str, object]:
    """What a `run.json` says. Raises `UserError` when it is no JSON object."""
    try:
        run = json.loads(read_input(path, "the record of a run", MOST_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} must hold JSON; {error}; {ANEW}") from None
    if not isinstance(run, dict):
        raise UserError(f"{path} must hold one JSON object; got {type(run).__name__}; {ANEW}")
    return run


def _compare(path: Path, part: str, before: object, now: dict[str, object]) -> None:
    if not isinstance(before, dict):
        raise UserError(f"{path} must say the {part} of the run; got {shown(before)}; {ANEW}")
    for key in (*now, *before):
        if before.get(key) == now.get(key):
            continue
        if part == "corpora":
            raise UserError(f"the texts of {key:.40} must be those that the run read; they changed; {ANEW}")
        old, new = f"{shown(before.get(key)):.40}", f"{shown(now.get(key)):.40}"
        what = f"--{key.replace('_', '-')}" if part == "options" else f"the config's {key}"
        raise UserError(f"{what:.60} must stay that of the run, {old}; got {new}; choose another --out")
