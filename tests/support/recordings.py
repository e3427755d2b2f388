"""A recording of planted batches, whole or of some of its shards."""

import os
import time
from pathlib import Path

from cache.batch import Batch
from cache.layout import Contents
from cache.recording import Recording
from cache.selection import select
from tests.support.planted import split_batch
from tests.support.planted_captures import ARCHITECTURE, SITES, shard_paths

NUM_SAMPLES, SHARD_SAMPLES = 26, 2
NUM_SHARDS = NUM_SAMPLES // SHARD_SAMPLES


def recording_of(out: Path, batch: Batch, **source: object) -> Recording:
    planned = Contents(
        architecture=ARCHITECTURE,
        samples=batch.samples,
        sample_ids=batch.sample_ids,
        sites=select(ARCHITECTURE, SITES),
        precision="float16",
        compression="gzip",
        shard_samples=SHARD_SAMPLES,
        source=source,
    )
    return Recording(out, planned, "the command")


def add(recording: Recording, batch: Batch, numbers: slice = slice(None), pause: float = 0.0) -> None:
    """Record what is missing of the shards of these numbers, as `cache.record` does, from batches at hand."""
    batches = list(split_batch(batch, SHARD_SAMPLES))
    chosen = range(NUM_SHARDS)[numbers]
    for positions in recording.missing():
        if positions.start // SHARD_SAMPLES in chosen:
            time.sleep(pause)
            recording.add(positions, [batches[positions.start // SHARD_SAMPLES]])


def record(out: Path, batch: Batch, pause: float = 0.0) -> None:
    recording = recording_of(out, batch)
    if not recording.finished:
        add(recording, batch, pause=pause)
    recording.finish()


def shard_bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shard_paths(out)}


def scratch_files(out: Path) -> list[str]:
    return [name for name in os.listdir(out) if name.startswith(".")]
