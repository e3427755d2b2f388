"""The sums that the sink probe keeps: which keys are which part, and what each sample's queries give them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running.contract import Estimate, Span, check_number, estimate, is_token, looped_spans, recorded_steps
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan

Content = Literal[
    "demonstration_answers", "instruction", "brackets", "letters", "digits", "whitespace", "punctuation"
]  # fmt: skip
_ROLES = {"demonstration_answers": Role.DEMONSTRATION_ANSWER, "instruction": Role.INSTRUCTION}
_CLASSES = {
    "brackets": b"()[]{}<>",
    "letters": bytes([*range(65, 91), *range(97, 123)]),
    "digits": b"0123456789",
    "whitespace": b" \t\n\r",
    "punctuation": b"!\"#$%&'*+,-./:;=?@\\^_`|~",
}
PARTS = ("start", "self", "content", "other")
SITE_NORMS = {"residual": "hook_resid_pre", "key": "attn.hook_k", "value": "attn.hook_v"}
SITES_READ = ("attn.hook_pattern", *SITE_NORMS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is averaged over, and what counts as content."""

    queries: Literal["all", "predict_answer"] = "all"
    """Averaging set: all queries, or those whose next token belongs to the answer of the episode's own query."""
    t_min: int = 1
    """Least distance of a query from its segment's start; a segment's first query has nowhere else to look."""
    heads: tuple[int, ...] | Literal["all"] = "all"
    """Query heads to average over, counted from 1."""
    layers: tuple[int, ...] | Literal["all"] = "all"
    """Layers to measure, counted from 1."""
    content: Content = "demonstration_answers"
    """Which keys are content: by role (demonstration answers, instruction) or by class of the token."""
    sink_threshold: float = 0.3
    """Sink_1: the mean mass on key 1 above which a head counts as a sink."""
    sink_tokens: int = 64
    """Sink_1: the number of first queries averaged over."""
    massive_floor: float = 100.0
    """Massive channels: least magnitude."""
    massive_ratio: float = 1000.0
    """Massive channels: least multiple of the median magnitude of the token's channels."""

    def __post_init__(self) -> None:
        if self.t_min < 1:
            raise UserError(f"t_min must be at least 1 (a segment's first query puts 1.0 on itself); got {self.t_min}")
        check_number("t_min", self.t_min, 1)
        if not 0 < self.sink_threshold < 1:
            raise UserError(f"sink_threshold must be between 0 and 1; got {self.sink_threshold}")
        check_number("sink_tokens", self.sink_tokens, 1)
        check_number("massive_floor", self.massive_floor, 0)
        check_number("massive_ratio", self.massive_ratio, 0)
        if self.heads != "all" and len(set(self.heads)) < len(self.heads):
            raise UserError(f"heads must be different numbers; got {' '.join(map(str, self.heads))}")


# Arithmetic


class Masks(NamedTuple):
    """Which queries are averaged and which keys belong to which part."""

    averaged_BT: NDArray[np.bool_]
    token_BT: NDArray[np.bool_]
    seen_BTS: NDArray[np.bool_]
    """Keys of the query's own segment up to itself."""
    parts_BPTS: NDArray[np.float64]
    """1 where a key is of a part, in the order of PARTS."""


def masks(samples: Samples, options: Options) -> Masks:
    """The partition of every query's causal keys; each key is in exactly one part."""
    start_BT, token_BT = samples.segment_start_NT, is_token(samples)
    position_T = np.arange(start_BT.shape[1])
    averaged_BT = token_BT & (position_T - start_BT >= options.t_min)
    if options.queries == "predict_answer":
        next_BT = np.zeros_like(token_BT)
        next_BT[:, :-1] = samples.role_NT[:, 1:] == Role.ANSWER
        averaged_BT &= next_BT
    key_S, query_T1 = position_T, position_T[:, None]
    seen_BTS = (key_S <= query_T1) & (key_S >= start_BT[:, :, None]) & token_BT[:, :, None] & token_BT[:, None, :]
    left_BTS = seen_BTS.copy()
    parts = []
    for chosen_BTS in (
        key_S == start_BT[:, :, None],
        key_S == query_T1,
        is_content(samples, options)[:, None, :],
        True,
    ):
        parts.append(left_BTS & chosen_BTS)
        left_BTS &= ~parts[-1]
    return Masks(averaged_BT, token_BT, seen_BTS, np.stack(parts, 1).astype(np.float64))


def is_content(samples: Samples, options: Options) -> NDArray[np.bool_]:
    """Which tokens are content. -> (B, T)"""
    if options.content in _ROLES:
        return np.asarray(samples.role_NT == _ROLES[options.content])
    members = np.frombuffer(_CLASSES[options.content], np.uint8)
    return np.isin(samples.ids_NT, members)


def value_weighted_start(
    start_mass_BQT: NDArray[np.float64],
    pattern_BQTS: NDArray[np.float64],
    norm_BQS: NDArray[np.float64],
    start_BT: NDArray[np.integer],
) -> NDArray[np.float64]:
    """Share of the start in A[t, j] norm(v[j]). -> (B, Q, T); 0 where all of it is 0"""
    total_BQT = np.einsum("bqts,bqs->bqt", pattern_BQTS, norm_BQS)
    start_norm_BQT = np.take_along_axis(norm_BQS, np.broadcast_to(start_BT[:, None], total_BQT.shape), axis=-1)
    share_BQT: NDArray[np.float64] = np.zeros_like(total_BQT)
    np.divide(start_mass_BQT * start_norm_BQT, total_BQT, out=share_BQT, where=total_BQT > 0)
    return share_BQT


def entropy(pattern_BQTS: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropy of each query's attention, in nats. -> (B, Q, T)"""
    log_BQTS = np.log(pattern_BQTS, out=np.zeros_like(pattern_BQTS), where=pattern_BQTS > 0)
    entropy_BQT: NDArray[np.float64] = -np.einsum("bqts,bqts->bqt", pattern_BQTS, log_BQTS)
    return entropy_BQT


# Streaming


class Chosen(NamedTuple):
    """What of a network is measured."""

    config: ModelConfig
    plan: Plan
    steps: tuple[int, ...]
    heads: tuple[int, ...]
    spans: tuple[Span, ...]


def choose(batch: Batch, options: Options) -> Chosen:
    steps = recorded_steps(batch, SITES_READ)
    steps = tuple(s for s in steps if options.layers == "all" or batch.plan[s].layer + 1 in options.layers)
    kept = batch.heads["attn.hook_pattern"]
    wanted = kept if options.heads == "all" else tuple(head - 1 for head in options.heads)
    recorded = {batch.plan[s].layer + 1 for s in steps}
    if not steps or (options.layers != "all" and not set(options.layers) <= recorded):
        raise UserError(f"layers must be recorded layers of 1 to {batch.config.num_layers}; got {options.layers}")
    if not wanted or not set(wanted) <= set(kept):
        raise UserError(f"heads must be among the recorded {[head + 1 for head in kept]}; got {options.heads}")
    return Chosen(batch.config, batch.plan, steps, wanted, looped_spans(batch.config, batch.plan, steps))


def _of_heads(batch: Batch, step: int, suffix: str, heads: Sequence[int]) -> NDArray[np.float64]:
    """A site's array with the query heads `heads` on its head axis; key/value heads are repeated for their queries."""
    kept = batch.heads[suffix]
    array = np.asarray(batch.sites[step, suffix], np.float64)
    if suffix == "attn.hook_pattern":
        return array[:, [kept.index(head) for head in heads]]
    group = batch.config.num_heads // batch.config.num_kv_heads
    if missing := {head // group for head in heads} - set(kept):
        raise UserError(f"{suffix} must hold the key/value heads of the measured heads; missing {min(missing) + 1}")
    return array[:, :, [kept.index(head // group) for head in heads]]


class PositionSums:
    """Mass on each key by its position in its segment; samples are grouped, so that memory does not grow with them."""

    GROUPS = 256
    """A sample's group is its id modulo this; up to so many samples, each is a group of its own."""

    def __init__(self, spans: Sequence[Sequence[int]], num_steps: int, num_heads: int) -> None:
        """`spans`: for each headline span, the indices of its steps among the measured ones."""
        self.spans = spans
        self.count_G = np.zeros(self.GROUPS)
        self.span_GVP = np.zeros((self.GROUPS, len(spans), 0))
        self.head_PLQ = np.zeros((0, num_steps, num_heads))
        self.role_PR = np.zeros((0, len(Role)))

    def add(self, batch: Batch, mask: Masks, mass_LBQS: Sequence[NDArray[np.float64]]) -> None:
        """mass_LBQS: for each measured step, the mass that each key takes from the averaged queries together."""
        position_BS = np.arange(mask.token_BT.shape[1]) - batch.samples.segment_start_NT
        grow = max(0, mask.token_BT.shape[1] - len(self.role_PR))
        self.span_GVP = np.pad(self.span_GVP, ((0, 0), (0, 0), (0, grow)))
        self.head_PLQ = np.pad(self.head_PLQ, ((0, grow), (0, 0), (0, 0)))
        self.role_PR = np.pad(self.role_PR, ((0, grow), (0, 0)))
        group_B1 = (batch.sample_ids % self.GROUPS)[:, None]
        np.add.at(self.count_G, group_B1[:, 0], mask.averaged_BT.sum(-1))
        np.add.at(self.role_PR, (position_BS[mask.token_BT], batch.samples.role_NT[mask.token_BT]), 1)
        for index, mass_BQS in enumerate(mass_LBQS):
            np.add.at(self.head_PLQ[:, index], position_BS, mass_BQS.swapaxes(1, 2))
        for index, steps in enumerate(self.spans):
            mean_BS = np.mean([mass_LBQS[step].mean(1) for step in steps], axis=0)
            np.add.at(self.span_GVP[:, index], (group_B1, position_BS), mean_BS)

    def strongest(self, span: int) -> tuple[Estimate, str]:
        """The largest mean mass on one key of a headline span, and which key that is."""
        position = int(self.span_GVP[:, span].sum(0).argmax())
        return estimate(self.span_GVP[:, span, position], self.count_G), self._name(position)

    def strongest_of_head(self, step: int, head: int) -> tuple[float, str]:
        """The same of one head at one measured step."""
        position = int(self.head_PLQ[:, step, head].argmax())
        count = self.count_G.sum()
        return float(self.head_PLQ[position, step, head] / count) if count else np.nan, self._name(position)

    def _name(self, position: int) -> str:
        return f"key {position + 1}, {Role(int(self.role_PR[position].argmax())).name.lower().replace('_', ' ')}"


def sample_sums(
    batch: Batch, chosen: Chosen, options: Options, positions: PositionSums
) -> dict[str, NDArray[np.generic]]:
    """Sums over the averaged queries of each sample (axis L: measured steps)."""
    samples = batch.samples
    mask = masks(samples, options)
    start_BT = samples.segment_start_NT
    averaged_BT = mask.averaged_BT.astype(np.float64)
    seen_BT = np.maximum(mask.seen_BTS.sum(-1), 1)
    long_B = (samples.length_N >= options.sink_tokens) & (start_BT[:, : options.sink_tokens] == 0).all(-1)
    is_start_BT = mask.token_BT & (np.arange(start_BT.shape[1]) == start_BT)
    kinds_BT2 = np.stack([is_start_BT, mask.token_BT & ~is_start_BT], -1).astype(np.float64)
    by_step: dict[str, list[NDArray[np.float64]]] = {}
    mass_LBQS: list[NDArray[np.float64]] = []
    for step in chosen.steps:
        pattern_BQTS = _of_heads(batch, step, "attn.hook_pattern", chosen.heads)
        part_BPQT = np.einsum("bqts,bpts->bpqt", pattern_BQTS, mask.parts_BPTS)
        null_BQT = 1 - part_BPQT.sum(1)
        norm_BQS = np.linalg.norm(_of_heads(batch, step, "attn.hook_v", chosen.heads), axis=-1).swapaxes(1, 2)
        weighted_BQT = value_weighted_start(part_BPQT[:, 0], pattern_BQTS, norm_BQS, start_BT)
        flat_BQTS = np.broadcast_to(mask.seen_BTS[:, None] / seen_BT[:, None, :, None], pattern_BQTS.shape)
        flat_start_BQT = np.broadcast_to(1 / seen_BT[:, None], null_BQT.shape)
        uniform_BQT = value_weighted_start(flat_start_BQT, flat_BQTS, norm_BQS, start_BT)
        quantity_BMQT = np.concatenate(
            [part_BPQT, np.stack([null_BQT, entropy(pattern_BQTS), weighted_BQT, uniform_BQT], 1)], 1
        )
        resid_BTD = np.abs(np.asarray(batch.sites[step, "hook_resid_pre"], np.float64))
        median_BT = np.maximum(np.median(resid_BTD, -1), np.finfo(np.float32).tiny)
        massive_BTD = (resid_BTD > options.massive_floor) & (resid_BTD > options.massive_ratio * median_BT[..., None])
        norms_BTX = [
            np.linalg.norm(resid_BTD, axis=-1),
            np.linalg.norm(_of_heads(batch, step, "attn.hook_k", chosen.heads), axis=-1).mean(-1),
            norm_BQS.mean(1),
            massive_BTD.sum(-1),
            resid_BTD.max(-1) / median_BT,
        ]
        for name, array in (
            ("quantity", np.einsum("bmqt,bt->bmq", quantity_BMQT, averaged_BT)),
            ("largest_null", np.abs(np.where(mask.token_BT[:, None], null_BQT, 0)).max(-1)),
            ("sink", pattern_BQTS[:, :, : options.sink_tokens, 0].mean(-1) > options.sink_threshold),
            ("channel", resid_BTD[:, 0].argmax(-1)),
            ("norm", np.einsum("btx,btk->bxk", np.stack(norms_BTX, -1), kinds_BT2)),
        ):
            by_step.setdefault(name, []).append(array)
        mass_LBQS.append(np.einsum("bqts,bt->bqs", pattern_BQTS, averaged_BT))
    positions.add(batch, mask, mass_LBQS)
    uniform_BP = np.einsum("bpts,bt->bp", mask.parts_BPTS, averaged_BT / seen_BT)
    return {
        **{name: np.stack(arrays, 1) for name, arrays in by_step.items()},  # (B, L, ...)
        "count": averaged_BT.sum(-1),
        "uniform": np.concatenate([uniform_BP, (averaged_BT * np.log(seen_BT)).sum(-1, keepdims=True)], 1),
        "long": long_B,
        "kinds": kinds_BT2.sum(1),
        "content": (is_content(samples, options) & mask.token_BT).any(-1),
    }
