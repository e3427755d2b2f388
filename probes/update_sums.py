"""The sums that the residual probe keeps: which updates are compared, and what each sample's tokens give them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import MOST_SHUFFLES, check_number, is_token, measured_layers, recorded_steps
from probes.statistics.ratio_histogram import NUM_BINS, RatioHistogram
from probes.statistics.resampling import ratio, shuffled_positions
from probes.statistics.visit_pairs import check_visits, consecutive_once, visit_pairs
from smelt_interp import similarity
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, step_scale

Update = Literal["attention", "experts", "layer", "visit"]
ATTENTION, EXPERTS, ENTERING = "hook_attn_out", "hook_mlp_out", "hook_resid_pre"
SITES_READ = (ENTERING, ATTENTION, EXPERTS)
OF_ONE_STEP: tuple[Update, ...] = ("attention", "experts", "layer")
"""The updates that a single step makes, in the order of axis U."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which updates are compared, between which visits."""

    visits: tuple[int, ...] = (1, 2)
    """Visits to compare, counted from 1: every pair of them."""
    updates: tuple[Update, ...] = ("attention", "experts", "layer", "visit")
    """What a visit adds: by the attention sublayer, the expert sublayer, a layer, or the whole visit."""
    shuffles: int = 4
    """Shuffles of tokens behind the null of the median ratio; the cosine's null needs none."""
    resample_seed: int = 0
    """Seed of the bootstrap and of shuffles."""

    def __post_init__(self) -> None:
        check_visits(self.visits)
        check_number("shuffles", self.shuffles, 1, MOST_SHUFFLES)
        check_number("resample_seed", self.resample_seed, 0)
        if not self.updates or len(set(self.updates)) < len(self.updates):
            raise UserError(f"updates must be one or more different kinds; got {' '.join(self.updates) or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two updates that are compared, token by token."""

    update: Update
    steps: tuple[tuple[int, ...], tuple[int, ...]]
    """The step indices whose additions are summed, of each of the two."""
    layers: str
    """As a row names them, from 1."""
    visits: tuple[int, int] | None
    """From 0; None for two consecutive layers that run once."""


def comparisons(config: ModelConfig, steps: Plan, recorded: Sequence[int], options: Options) -> list[Comparison]:
    """Every pair of visits of every looped layer and of the whole loop, and consecutive layers that run once."""
    found: list[Comparison] = []
    pairs = visit_pairs(config, steps, recorded, options.visits)
    for update in options.updates:
        if update != "visit":
            found += [
                Comparison(
                    update=update, steps=((p.steps[0],), (p.steps[1],)), layers=str(p.layer + 1), visits=p.visits
                )
                for p in pairs
            ]
            found += [
                Comparison(update=update, steps=((first,), (second,)), visits=None,
                           layers=f"{steps[first].layer + 1}, {steps[second].layer + 1}")
                for first, second in consecutive_once(steps, recorded)
            ]  # fmt: skip
            continue
        for visits in dict.fromkeys(pair.visits for pair in pairs):
            early, late = zip(*(pair.steps for pair in pairs if pair.visits == visits), strict=True)
            if len(early) == config.loop_stop - config.loop_start:
                layers = measured_layers(config, steps, early)
                found.append(Comparison(update="visit", steps=(early, late), layers=layers, visits=visits))
    return found


# Streaming


class Stream:
    """Sums over tokens for the comparisons (axis P), the steps (axis S) and the kinds of update (axis U)."""

    def __init__(self, first: Batch, options: Options) -> None:
        self.config, self.plan, self.options = first.config, first.plan, options
        self.steps = recorded_steps(first, SITES_READ)
        self.comparisons = comparisons(first.config, first.plan, self.steps, options)
        self.ratios, self.shuffled_ratios = (RatioHistogram(len(self.comparisons)) for _ in range(2))
        self.shuffled_count_PJ = np.zeros((len(self.comparisons), NUM_BINS))
        self.whole = self.steps == tuple(range(self.steps[-1] + 1))
        """Whether every step up to the last measured one was recorded."""

    def sums(self, batch: Batch) -> dict[str, NDArray[np.generic]]:
        """Sums of each sample."""
        token_BT = is_token(batch.samples)
        added = {step: (_read(batch, step, ATTENTION), _read(batch, step, EXPERTS)) for step in self.steps}
        found: dict[str, NDArray[np.generic]] = {
            "samples": np.asarray(token_BT.any(-1)),
            "tokens": token_BT.sum(-1),
            **self._along_steps(batch, token_BT, added),
        }
        if self.comparisons:
            found |= self._compared(batch, token_BT, added)
        return found

    def _along_steps(
        self,
        batch: Batch,
        token_BT: NDArray[np.bool_],
        added: Mapping[int, tuple[NDArray[np.float64], NDArray[np.float64]]],
    ) -> dict[str, NDArray[np.generic]]:
        squares, variances, undamped_variances = [], [], []
        entering_BTD = _read(batch, self.steps[0], ENTERING)
        undamped_BTD = entering_BTD
        for step, (attention_BTD, experts_BTD) in added.items():
            layer_BTD = attention_BTD + experts_BTD
            squares.append(np.stack([(x**2).sum((1, 2)) for x in (attention_BTD, experts_BTD, layer_BTD)], -1))
            undamped_BTD = undamped_BTD + layer_BTD / step_scale(self.config, self.plan[step])
            variances.append(_variance(_read(batch, step, ENTERING) + layer_BTD, token_BT))
            undamped_variances.append(_variance(undamped_BTD, token_BT))
        return {
            "square": np.stack(squares, 1),
            "variance": np.stack(variances, 1),
            "undamped": np.stack(undamped_variances, 1),
            "entering": _variance(entering_BTD, token_BT),
        }

    def _compared(
        self,
        batch: Batch,
        token_BT: NDArray[np.bool_],
        added: Mapping[int, tuple[NDArray[np.float64], NDArray[np.float64]]],
    ) -> dict[str, NDArray[np.generic]]:
        orders_XBT = shuffled_positions(token_BT, batch.sample_ids, self.options.resample_seed, self.options.shuffles)
        found: dict[str, list[NDArray[np.generic]]] = {}
        for column, compared in enumerate(self.comparisons):
            early_BTD, late_BTD = (
                sum((_update(added[step], compared.update) for step in steps), np.zeros(1)) for steps in compared.steps
            )
            cosines = similarity.cosine_sums(early_BTD, late_BTD, token_BT)
            for name in ("count", "cosine", "shuffled_cosine", "square_a", "square_b"):
                found.setdefault(name, []).append(getattr(cosines, name))
            early_BT, late_BT = (np.linalg.norm(x, axis=-1) for x in (early_BTD, late_BTD))
            counted_BT = token_BT & (early_BT > 0)
            counts_BJ = self.ratios.count(column, ratio(late_BT, early_BT), counted_BT)
            found.setdefault("ratio", []).append(counts_BJ)
            for order_BT in orders_XBT:
                shuffled_BT = ratio(np.take_along_axis(late_BT, order_BT, 1), early_BT)
                self.shuffled_count_PJ[column] += self.shuffled_ratios.count(column, shuffled_BT, counted_BT).sum(0)
        return {name: np.stack(arrays, 1) for name, arrays in found.items()}


def _read(batch: Batch, step: int, suffix: str) -> NDArray[np.float64]:
    """A site's array with 0 on padding, whatever stood there. -> (B, T, D)"""
    return np.where(is_token(batch.samples)[..., None], np.asarray(batch.sites[step, suffix], np.float64), 0.0)


def _update(added: tuple[NDArray[np.float64], NDArray[np.float64]], update: Update) -> NDArray[np.float64]:
    attention_BTD, experts_BTD = added
    return {"attention": attention_BTD, "experts": experts_BTD}.get(update, attention_BTD + experts_BTD)


def _variance(stream_BTD: NDArray[np.float64], token_BT: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Sum over the tokens of each sample of the variance over channels. -> (B,)"""
    return np.asarray((stream_BTD.var(-1) * token_BT).sum(-1))
