"""Samples and the ones whose number is one less, met in any order: what nulls that compare samples are made of."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch, take

MOST_WAITING = 16
"""Samples that are kept until their neighbour is met; those that wait longest go. One run of samples keeps its ends."""

Met = tuple[Batch, Batch]
"""Samples, and the one after each of them."""


class Neighbours:
    """Samples whose neighbours have not been met, with the sites that are compared."""

    def __init__(self, suffixes: tuple[str, ...]) -> None:
        self._suffixes = suffixes
        self._before: dict[int, Batch] = {}
        """By number, those that wait for the one after them."""
        self._after: dict[int, Batch] = {}
        """By number, those that wait for the one before them."""

    @property
    def waiting(self) -> int:
        """Samples that are kept, one that waits for both counted twice."""
        return len(self._before) + len(self._after)

    def add(self, batch: Batch) -> list[Met]:
        """The neighbours that the samples of a batch bring together, among themselves and with those that wait."""
        kept = replace(batch, sites={key: x for key, x in batch.sites.items() if key[1] in self._suffixes})
        order_B = np.argsort(batch.sample_ids)
        next_B = np.diff(batch.sample_ids[order_B]) == 1
        inside = [(take(kept, order_B[:-1][next_B]), take(kept, order_B[1:][next_B]))] if next_B.any() else []
        last, first = (order_B[~np.concatenate(ends)] for ends in ((next_B, [False]), ([False], next_B)))
        return inside + self._meet(_by_number(kept, last), _by_number(kept, first))

    def merge(self, other: "Neighbours") -> list[Met]:
        """The neighbours that two runs of samples bring together."""
        return self._meet(other._before, other._after)

    def _meet(self, before: dict[int, Batch], after: dict[int, Batch]) -> list[Met]:
        """Let samples that wait for the one after or before them meet those that wait here; the rest wait on."""
        met: list[Met] = []
        for number, sample in after.items():
            if number - 1 in self._before:
                met.append((self._before.pop(number - 1), sample))
            else:
                self._after[number] = sample
        for number, sample in before.items():
            if number + 1 in self._after:
                met.append((sample, self._after.pop(number + 1)))
            else:
                self._before[number] = sample
        for waiting in (self._before, self._after):
            for number in list(waiting)[:-MOST_WAITING]:
                del waiting[number]
        return met


def _by_number(batch: Batch, which: NDArray[np.intp]) -> dict[int, Batch]:
    return {int(batch.sample_ids[index]): take(batch, np.array([index])) for index in which}
