"""How well a network predicts: loss by kind of row, Dyck exact match against shots, load and variance by step."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model.network import LoopedMoE
from smelt_interp.data.dyck import DyckOptions, dyck_samples, most_shots
from smelt_interp.data.dyck_scores import teacher_forced
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.data.samples import Samples
from smelt_interp.sites import hook_name

SHOTS = (0, 1, 2, 4, 8)
FRESH_SEED = 1_000_003
"""Far from any training seed: episodes and windows that no training row was drawn with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One look at a network."""

    loss_nats: dict[str, float]
    """Mean next-token cross-entropy by kind of row, nats a token."""
    exact_match: dict[int, float]
    """Share of fresh Dyck episodes whose whole answer is greedy decoding's, by number of shots; empty where no Dyck
    is read."""
    load: tuple[float, ...]
    """At each step, the share of the expert that gets most, over an even share: 1 is perfect balance."""
    residual_variance: tuple[float, ...]
    """Of the residual stream after each step."""


def held_out_batches(mixture: TrainingMixture, num: int = 8) -> tuple[Samples, ...]:
    """Batches of the mixture's held-out side. Raises `UserError` when a text has none that fills a row."""
    held_out = TrainingMixture(replace(mixture.options, split="held_out", seed=FRESH_SEED), mixture.tokenizer)
    return tuple(held_out.batch(step) for step in range(num))


def evaluate(
    network: LoopedMoE, mixture: MixtureOptions, held_out: tuple[Samples, ...], *, episodes: int = 64
) -> Evaluation:
    """Losses on these batches, load and variance on the first, and exact match on `episodes` compact `episode` prompts
    at each of SHOTS that the mixture's rows hold when it has Dyck."""
    most = most_shots(DyckOptions(max_total=mixture.max_total), mixture.context)
    shots = [each for each in SHOTS if each <= most] if mixture.dyck_episode + mixture.dyck_standard else []
    load, variance = _by_step(network, held_out[0])
    return Evaluation(
        loss_nats=held_out_loss(network, held_out),
        exact_match={each: dyck_exact_match(network, each, mixture, episodes) for each in shots},
        load=load,
        residual_variance=variance,
    )


@torch.no_grad()
def held_out_loss(network: LoopedMoE, held_out: tuple[Samples, ...]) -> dict[str, float]:
    """Nats a token by domain, over the tokens that count."""
    sums: dict[str, list[float]] = {}
    for samples in held_out:
        logprob_BTW = _logits(network, samples)[:, :-1].log_softmax(-1)
        target_BT = torch.from_numpy(samples.ids_NT[:, 1:]).long()
        loss_BT = -logprob_BTW.gather(-1, target_BT[..., None])[..., 0]
        start_BT = torch.from_numpy(samples.segment_start_NT)
        counts_BT = start_BT[:, 1:] == start_BT[:, :-1]
        counts_BT &= torch.arange(1, loss_BT.shape[1] + 1) < torch.from_numpy(samples.length_N)[:, None]
        losses, counts = (loss_BT * counts_BT).sum(1).tolist(), counts_BT.sum(1).tolist()
        for domain, loss, count in zip(samples.domain_N, losses, counts, strict=True):
            total = sums.setdefault(domain.decode(), [0.0, 0.0])
            total[0] += loss
            total[1] += count
    return {domain: loss / count for domain, (loss, count) in sums.items()}


@torch.no_grad()
def dyck_exact_match(network: LoopedMoE, shots: int, mixture: MixtureOptions, episodes: int) -> float:
    """Share of fresh compact `episode` prompts answered exactly under greedy decoding."""
    options = DyckOptions(shots=(shots,), max_total=mixture.max_total)
    samples = dyck_samples(options, episodes, seed=FRESH_SEED, length=mixture.context, tokenizer=network.tokenizer)
    argmax_NT = _logits(network, samples).argmax(-1).numpy()
    return float(teacher_forced(samples, argmax_NT, newline=True).mean())


@torch.no_grad()
def _by_step(network: LoopedMoE, samples: Samples) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Load and variance of the residual stream at each step."""
    num_experts = network.config.num_experts
    variance: list[float] = []
    load: list[float] = []

    def keep_variance(x: Tensor, hook: object) -> None:
        variance.append(float(x.float().var()))

    def keep_load(x: Tensor, hook: object) -> None:
        count = torch.bincount(x.flatten(), minlength=num_experts)
        load.append(float(count.max() / count.sum() * num_experts))

    steps = range(len(network.plan))
    hooks = [(hook_name(step, "hook_resid_post"), keep_variance) for step in steps]
    hooks += [(hook_name(step, "mlp.hook_expert_indices"), keep_load) for step in steps]
    tokens_BT, start_BT = (
        torch.from_numpy(ids_NT.astype(np.int64)).to(network.device)
        for ids_NT in (samples.ids_NT, samples.segment_start_NT)
    )
    with network.hooks(hooks):
        network(tokens_BT, segment_start_BT=start_BT, attention="fast")
    return tuple(load), tuple(variance)


def _logits(network: LoopedMoE, samples: Samples) -> Tensor:
    """On the CPU, (N, T, W); documents that share a row do not see one another."""
    rows = []
    for first in range(0, len(samples), 32):
        ids_BT, start_BT = (
            torch.from_numpy(array_NT[first : first + 32].astype(np.int64)).to(network.device)
            for array_NT in (samples.ids_NT, samples.segment_start_NT)
        )
        packed_BT = start_BT if bool(start_BT.any()) else None
        rows.append(network(ids_BT, segment_start_BT=packed_BT, attention="fast").cpu())
    return torch.cat(rows)
