"""Where a run stands, on disk: one folder a state, which has its name only when it is whole; old ones are pruned.

A state is written by torch.distributed.checkpoint, so that another number of ranks can read it, and `place.json` beside
it says the step, the order digest of the tokens so far, and the time.
"""

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from model.ranks import is_first_rank, wait
from smelt_interp.data.mixture import EMPTY_DIGEST
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input
from smelt_interp.terminal.output_files import write_whole

PLACE = "place.json"
KEPT = 2
"""States that a run keeps: the last, and the one before in case a disk loses the last."""
_NAME = re.compile(r"state-(\d{9})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlace:
    """Where a run stands."""

    step: int = 0
    """Steps done."""
    digest: str = EMPTY_DIGEST
    """The order digest of what they read."""
    seconds: float = 0.0
    """Time that they took."""


def states(run: Path) -> dict[int, Path]:
    """The whole states of a run by step, in order."""
    found = {int(name[1]): path for path in run.glob("state-*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def newest_place(run: Path) -> TrainingPlace:
    """Where a run stands. Raises `UserError` when it has no whole state."""
    found = [*states(run).values()]
    if not found:
        raise UserError(f"{run} must hold a state of its run; got none; choose another --out")
    return _read_place(found[-1], "choose another --out")


def save_state(run: Path, place: TrainingPlace, tensors: dict[str, Tensor], keep_every: int) -> None:
    """Write a state, then remove those that are no longer kept. An `OSError` names the state."""
    folder = run / f"state-{place.step:09}"
    scratch = run / f".{folder.name}"
    if is_first_rank():
        shutil.rmtree(scratch, ignore_errors=True)  # of a writer that was killed: the run is locked
    wait()
    try:
        with _one_process_allowed():
            save(tensors, checkpoint_id=scratch, no_dist=not dist.is_initialized())
        if is_first_rank():
            write_whole(scratch / PLACE, (json.dumps(asdict(place)) + "\n").encode())
    except CheckpointException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        _raise_first(error, folder)
    except BaseException:  # whatever ends it, Ctrl-C too, leaves no half-written state
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    wait()
    if is_first_rank():
        shutil.rmtree(folder, ignore_errors=True)  # the same state, when a run goes on from an older one
        os.replace(scratch, folder)
        for step in [*states(run)][:-KEPT]:
            if not keep_every or step % keep_every:
                shutil.rmtree(run / f"state-{step:09}")


def load_state(folder: Path, tensors: dict[str, Tensor]) -> TrainingPlace:
    """Copy a state into the tensors. Raises `UserError` for a folder that is not a whole state of them."""
    remedy = f"remove {folder.name} to go on from the state before, or choose another --out"
    place = _read_place(folder, remedy)
    try:
        with _one_process_allowed():
            load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            raise KeyboardInterrupt from None
        raise UserError(f"{folder} must be a whole state of this run; {causes[0]!s:.90}; {remedy}") from None
    return place


@contextmanager
def _one_process_allowed() -> Iterator[None]:
    """torch warns that a single process saves for itself, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _read_place(folder: Path, remedy: str) -> TrainingPlace:
    try:
        values = json.loads(read_input(folder / PLACE, "the place of a state", 10_000))
        place = TrainingPlace(**values)
        if not (0 < place.step < 10**9 and _DIGEST.fullmatch(place.digest) and 0 <= place.seconds < 1e18):
            raise ValueError("a value is outside its rule")
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    except (ValueError, TypeError, RecursionError) as error:
        rule = f"{folder / PLACE} must say step, digest and seconds of its state"
        raise UserError(f"{rule}; {error!s:.60}; {remedy}") from None
    return place


def _raise_first(error: CheckpointException, folder: Path) -> NoReturn:
    """What stopped the writing: torch wraps everything, Ctrl-C too, in an exception of its own."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(folder)) from None
    raise OSError(errno.EIO, f"not written whole, as on a full disk ({causes[0]!s:.60})", str(folder)) from None
