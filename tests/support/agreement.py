"""How far apart two ways of computing the same logits are, with the first one's routing replayed and without."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.hooks.names import AttentionPath, Hook
from model.kv_cache import KVCache
from model.network import LoopedMoE
from smelt_interp.data.samples import Samples
from smelt_interp.sites import hook_name

Rows = list[Tensor]
"""One tensor a row, positions first, of unequal lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One way of computing against the first way: each row by itself, whole, on the eager path."""

    way: str
    replayed: float
    """Largest difference of a logit with the first way's routing replayed, over the largest |logit|."""
    free: float
    """The same without replay."""
    rerouted: int
    """(token, step) pairs that chose other experts without replay."""
    routed: int
    """(token, step) pairs in all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows stand in the batch of one pass."""

    place: Callable[[Rows], Tensor]
    take: Callable[[Tensor], Rows]


Hooks = Callable[[Layout], list[Hook]]
Way = Callable[[LoopedMoE, Rows, Hooks], Rows]


def agreements(network: LoopedMoE, samples: Samples) -> list[Agreement]:
    """Every way of computing against the first. Rows are cut to unequal lengths, so that batches need padding."""
    rows = [
        torch.from_numpy(ids_T[: int(length) - index % 4]).long()
        for index, (ids_T, length) in enumerate(zip(samples.ids_NT, samples.length_N, strict=True))
    ]
    whole = _one_by_one(network, rows)
    documents = _one_by_one(network, [row[: network.config.context // 2] for row in rows])
    return [
        _compare(network, whole, "batch, padded on the right", _padded_right("eager")),
        _compare(network, whole, "fast attention", _padded_right("fast")),
        _compare(network, whole, "batch, padded on the left", _padded_left(new_tokens=0)),
        _compare(network, whole, "cached generation, padded on the left", _padded_left(new_tokens=4)),
        _compare(network, documents, "documents packed together", _packed("eager")),
        _compare(network, documents, "documents packed together, fast attention", _packed("fast")),
    ]


class _First(NamedTuple):
    """The first way: what each row gives by itself."""

    rows: Rows
    logits: Rows
    chosen: dict[str, Rows]
    """Its experts, by the name of the hook."""


@torch.no_grad()
def _one_by_one(network: LoopedMoE, rows: Rows) -> _First:
    names = [hook_name(step, "mlp.hook_expert_indices") for step in range(len(network.plan))]
    runs = [network.run_with_cache(row[None], names_filter=names) for row in rows]
    chosen = {each: [cache[each][0] for _, cache in runs] for each in names}
    return _First(rows, [logits_BTW[0] for logits_BTW, _ in runs], chosen)


@torch.no_grad()
def _compare(network: LoopedMoE, by_itself: _First, name: str, way: Way) -> Agreement:
    rows, logits, first = by_itself
    names = list(first)
    free: dict[str, Rows] = {each: [row.new_empty(0, network.config.top_k) for row in rows] for each in names}

    def replay(layout: Layout) -> list[Hook]:
        return [(each, lambda chosen_BTK, hook: layout.place(first[hook.name])) for each in names]

    def note(layout: Layout) -> list[Hook]:
        def keep(chosen_BTK: Tensor, hook: torch.nn.Module) -> None:
            pairs = zip(free[hook.name], layout.take(chosen_BTK), strict=True)
            free[hook.name] = [torch.cat(pair) for pair in pairs]

        return [(each, keep) for each in names]

    replayed_logits, free_logits = way(network, rows, replay), way(network, rows, note)
    other = [
        (a.sort(-1).values != b.sort(-1).values).any(-1)
        for each in names
        for a, b in zip(first[each], free[each], strict=True)
    ]
    return Agreement(
        way=name,
        replayed=_difference(logits, replayed_logits),
        free=_difference(logits, free_logits),
        rerouted=sum(int(each.sum()) for each in other),
        routed=sum(each.numel() for each in other),
    )


def _difference(logits: Rows, others: Rows) -> float:
    largest = max(float(each.abs().max()) for each in logits)
    return max(float((a - b).abs().max()) for a, b in zip(logits, others, strict=True)) / largest


def _padded_right(attention: AttentionPath) -> Way:
    def run(network: LoopedMoE, rows: Rows, hooks: Hooks) -> Rows:
        layout = Layout(
            place=lambda each: pad_sequence(each, batch_first=True),
            take=lambda x_BT: [x_T[: len(row)] for x_T, row in zip(x_BT, rows, strict=True)],
        )
        return layout.take(network.run_with_hooks(layout.place(rows), fwd_hooks=hooks(layout), attention=attention))

    return run


def _padded_left(new_tokens: int) -> Way:
    """The last `new_tokens` of each row are read one at a time through a KV cache."""

    def run(network: LoopedMoE, rows: Rows, hooks: Hooks) -> Rows:
        mask_BS = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        length, cache = mask_BS.shape[1], KVCache(len(network.plan)) if new_tokens else None
        parts = []
        for start, stop in pairwise([0, *range(length - new_tokens, length + 1)]):
            layout = _left_slice(rows, start, stop)
            logits_BTW = network.run_with_hooks(
                layout.place(rows), fwd_hooks=hooks(layout), attention_mask_BT=mask_BS[:, :stop], kv_cache=cache
            )
            parts.append(layout.take(logits_BTW))
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    return run


def _left_slice(rows: Rows, start: int, stop: int) -> Layout:
    longest = max(map(len, rows))
    paddings = [max(0, longest - len(row) - start) for row in rows]
    return Layout(
        place=lambda each: pad_sequence(each, batch_first=True, padding_side="left")[:, start:stop],
        take=lambda x_BT: [x_T[padding:] for x_T, padding in zip(x_BT, paddings, strict=True)],
    )


def _packed(attention: AttentionPath) -> Way:
    """Two documents a row."""

    def run(network: LoopedMoE, rows: Rows, hooks: Hooks) -> Rows:
        def place(each: Rows) -> Tensor:
            return pad_sequence([torch.cat(pair) for pair in zip(each[::2], each[1::2], strict=True)], batch_first=True)

        def take(x_BT: Tensor) -> Rows:
            lengths = zip(map(len, rows[::2]), map(len, rows[1::2]), strict=True)
            return [part for x_T, (a, b) in zip(x_BT, lengths, strict=True) for part in (x_T[:a], x_T[a : a + b])]

        starts = [torch.full_like(row, len(rows[i - 1]) if i % 2 else 0) for i, row in enumerate(rows)]
        layout = Layout(place, take)
        return take(
            network.run_with_hooks(
                place(rows), fwd_hooks=hooks(layout), segment_start_BT=place(starts), attention=attention
            )
        )

    return run
