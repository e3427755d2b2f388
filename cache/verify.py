"""Checks every byte of a capture: the digest of each shard before HDF5 reads it, then all that is in it."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray

from cache.layout import SCORES, decode
from cache.manifest import Manifest, Shard
from cache.shard import check_tokens, open_shard, read_tokens
from cache.store import Capture
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse


class Verified(NamedTuple):
    """What was found to be whole."""

    samples: int
    shards: int
    sites: int
    chunks: int
    """Stored blocks whose checksums were compared."""

    def said(self) -> str:
        """For the one who asked."""
        shards = "1 shard" if self.shards == 1 else f"{self.shards} shards"
        return f"is whole: {self.samples} samples in {shards}, {self.sites} sites, {self.chunks} blocks as written"


def verify(folder: Path) -> Verified:
    """Check a finished capture. Raises UserError for the first thing that is not as it was written."""
    capture = Capture(folder)
    manifest = capture.manifest
    for shard in manifest.shards:  # the digests first: what has changed is told before anything is unpacked
        verify_shard(folder, shard, manifest, values=False)
    chunks = sum(verify_shard(folder, shard, manifest, values=True) for shard in manifest.shards)
    if capture.samples_digest != capture.samples.digest():
        raise UserError(f"a capture must hold the samples of its request; {folder} holds others: record it again")
    return Verified(len(capture), len(manifest.shards), len(manifest.sites), chunks)


def verify_shard(folder: Path, shard: Shard, manifest: Manifest, *, values: bool) -> int:
    """Check one shard: its digest, its structure, and with `values` every number in it. How many chunks it has.

    Raises UserError that names the file.
    """
    chunks = 0
    architecture = manifest.architecture
    with open_shard(folder, shard, manifest) as file:
        if not values:
            return 0
        samples, sample_ids = read_tokens(file, slice(0, shard.samples), manifest.num_tokens)
        check_tokens(samples, sample_ids, architecture.vocab_size)
        for name, layout in manifest.layouts(shard).items():
            dataset = file[name]
            starts = [range(0, length, chunk) for length, chunk in zip(layout.shape, layout.chunks, strict=True)]
            for place in itertools.product(*starts):  # reading a chunk compares its checksum
                chunk = tuple(slice(start, start + size) for start, size in zip(place, layout.chunks, strict=True))
                _check_values(name, dataset[chunk], architecture)
            chunks += layout.num_chunks
    return chunks


def _check_values(name: str, stored: NDArray[np.generic], architecture: Architecture) -> None:
    if name.startswith("tokens/"):
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
        raise UserError(f"numbers of {name} must be {rule}; got {values[~holds][0]:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What is checked."""

    capture: Annotated[Path, tyro.conf.Positional]
    """Folder of the capture."""


def command(folder: Path) -> None:
    """Check every byte of a capture."""
    print(f"{folder} {verify(folder).said()}")


def main() -> None:
    """The command line."""
    command(parse(VerifyOptions, prog="python -m cache.verify", description=__doc__ or "").capture)


if __name__ == "__main__":
    run_command(main)
