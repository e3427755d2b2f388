"""Samples and the ones whose number is one less, met in any order: what nulls that compare samples are made of."""

import numpy as np

from cache.batch import Batch, take

MOST_WAITING = 16
"""Samples that are kept until their neighbour is met; those that wait longest go. One run of samples keeps its ends."""

Met = tuple[Batch, Batch]
"""A sample and the one after it, each a batch of one."""


class Neighbours:
    """Samples whose neighbours have not been met."""

    def __init__(self) -> None:
        self._before: dict[int, Batch] = {}
        """By number, those that wait for the one after them."""
        self._after: dict[int, Batch] = {}
        """By number, those that wait for the one before them."""

    @property
    def waiting(self) -> int:
        """Samples that are kept, one that waits for both counted twice."""
        return len(self._before) + len(self._after)

    def add(self, batch: Batch) -> list[Met]:
        """The neighbours that the samples of a batch bring together."""
        met: list[Met] = []
        for index, number in enumerate(batch.sample_ids.tolist()):
            sample = take(batch, np.array([index]))
            met += self._meet({number: sample}, {number: sample})
        return met

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
