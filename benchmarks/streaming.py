"""What probes cost while a network runs: times a plain eager forward of the same batches, and memory over rows.

    python -m benchmarks.streaming --ckpt checkpoints/demo-smelt

Ways are timed in turn, round after round, so that a busy machine slows them alike; a ratio is the median over rounds.
Times are processor time, of one thread unless more are asked for.
Memory is the largest resident size of a process that streams so many rows through both probes, less that of one that
runs the same rows plainly.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from cache.batch import Batch
from cache.record import run_batches
from model.network import LoopedMoE
from probes.running import catalog
from probes.running.probe import accumulate
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import Threads, validated

NAMES = ("attention_sink", "expert_overlap")
Count = Annotated[int, Field(ge=1, le=10**6)]


@validated
class Options:
    """Which network, how many batches, how many rows."""

    ckpt: Path = Path("checkpoints/demo-smelt")
    """Folder of the checkpoint."""
    rounds: Count = 5
    """How often each way is timed."""
    batches: Count = 8
    """Batches of a round."""
    batch_size: Count = 8
    length: Annotated[int, Field(ge=2, le=10**6)] = 160
    """Tokens of a row that is timed."""
    rows: tuple[Count, ...] = (1_000, 10_000)
    """Numbers of rows whose memory is measured; none leaves that out."""
    memory_length: Annotated[int, Field(ge=2, le=10**6)] = 24
    """Tokens of a row there."""
    threads: Threads = 1
    only: Literal["", "plain", "probes"] = ""
    """Measure the memory of one way in this process, for the first of the rows."""


def main() -> None:
    """Print both tables."""
    options = parse(Options, prog="python -m benchmarks.streaming", description=__doc__ or "")
    import torch

    torch.set_num_threads(options.threads)
    if options.only:
        print(peak_megabytes(options))
        return
    network = LoopedMoE.from_pretrained(options.ckpt).eval()
    rows = [[name, f"{1000 * seconds:.1f}", f"{times:.3f}"] for name, seconds, times in costs(network, options)]
    title = f"{options.ckpt.name}, batches of {options.batch_size} x {options.length}, {options.threads} thread(s)"
    print_table(Table(f"Cost of a batch; {title}", ["way", "processor ms a batch", "times plain"], rows))
    if options.rows:
        print_table(
            Table("Largest resident size", ["rows", "plain, MB", "both probes, MB", "more, MB"], memory(options))
        )


def plainly(network: LoopedMoE, samples: Samples, batch_size: int) -> None:
    """The forward pass on the eager path, and nothing else."""
    import torch

    with torch.no_grad():
        for first in range(0, len(samples), batch_size):
            network(torch.from_numpy(samples.ids_NT[first : first + batch_size].astype(np.int64)), attention="eager")


def streamed(network: LoopedMoE, samples: Samples, batch_size: int, names: tuple[str, ...]) -> Iterator[Batch]:
    """Batches with what these probes need."""
    suffixes = tuple(dict.fromkeys(s for name in names for s in catalog.load(name).needs(network.architecture)))
    return run_batches(network, samples, suffixes, batch_size=batch_size)


def costs(network: LoopedMoE, options: Options) -> list[tuple[str, float, float]]:
    """Each way with its seconds a batch and its ratio to the plain one, medians over rounds."""
    samples = data(options.batches * options.batch_size, options.length)
    ways: dict[str, Callable[[Samples], object]] = {
        "plain eager forward": lambda part: plainly(network, part, options.batch_size)
    }
    for words, names in (("sites alone", ()), *((name, (name,)) for name in NAMES), ("both probes", NAMES)):
        read = names or NAMES
        asked = {name: (catalog.load(name), catalog.load(name).Options()) for name in names}
        ways[words] = lambda part, read=read, asked=asked: accumulate(  # type: ignore[misc]  # bound now
            streamed(network, part, options.batch_size, read), asked
        )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            begun = time.process_time()
            way(samples)
            seconds[name].append((time.process_time() - begun) / options.batches)
    plain = np.array(seconds["plain eager forward"])
    return [(name, float(np.median(each)), float(np.median(each / plain))) for name, each in seconds.items()]


def data(num: int, length: int) -> Samples:
    """Dyck episodes as long as fit."""
    shots = 8 if length >= 160 else 0
    return load_samples(DataOptions(samples=num, length=length, shots=(shots,)), length, BYTES)


def memory(options: Options) -> list[list[str]]:
    """For each number of rows the peak of both ways, each in a process of its own."""
    found = []
    for rows in options.rows:
        peaks = []
        for way in ("plain", "probes"):
            argv = [sys.executable, "-m", "benchmarks.streaming", "--only", way, "--rows", str(rows)]
            shared = ["--ckpt", str(options.ckpt), "--memory-length", str(options.memory_length)]
            ended = subprocess.run([*argv, *shared], capture_output=True, text=True, check=True)
            peaks.append(float(ended.stdout))
        found.append([str(rows), *(f"{peak:.0f}" for peak in peaks), f"{peaks[1] - peaks[0]:.0f}"])
    return found


def peak_megabytes(options: Options) -> float:
    """The largest resident size of this process after so many rows in one way."""
    network = LoopedMoE.from_pretrained(options.ckpt).eval()
    samples = data(options.rows[0], options.memory_length)
    if options.only == "plain":
        plainly(network, samples, options.batch_size)
    else:
        asked = {name: (catalog.load(name), catalog.load(name).Options()) for name in NAMES}
        accumulate(streamed(network, samples, options.batch_size, NAMES), asked)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run_command(main)
