"""Time a training step on this CPU beside transformers' Qwen3-MoE at the same shape.

    python -m benchmarks.train_throughput

A step is losses, gradients, clipping and AdamW on rows of Dyck; transformers loops no layers, so each network runs each
once, with QK-norm. Every round runs each once, in random order; what is reported is the median over rounds of its time
/ our time, with quartiles, so above 1 we are faster. Times are the process's CPU time on one thread. With `--profile`:
where the time of our step goes.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.profiler import profile

from benchmarks.decode import SHAPES, seconds, transformers_network
from model.network import LoopedMoE
from model.training.optimizers import Optimizers
from model.training.options import TrainOptions
from model.training.train import Training
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.data.samples import Samples

CONFIG = SHAPES["demo"]
RUN = TrainOptions(out=Path(), preset="demo-baseline")
"""For its optimiser, clipping and weights of the routing losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to time."""

    rows: tuple[int, ...] = (12, 48)
    """Rows of 160 tokens a step."""
    rounds: int = 7
    profile: bool = False
    """Print the operations that take most of our step, in place of the ratios."""


def ours(samples: Samples) -> Callable[[], object]:
    """One step of `model.training.train`."""
    network = LoopedMoE(CONFIG)
    training = Training(RUN, network, Optimizers(network, RUN))
    return lambda: training.step(0, samples)


def theirs(tokens_BT: Tensor) -> Callable[[], object]:
    """The same step of transformers' network."""
    network = transformers_network(CONFIG).train()
    network.config.output_router_logits = True
    network.router_aux_loss_coef = RUN.balance
    optimizers = Optimizers(network, RUN)

    def step() -> None:
        network(tokens_BT, labels=tokens_BT, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), RUN.clip)
        optimizers.step(RUN.learning_rate)

    return step


def show_profile(step: Callable[[], object], steps: int = 3) -> None:
    """The twenty operations that take most, each apart from those that it calls."""
    step()
    with profile() as seen:
        for _ in range(steps):
            step()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print("| operation | share | calls a step |\n|---|---|---|")
    for event in events[:20]:
        print(f"| {event.key} | {event.self_cpu_time_total / total:.1%} | {event.count / steps:.0f} |")


def main() -> None:
    """One line for each number of rows."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    if not options.profile:
        print("| rows | ours, tokens/s | transformers' time / ours | quartiles | rounds |\n|---|---|---|---|---|")
    for rows in options.rows:
        read = MixtureOptions(dyck_episode=rows, dyck_standard=0, code=0, prose=0, math=0, backcopy=0)
        samples = TrainingMixture(read).batch(0)
        tokens_BT = torch.from_numpy(samples.ids_NT).long()
        step = ours(samples)
        if options.profile:
            show_profile(step)
            continue
        taken = seconds({"ours": step, "transformers": theirs(tokens_BT)}, options.rounds)
        speed = tokens_BT.numel() / statistics.median(taken["ours"])
        ratios = [other / own for other, own in zip(taken["transformers"], taken["ours"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(f"| {rows} | {speed:.0f} | {middle:.2f} | {low:.2f} to {high:.2f} | {options.rounds} |", flush=True)


if __name__ == "__main__":
    main()
