"""How tokens are spread over the experts of a step: load, entropy, dead experts, co-activation, specialisation.

p(e) = share of the tokens whose top k holds expert e; the p(e) of a step sum to k.

    load entropy        of p(e) / k, in nats; even routing: log E
    router entropy      mean over tokens of the entropy of the router's scores over all experts, which sum to 1
    MaxVio              max p(e) / (k / E) - 1 (arXiv:2408.15664); even routing: 0
    dead experts        experts that no token chose; even routing: E (1 - k/E)^tokens
    co-activation       p(e, f) = share of the tokens that chose both; uniform sets: k (k - 1) / (E (E - 1))
    specialisation      mean over tokens of the total variation distance between p(e) / k among the tokens of their
                        class (role, domain) and among all tokens: 0 to 1, 0 where routing ignores the class; a
                        class's own p(e) is the specialisation of OLMoE (arXiv:2409.02060)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import is_token
from probes.statistics.resampling import Resampled, ratio, shuffled_positions
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role

INDICES, WEIGHTS, LOGITS = "mlp.hook_expert_indices", "mlp.hook_expert_weights", "mlp.hook_router_logits"
ROLES = tuple(role for role in Role if role != Role.PAD)


def chosen(indices_BTK: NDArray[np.generic], token_BT: NDArray[np.bool_], num_experts: int) -> NDArray[np.float32]:
    """1 where a token's top k holds the expert, 0 elsewhere and on padding. -> (B, T, E)"""
    held_BTE = np.zeros((*token_BT.shape, num_experts), np.float32)
    np.put_along_axis(held_BTE, np.where(token_BT[..., None], indices_BTK, 0).astype(np.intp), 1.0, axis=-1)
    held_BTE[~token_BT] = 0
    return held_BTE


def score_entropy(logits_BTE: NDArray[np.floating], config: ModelConfig) -> NDArray[np.float64]:
    """Entropy in nats of the router's scores over all experts, divided by their sum. -> (B, T)"""
    logits_BTE = np.asarray(logits_BTE, np.float64)
    if config.router == "softmax":
        scores_BTE = np.exp(logits_BTE - logits_BTE.max(-1, keepdims=True))
    else:
        scores_BTE = 1 / (1 + np.exp(-np.clip(logits_BTE, -500, 500)))
    return entropy(scores_BTE)


def entropy(weight: NDArray[np.floating]) -> NDArray[np.float64]:
    """Entropy in nats of nonnegative weights, divided by their sum over the last axis; NaN where they sum to 0."""
    share = ratio(weight, weight.sum(-1, keepdims=True))
    log_share = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.asarray(-(share * log_share).sum(-1))


def variation(share_of_class: NDArray[np.floating], share_of_all: NDArray[np.floating]) -> NDArray[np.float64]:
    """Total variation distance over the last axis of two loads, each divided by its sum."""
    first, second = (ratio(x, x.sum(-1, keepdims=True)) for x in (share_of_class, share_of_all))
    return np.asarray(np.abs(first - second).sum(-1) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coactivation:
    """Pairs of experts that one token chose, at each step (axis S). The diagonal is p(e)."""

    share_SEE: NDArray[np.float64]
    half_width_SEE: NDArray[np.float64]
    """Half of a 95% interval: 1.96 standard errors of a ratio of sums over samples, linearised. A resample of every
    pair of experts would not fit into memory."""


class LoadStream:
    """Tokens by step and expert, for all tokens and by role and domain; pairs of experts; router entropy."""

    def __init__(self, config: ModelConfig, steps: tuple[int, ...], seed: int, num_shuffles: int) -> None:
        self._config = config
        self.steps = steps
        self._seed = seed
        self._num_shuffles = num_shuffles
        size = (len(steps), config.num_experts, config.num_experts)
        self._pair_SEE, self._pair_square_SEE, self._pair_count_SEE = (np.zeros(size) for _ in range(3))
        self._count = self._count_square = 0.0
        self.shuffled_role_XSRE = np.zeros((num_shuffles, len(steps), len(ROLES), config.num_experts))
        """Loads by role, with the roles of each sample's tokens shuffled."""

    def sums(self, batch: Batch) -> dict[str, NDArray[np.generic]]:
        """Sums of each sample; float32 holds whole numbers exactly."""
        token_BT = is_token(batch.samples)
        count_B = token_BT.sum(-1).astype(np.float64)
        role_BTR = ((batch.samples.role_NT[..., None] == np.array(ROLES)) & token_BT[..., None]).astype(np.float32)
        orders_XBT = shuffled_positions(token_BT, batch.sample_ids, self._seed, self._num_shuffles)
        load, by_role, entropies = [], [], []
        for index, step in enumerate(self.steps):
            held_BTE = chosen(batch.sites[step, INDICES], token_BT, self._config.num_experts)
            pair_BEE = np.matmul(held_BTE.swapaxes(1, 2), held_BTE).astype(np.float64)
            self._pair_SEE[index] += pair_BEE.sum(0)
            self._pair_square_SEE[index] += (pair_BEE**2).sum(0)
            self._pair_count_SEE[index] += np.tensordot(count_B, pair_BEE, 1)
            for shuffle, order_BT in enumerate(orders_XBT):
                shuffled_BTR = np.take_along_axis(role_BTR, order_BT[..., None], 1)
                self.shuffled_role_XSRE[shuffle, index] += np.einsum("btr,bte->re", shuffled_BTR, held_BTE)
            load.append(held_BTE.sum(1))
            by_role.append(np.matmul(role_BTR.swapaxes(1, 2), held_BTE))
            logits_BTE = np.where(token_BT[..., None], np.asarray(batch.sites[step, LOGITS], np.float64), 0.0)
            entropies.append((score_entropy(logits_BTE, self._config) * token_BT).sum(-1))
        self._count += count_B.sum()
        self._count_square += (count_B**2).sum()
        load_BSE = np.stack(load, 1)
        found: dict[str, NDArray[np.generic]] = {
            "tokens": count_B,
            "load": load_BSE,
            "role": np.stack(by_role, 1),
            "role_tokens": role_BTR.sum(1),
            "router_entropy": np.stack(entropies, 1),
        }
        for domain in np.unique(batch.samples.domain_N):
            of_domain_B = batch.samples.domain_N == domain
            found[f"domain.{domain.decode()}"] = load_BSE * of_domain_B[:, None, None].astype(np.float32)
            found[f"domain_tokens.{domain.decode()}"] = count_B * of_domain_B
        return found

    def coactivation(self) -> Coactivation:
        """Shares of tokens over everything that was streamed."""
        share_SEE = ratio(self._pair_SEE, np.array(self._count))
        spread_SEE = self._pair_square_SEE - 2 * share_SEE * self._pair_count_SEE + share_SEE**2 * self._count_square
        error_SEE = ratio(np.sqrt(np.maximum(spread_SEE, 0)), np.array(self._count))
        return Coactivation(share_SEE=share_SEE, half_width_SEE=1.96 * error_SEE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Loads by class of token (axis R or domains: here Z), with resamples first where there are any."""

    names: tuple[str, ...]
    load_WSZE: NDArray[np.float64]
    tokens_WZ: NDArray[np.float64]

    def specialisation_WS(self) -> NDArray[np.float64]:
        """Mean over tokens of the distance between their class's load and everyone's."""
        all_WS1E = self.load_WSZE.sum(2, keepdims=True)
        distance_WSZ = np.nan_to_num(variation(self.load_WSZE, all_WS1E))
        return ratio(np.einsum("wsz,wz->ws", distance_WSZ, self.tokens_WZ), self.tokens_WZ.sum(-1, keepdims=True))

    def share_WSZE(self) -> NDArray[np.float64]:
        """p(e) among the tokens of each class."""
        return ratio(self.load_WSZE, self.tokens_WZ[:, None, :, None])


def roles_of(sums: Resampled) -> Classes:
    """The roles that occur in the samples."""
    tokens_WR = np.asarray(sums["role_tokens"], np.float64)
    present = np.flatnonzero(tokens_WR[0])
    names = tuple(f"role {ROLES[index].name.lower().replace('_', ' ')}" for index in present)
    load_WSRE = np.asarray(sums["role"], np.float64)[:, :, present]
    return Classes(names=names, load_WSZE=load_WSRE, tokens_WZ=tokens_WR[:, present])


def domains_of(sums: Resampled) -> Classes:
    """The domains of the samples."""
    names = [name.removeprefix("domain.") for name in sums.names("domain.")]
    return Classes(
        names=tuple(f"domain {name}" for name in names),
        load_WSZE=np.stack([sums[f"domain.{name}"] for name in names], 2).astype(np.float64),
        tokens_WZ=np.stack([sums[f"domain_tokens.{name}"] for name in names], 1).astype(np.float64),
    )
