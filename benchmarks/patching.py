"""An exact patching grid, step x position, timed against transformer-lens's loop.

    python -m benchmarks.patching --ckpt checkpoints/demo-smelt

Both put the clean run's stream into the corrupted run at every step and every position before the answer, and give the
mean score of the pairs; the largest difference between the two grids is printed. Times are processor time, of one
thread unless more are asked for; ours is the mean of one run before theirs and one after, and includes the clean and
the corrupted run.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformer_lens import patching

from model.network import LoopedMoE
from probes.running.patches import PRE, Patch, PatchedRuns
from smelt_interp.data.dyck import DyckOptions, DyckPairs, dyck_pairs
from smelt_interp.data.dyck_scores import answer_start
from smelt_interp.errors import run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import Threads, validated


@validated
class Options:
    """Which network, how many pairs."""

    ckpt: Path = Path("checkpoints/demo-smelt")
    """Folder of the checkpoint."""
    pairs: Annotated[int, Field(ge=1, le=1024)] = 1
    shots: Annotated[int, Field(ge=1, le=64)] = 4
    most_rows: Annotated[int, Field(ge=1, le=65_536)] = 192
    """Rows of one of our passes."""
    threads: Threads = 1


def main() -> None:
    """Print the table."""
    options = parse(Options, prog="python -m benchmarks.patching", description=__doc__ or "")
    torch.set_num_threads(options.threads)
    network = LoopedMoE.from_pretrained(options.ckpt).eval()
    pairs = dyck_pairs(
        DyckOptions(shots=(options.shots,)),
        options.pairs,
        seed=0,
        length=network.architecture.context,
        tokenizer=network.tokenizer,
    )
    ours = partial(batched, network, pairs, options.most_rows)
    ours()  # a first run that is not counted
    (ours_LT, before), (theirs_LT, theirs), (_, after) = map(timed, (ours, partial(looped, network, pairs), ours))
    seconds = (theirs, (before + after) / 2)
    largest = float((ours_LT - theirs_LT).abs().max())
    rows = [[name, f"{each:.2f}", f"{seconds[0] / each:.1f}"]
            for name, each in zip(("transformer-lens", "batched, restarted"), seconds, strict=True)]  # fmt: skip
    title = f"Patching grid of {ours_LT.shape[0]} steps x {ours_LT.shape[1]} positions, {options.pairs} pair(s)"
    print_table(Table(title, ["way", "processor s", "times faster"], rows, [f"largest difference: {largest:.1e}"]))


def timed(way: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What a way gives, and its processor time."""
    begun = time.process_time()
    return way(), time.process_time() - begun


def batched(network: LoopedMoE, pairs: DyckPairs, most_rows: int = 192) -> Tensor:
    """The mean score under each patch, (L, T)."""
    runs = PatchedRuns(network, pairs.clean, pairs.corrupted, [PRE])
    position_T = np.arange(pairs.clean.ids_NT.shape[1])
    patches = [Patch(np.tile(position_T == t, (len(pairs.clean), 1))) for t in range(runs.length)]
    return runs.scores(PRE, {step: runs.values(PRE, step) for step in runs.steps}, patches, most_rows).mean(2)


@torch.no_grad()
def looped(network: LoopedMoE, pairs: DyckPairs) -> Tensor:
    """The same by `transformer_lens.patching.generic_activation_patch`, (L, T)."""
    start_B = answer_start(pairs.clean)
    length, rows = int(start_B.max()), np.arange(len(start_B))
    clean_BT, corrupted_BT = (torch.from_numpy(each.ids_NT[:, :length].astype(np.int64)) for each in pairs)
    clean_B, corrupted_B = (each.ids_NT[rows, start_B] for each in pairs)

    def score(logits_BTW: Tensor) -> Tensor:
        last_BW = logits_BTW[rows, start_B - 1]
        return (last_BW[rows, clean_B] - last_BW[rows, corrupted_B]).mean()

    _, cache = network.run_with_cache(clean_BT, names_filter=lambda name: name.endswith(PRE))
    patch = partial(
        patching.generic_activation_patch,
        patch_setter=patching.layer_pos_patch_setter,
        activation_name="resid_pre",
        index_axis_names=("layer", "pos"),
    )
    found: Tensor = patch(network, corrupted_BT, cache, score)
    return found


if __name__ == "__main__":
    run_command(main)
