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

from cache.store import Capture, sidecar
from smelt_interp.command_line import parse
from smelt_interp.errors import UserError, run_command


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
    digest_path = sidecar(path)
    if not path.is_file() or not digest_path.is_file():
        Capture(path)  # names what is missing when it is the capture itself
        raise UserError(f"a capture must have its digest beside it; got no {digest_path}: copy it too, or record again")
    written = digest_path.read_bytes()[:200].split(b" ")[0]
    if not re.fullmatch(rb"[0-9a-f]{64}", written):
        raise UserError(f"{digest_path} must begin with a SHA-256 digest; got {written[:70]!r}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != written.decode():
        raise UserError(f"a capture must be as it was written; {path} has changed: copy or record it again")
    return verify_contents(path)


def verify_contents(path: Path) -> Verified:
    """Check what an HDF5 file holds: structure, every block there and with the right checksum, tokens within their
    ranges. Raises UserError."""
    capture = Capture(path)
    samples = capture.samples
    position_T = np.arange(samples.ids_NT.shape[1])
    for name, holds in (
        ("ids must be in the vocabulary", (samples.ids_NT >= 0) & (samples.ids_NT < capture.config.vocab_size)),
        ("length must be 1 to the length of a row", (samples.length_N >= 1) & (samples.length_N <= len(position_T))),
        (
            "segment_start must not lie ahead",
            (samples.segment_start_NT >= 0) & (samples.segment_start_NT <= position_T),
        ),
    ):
        if not holds.all():
            raise UserError(f"{path}: tokens/{name}; {int((~holds).sum())} are not")
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
                dataset[tuple(slice(start, start + size) for start, size in zip(place, dataset.chunks, strict=True))]
            chunks += len(places)
    return Verified(samples=len(samples), sites=len(capture.sites), chunks=chunks)


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
