"""Keys and values of tokens already read, one slot for each step of the plan: a looped layer has one a visit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """Rotated keys and values by step index, (B, S, G, C) each, growing along S."""

    def __init__(self, num_steps: int) -> None:
        self.k_BSGC: list[Tensor | None] = [None] * num_steps
        self.v_BSGC: list[Tensor | None] = [None] * num_steps

    @property
    def num_steps(self) -> int:
        """Slots, filled or not."""
        return len(self.k_BSGC)

    @property
    def batch(self) -> int:
        """Rows held; 0 before the first pass."""
        first = self.k_BSGC[0]
        return 0 if first is None else first.shape[0]

    @property
    def length(self) -> int:
        """Tokens held so far."""
        first = self.k_BSGC[0]
        return 0 if first is None else first.shape[1]

    def append(self, step: int, k_BTGC: Tensor, v_BTGC: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values to a step's slot and return all of them, (B, S, G, C)."""
        old_k_BSGC, old_v_BSGC = self.k_BSGC[step], self.v_BSGC[step]
        k_BSGC = k_BTGC if old_k_BSGC is None else torch.cat((old_k_BSGC, k_BTGC), 1)
        v_BSGC = v_BTGC if old_v_BSGC is None else torch.cat((old_v_BSGC, v_BTGC), 1)
        self.k_BSGC[step], self.v_BSGC[step] = k_BSGC, v_BSGC
        return k_BSGC, v_BSGC

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """A pass that adds its tokens to every slot or, when it ends in an exception, to none."""
        k_before, v_before = list(self.k_BSGC), list(self.v_BSGC)
        try:
            yield
        except BaseException:
            self.k_BSGC, self.v_BSGC = k_before, v_before
            raise
