"""The processes that torchrun starts for one command: how they meet, what they tell each other, how they end together.

A process that was started alone is the first rank of one. Every wait ends after a time: when one rank has died, the
others end too, each with one line.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from smelt_interp.errors import UserError

Gathered = TypeVar("Gathered")

MEETING = timedelta(minutes=2)
"""Within which all ranks must have started."""
LONGEST_WAIT = timedelta(minutes=15)
"""Of one rank for another, such as for the first to write a checkpoint."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOST = re.compile(r"gloo|nccl|store|socket|peer|connection|timed? ?out|process ?group|collective", re.IGNORECASE)


@contextmanager
def joined(device: str = "cpu") -> Iterator[None]:
    """The ranks of this command as one group, by gloo on CPUs and NCCL on GPUs, each rank on its own; nothing when this
    process was started alone, or within such a group. Only the first rank prints.

    Raises `UserError` when they do not meet, and when another rank is lost.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        yield
        return
    try:
        _meet(device)
        with open(os.devnull, "w") as nowhere:
            with nullcontext() if is_first_rank() else redirect_stdout(nowhere):
                yield
            wait()
    except RuntimeError as error:  # all that torch raises of its groups and stores
        if not _LOST.search(str(error)):
            raise
        where = f"rank {os.environ.get('RANK', '?')}"
        raise UserError(
            f"all ranks must run to the end; {where} lost another ({error!s:.80}): see what that one said, and start "
            "all again"
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(device: str) -> None:
    """Start the group from the variables that torchrun sets."""
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        raise UserError(f"with WORLD_SIZE set, {missing[0]} must be set as torchrun does; it is not: unset WORLD_SIZE")
    try:
        rank, size, local = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
        with _without_log():
            store, _, _ = next(rendezvous("env://", rank, size, timeout=MEETING))
            store.set_timeout(LONGEST_WAIT)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)
    except (RuntimeError, ValueError) as error:
        meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"the {os.environ['WORLD_SIZE']:.20} ranks must meet at {meeting_point:.60}; {error!s:.80}: start them "
            "with torchrun"
        ) from None


@contextmanager
def _without_log() -> Iterator[None]:
    """Drop what torch's libraries write to the error stream, C++ frames and all; what failed is raised as well."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def is_first_rank() -> bool:
    """Whether this process writes what is written once."""
    return rank() == 0


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def own_part(items: NDArray[np.int64]) -> NDArray[np.int64]:
    """The items of this rank, in order; the ranks' parts follow each other, and differ in size by one at most."""
    return np.array_split(items, num_ranks())[rank()]


def gathered(x: Gathered) -> list[Gathered]:
    """On the first rank what each rank has, in their order; nothing on the others. It is pickled on the way."""
    if not dist.is_initialized():
        return [x]
    found = [x] * num_ranks() if is_first_rank() else None
    dist.gather_object(x, found)
    return found or []


def total(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, without gradient."""
    x = x.detach()
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x
