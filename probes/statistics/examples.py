"""The few tokens that stand for a cell best, with the text around them, of any number of samples in bounded memory."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.samples import Samples

MARKS = "⟦", "⟧"
"""Around the token in its text."""


class Examples(NamedTuple):
    """For each cell (..., M) the tokens of the M highest scores, highest first; a score of -inf is none."""

    score: NDArray[np.float64]
    sample: NDArray[np.int64]
    """Number of the sample, from 0."""
    position: NDArray[np.int64]
    text: NDArray[np.object_]

    def best(self, most: int) -> "Examples":
        """The highest scores of each cell, the earlier sample first where two are equal."""
        order = np.lexsort((self.sample, -self.score), axis=-1)[..., :most]
        return Examples._make(np.take_along_axis(x, order, -1) for x in self)

    def merged(self, other: "Examples") -> "Examples":
        """The best of both."""
        both = Examples._make(np.concatenate(pair, -1) for pair in zip(self, other, strict=True))
        return both.best(self.score.shape[-1])


def best_of_samples(
    score_BTU: NDArray[np.float64], samples: Samples, sample_ids: NDArray[np.int64], most: int, around: int
) -> Examples:
    """For each of U cells its best token in each of the `most` best samples, with `around` tokens either side.

    Scores of -inf are no tokens. The text stays within the token's document. -> (U, most)
    """
    few = ((0, 0), (0, max(0, most - len(samples))))
    score_UB = np.pad(score_BTU.max(1).T, few, constant_values=-np.inf)
    position_UB = np.pad(score_BTU.argmax(1).T, few)
    row_UB = np.pad(np.broadcast_to(np.arange(len(samples)), score_BTU.max(1).T.shape), few)
    found = Examples(score_UB, sample_ids[row_UB], position_UB, row_UB.astype(object)).best(most)
    # The texts of those that stay, in place of their rows.
    there = found.score > -np.inf
    labels = {row: samples.labels(row) for row in sorted(set(found.text[there].tolist()))}
    for at in np.ndindex(there.shape):
        row, position = found.text[at], int(found.position[at])
        found.text[at] = ""
        if there[at]:
            first = max(int(samples.segment_start_NT[row, position]), position - around)
            same = samples.segment_start_NT[row] == samples.segment_start_NT[row, position]
            last = min(int(np.flatnonzero(same)[-1]) + 1, int(samples.length_N[row]), position + around + 1)
            before, after = "".join(labels[row][first:position]), "".join(labels[row][position + 1 : last])
            found.text[at] = f"{before}{MARKS[0]}{labels[row][position]}{MARKS[1]}{after}"
    return found


def stacked_examples(found: Sequence[Examples]) -> Examples:
    """Those of several positions, on a new first axis."""
    return Examples._make(np.stack(arrays) for arrays in zip(*found, strict=True))


def token_labels(samples: Samples, vocab_size: int) -> Examples:
    """What each id that occurs is called: `samples.labels` of its first place. -> (vocab_size, 1)"""
    num_tokens = samples.ids_NT.shape[1]
    ids_M, at_M = np.unique(samples.ids_NT, return_index=True)
    labels = {row: samples.labels(row) for row in sorted(set((at_M // num_tokens).tolist()))}
    score, text = np.full((vocab_size, 1), -np.inf), np.full((vocab_size, 1), "", object)
    for token, at in zip(ids_M.tolist(), at_M.tolist(), strict=True):
        row, position = divmod(at, num_tokens)
        score[token], text[token] = 0.0, labels[row][position]
    nowhere = np.zeros((vocab_size, 1), np.int64)
    return Examples(score, nowhere, nowhere, text)
