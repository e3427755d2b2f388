"""Keys and values of tokens already read, one slot for each step of the plan: a looped layer has one a visit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """Rotated keys and values by step index, (B, S, G, C) each, growing along S.

    A slot has room for more tokens than it holds, so that a token is written and nothing is copied; it doubles when it
    is full. Keys that want a gradient are joined instead: a write would take the graph from what was read before.
    """

    def __init__(self, num_steps: int, *, capacity: int = 0) -> None:
        """capacity: tokens that every slot has room for from the start."""
        self._capacity = capacity
        self._rooms: list[tuple[Tensor, Tensor] | None] = [None] * num_steps
        self._lengths = [0] * num_steps

    @classmethod
    def holding(cls, rooms: Sequence[tuple[Tensor, Tensor]], length: int) -> "KVCache":
        """The first `length` tokens of given keys and values, one pair (B, S, G, C) a step, which are written on."""
        cache = cls(len(rooms))
        cache._rooms, cache._lengths = list(rooms), [length] * len(rooms)
        return cache

    @property
    def num_steps(self) -> int:
        """Slots, filled or not."""
        return len(self._rooms)

    @property
    def batch(self) -> int:
        """Rows held; 0 before the first pass."""
        first = self._rooms[0]
        return 0 if first is None else first[0].shape[0]

    @property
    def length(self) -> int:
        """Tokens held so far."""
        return self._lengths[0]

    def append(self, step: int, k_BTGC: Tensor, v_BTGC: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values to a step's slot and return all of them, (B, S, G, C)."""
        start = self._lengths[step]
        stop = start + k_BTGC.shape[1]
        room = self._rooms[step]
        if k_BTGC.requires_grad or v_BTGC.requires_grad or (room is not None and room[0].requires_grad):
            held = (k_BTGC[:, :0], v_BTGC[:, :0]) if room is None else (room[0][:, :start], room[1][:, :start])
            room = torch.cat((held[0], k_BTGC), 1), torch.cat((held[1], v_BTGC), 1)
        else:
            if room is None or room[0].shape[1] < stop:
                room = self._larger(room, start, stop, k_BTGC)
            room[0][:, start:stop], room[1][:, start:stop] = k_BTGC, v_BTGC
        self._rooms[step], self._lengths[step] = room, stop
        return room[0][:, :stop], room[1][:, :stop]

    def _larger(
        self, room: tuple[Tensor, Tensor] | None, held: int, stop: int, like_BTGC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A slot with room for `stop` tokens at least, and for twice as many as it held, what it holds copied."""
        batch, _, heads, width = like_BTGC.shape
        capacity = max(stop, self._capacity, 2 * held)
        k_BSGC, v_BSGC = (like_BTGC.new_empty(batch, capacity, heads, width) for _ in "kv")
        if room is not None:
            k_BSGC[:, :held], v_BSGC[:, :held] = room[0][:, :held], room[1][:, :held]
        return k_BSGC, v_BSGC

    @contextmanager
    def whole_pass(self, *, keep: bool = True) -> Iterator[None]:
        """A pass that adds its tokens to every slot or, when it ends in an exception or is not to be kept, to none."""
        rooms, lengths = list(self._rooms), list(self._lengths)
        try:
            yield
        except BaseException:  # whatever ends the pass, Ctrl-C too, leaves the slots as they were
            self._rooms, self._lengths = rooms, lengths
            raise
        if not keep:
            self._rooms, self._lengths = rooms, lengths
