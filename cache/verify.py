"""Checks every byte of a capture: the digest beside it first, before HDF5 reads the file, then all that is in it."""

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import h5py
import numpy as np
import tyro
from numpy.typing import NDArray

from cache.layout import OUTPUT_TYPES, SCORES, decode
from cache.store import Capture, sidecar
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError, run_command
from smelt_interp.sites import SITES
from smelt_interp.terminal.command_line import parse


class Verified(NamedTuple):
    """What was found to be whole."""

    samples: int
    sites: int
    chunks: int
    """Stored blocks whose checksums were compared."""


def verify(path: Path) -> Verified:
    """Check a finished capture. Raises UserError for the first thing that is not as it was written.

    The digest comes first: damaged metadata can crash the HDF5 library.
    """
    if not path.is_file() or not sidecar(path).is_file():
        Capture(path)  # names what is missing when it is the capture itself
        raise UserError(
            f"a capture must have its digest beside it; got no {sidecar(path)}: copy it too, or record again"
        )
    verify_digest(path)
    return verify_contents(path)


def verify_digest(path: Path) -> None:
    """Check a file's bytes against the digest beside it, which must be there. Raises UserError."""
    digest_path = sidecar(path)
    written = digest_path.read_bytes()[:200].split(b" ")[0]
    if not re.fullmatch(rb"[0-9a-f]{64}", written):
        raise UserError(f"{digest_path} must begin with a SHA-256 digest; got {written[:70]!r}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != written.decode():
        raise UserError(f"a capture must be as it was written; {path} has changed: copy or record it again")


def verify_contents(path: Path) -> Verified:
    """Check what an HDF5 file holds: structure, tokens within their ranges, every block there, with the right checksum
    and numbers that can be. Raises UserError."""
    capture = Capture(path)
    chunks = 0
    with capture.file("read") as file:
        for dataset in _datasets(file):
            if dataset.chunks is None:
                dataset[()]
                continue
            places = list(itertools.product(*map(range, (0,) * dataset.ndim, dataset.shape, dataset.chunks)))
            if dataset.id.get_num_chunks() != len(places):
                raise UserError(
                    f"{dataset.name} must be complete; {dataset.id.get_num_chunks()} of {len(places)} blocks"
                )
            for place in places:  # reading a block compares its checksum
                block = tuple(slice(start, start + size) for start, size in zip(place, dataset.chunks, strict=True))
                _check_values(dataset.name.removeprefix("/"), dataset[block], capture.architecture)
            chunks += len(places)
    return Verified(samples=len(capture.samples), sites=len(capture.sites), chunks=chunks)


def _check_values(name: str, stored: NDArray[np.generic], architecture: Architecture) -> None:
    if name not in SITES and name not in OUTPUT_TYPES:
        return
    values = decode(stored).astype(np.float64)  # exact for both kinds of stored number
    if stored.dtype.kind == "i":
        count = architecture.vocab_size if name == "argmax" else architecture.num_experts
        rule, holds = f"0 to {count - 1}", (values >= 0) & (values < count)
    elif name == SCORES:
        rule, holds = "finite or -inf", np.isfinite(values) | np.isneginf(values)
    else:
        rule, holds = "finite", np.isfinite(values)
    if not holds.all():
        raise UserError(f"numbers of {name} must be {rule}; got {values[~holds][0]:g}: record it again")


def _datasets(group: h5py.Group) -> list[h5py.Dataset]:
    found: list[h5py.Dataset] = []
    for child in group.values():
        found += _datasets(child) if isinstance(child, h5py.Group) else [child]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is checked."""

    file: Annotated[Path, tyro.conf.Positional]
    """Capture file."""


def command(file: Path) -> None:
    """Check every byte of a capture."""
    verified = verify(file)
    print(f"{file} is whole: {verified.samples} samples, {verified.sites} sites, {verified.chunks} blocks as written")


def main() -> None:
    """The command line."""
    command(parse(Options, prog="python -m cache.verify", description=__doc__ or "").file)


if __name__ == "__main__":
    run_command(main)
