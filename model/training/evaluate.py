"""How well a network predicts: held-out loss by kind of row, and Dyck exact match against shots."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.network import LoopedMoE
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.dyck_scores import teacher_forced
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.data.samples import Samples

SHOTS = (0, 1, 2, 4, 8)
FRESH_SEED = 1_000_003
"""Far from any training seed: episodes and windows that no training row was drawn with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One look at a network."""

    loss_nats: dict[str, float]
    """Mean next-token cross-entropy by kind of row, nats a byte."""
    exact_match: dict[int, float]
    """Share of fresh Dyck episodes whose whole answer is greedy decoding's, by number of shots."""


def evaluate(network: LoopedMoE, mixture: MixtureOptions, *, episodes: int = 64) -> Evaluation:
    """Held-out loss on 8 batches of the mixture's held-out side, and exact match on `episodes` compact `episode`
    prompts at each of SHOTS."""
    return Evaluation(
        loss_nats=held_out_loss(network, mixture),
        exact_match={shots: dyck_exact_match(network, shots, mixture, episodes) for shots in SHOTS},
    )


@lru_cache(maxsize=2)
def _held_out_batches(mixture: MixtureOptions) -> tuple[Samples, ...]:
    held_out = TrainingMixture(replace(mixture, split="held_out", seed=FRESH_SEED))
    return tuple(held_out.batch(step) for step in range(8))


@torch.no_grad()
def held_out_loss(network: LoopedMoE, mixture: MixtureOptions) -> dict[str, float]:
    """Nats a byte by domain, over the mixture's held-out side."""
    sums: dict[str, list[float]] = {}
    for samples in _held_out_batches(mixture):
        loss_BT = _next_token_losses(network, samples)
        for domain, loss in zip(samples.domain_N, loss_BT.mean(1).tolist(), strict=True):
            sums.setdefault(domain.decode(), []).append(loss)
    return {domain: float(np.mean(losses)) for domain, losses in sums.items()}


@torch.no_grad()
def dyck_exact_match(network: LoopedMoE, shots: int, mixture: MixtureOptions, episodes: int) -> float:
    """Share of fresh compact `episode` prompts answered exactly under greedy decoding."""
    options = DyckOptions(shots=(shots,), max_total=mixture.max_total)
    samples = dyck_samples(options, episodes, seed=FRESH_SEED, length=mixture.context, tokenizer=network.tokenizer)
    argmax_NT = _logits(network, samples.ids_NT).argmax(-1).numpy()
    return float(teacher_forced(samples, argmax_NT, newline=True).mean())


def _next_token_losses(network: LoopedMoE, samples: Samples) -> Tensor:
    """Cross-entropy of each next token in nats, (B, T - 1)."""
    logprob_BTW = _logits(network, samples.ids_NT)[:, :-1].log_softmax(-1)
    target_BT = torch.from_numpy(samples.ids_NT[:, 1:]).long()
    return -logprob_BTW.gather(-1, target_BT[..., None])[..., 0]


def _logits(network: LoopedMoE, ids_NT: NDArray[np.int32]) -> Tensor:
    rows = torch.from_numpy(ids_NT).long().split(32)
    return torch.cat([network(tokens_BT, attention="fast") for tokens_BT in rows])
