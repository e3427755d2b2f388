"""What recording costs: times a raw dump (`numpy.save`) and a gzip dump of the same arrays of the same running network.

    python -m benchmarks.recording --ckpt checkpoints/demo-smelt

All four run the network on the same batches and store the same arrays in float16 (expert indices in int32), flushed to
the disk. The gzip dump compresses, at level 1, what a capture compresses: attention and expert indices. Ways are timed
in turn, round after round, so that a busy machine slows them alike; a ratio is the median over rounds. Times are
processor time, of one thread unless more are asked for. `storing` is the time less that of the network alone.
"""

import gzip
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from cache.layout import is_attention
from cache.record import DEFAULT_SITES, record, run_batches
from model.hooks.looped_model import LoopedModel
from model.network import LoopedMoE
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples
from smelt_interp.errors import run_command
from smelt_interp.sites import SITES
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import Threads, validated

NETWORK, RAW, PLAIN, GZIP_DUMP, GZIP = "network alone", "raw dump", "capture, none", "gzip dump", "capture, gzip"


@validated
class Options:
    """Which network, how many samples."""

    ckpt: Path = Path("checkpoints/demo-smelt")
    """Folder of the checkpoint."""
    samples: Annotated[int, Field(ge=1, le=10**6)] = 64
    rounds: Annotated[int, Field(ge=1, le=10**6)] = 5
    """How often each way is timed."""
    threads: Threads = 1


def main() -> None:
    """Print the table."""
    options = parse(Options, prog="python -m benchmarks.recording", description=__doc__ or "")
    torch.set_num_threads(options.threads)
    network = LoopedMoE.from_pretrained(options.ckpt).eval()
    samples = load_samples(DataOptions(samples=options.samples), network.architecture.context, network.tokenizer)
    seconds = costs(network, samples, options.rounds)
    rows = []
    for name, dump in ((RAW, RAW), (PLAIN, RAW), (GZIP_DUMP, GZIP_DUMP), (GZIP, GZIP_DUMP)):
        whole, storing = (ratio(seconds, name, dump, less) for less in (None, NETWORK))
        rows.append([name, f"{statistics.median(seconds[name]):.2f}", f"{whole:.2f}", f"{storing:.2f}"])
    title = f"{options.ckpt.name}, {samples.ids_NT.shape[0]} x {samples.ids_NT.shape[1]}, {options.threads} thread(s)"
    alone = f"network alone: {statistics.median(seconds[NETWORK]):.2f} s"
    print_table(Table(f"Recording; {title}", ["way", "processor s", "times its dump", "storing alone"], rows, [alone]))


def ratio(seconds: dict[str, list[float]], name: str, dump: str, less: str | None) -> float:
    """How much longer one way takes than another, `less` taken off both; the median over rounds."""
    off = seconds[less] if less else [0.0] * len(seconds[name])
    rounds = zip(seconds[name], seconds[dump], off, strict=True)
    return statistics.median((ours - network) / (theirs - network) for ours, theirs, network in rounds)


def costs(network: LoopedModel, samples: Samples, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each way in each round."""

    def captured(folder: Path, compression: Literal["none", "gzip"]) -> None:
        record(network, samples, folder / "capture", compression=compression)

    ways: dict[str, Callable[[Path], object]] = {
        NETWORK: lambda folder: sum(len(batch.samples) for batch in run_batches(network, samples, DEFAULT_SITES)),
        RAW: lambda folder: dump(network, samples, folder, compressed=False),
        PLAIN: lambda folder: captured(folder, "none"),
        GZIP_DUMP: lambda folder: dump(network, samples, folder, compressed=True),
        GZIP: lambda folder: captured(folder, "gzip"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            folder = Path(tempfile.mkdtemp())
            begun = time.process_time()
            way(folder)
            seconds[name].append(time.process_time() - begun)
            shutil.rmtree(folder)
    return {name: times[1:] for name, times in seconds.items()}  # the first round warms up


def dump(network: LoopedModel, samples: Samples, folder: Path, *, compressed: bool) -> None:
    """The arrays of each batch in files of their own, as a script would write them."""
    for number, (name, array) in enumerate(arrays(network, samples)):
        packed = compressed and (is_attention(name) or SITES[name].integer)
        with (folder / f"{number}.npy").open("wb") as file:
            if packed:
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as stream:
                    np.save(stream, array)
            else:
                np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


def arrays(network: LoopedModel, samples: Samples) -> Iterator[tuple[str, np.ndarray]]:
    """Each site of each batch at all steps, as a capture stores it."""
    for batch in run_batches(network, samples, DEFAULT_SITES):
        for suffix in DEFAULT_SITES:
            steps = [values for (_, name), values in batch.sites.items() if name == suffix]
            stored = torch.int32 if SITES[suffix].integer else torch.float16
            yield suffix, torch.stack([torch.as_tensor(values).to(stored) for values in steps]).cpu().numpy()


if __name__ == "__main__":
    run_command(main)
