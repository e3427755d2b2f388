"""Packing: documents of different lengths laid end to end in rows of one length, and taken apart again."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.marked_text import Row, Tokens, padded
from smelt_interp.data.samples import NO_EPISODE, Samples
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError


def pack(documents: Iterable[Row], length: int, tokenizer: Tokenizer) -> Samples:
    """Documents in their order, each in the present row if it still fits whole, else in the next. -> rows of `length`

    Every position holds where its document starts, so attention can stay inside it; a row's tail is padding, each
    position of it a segment of its own. Domain and document of a row are those of its first. Raises UserError for no
    documents, an empty one, or one longer than a row.
    """
    together: list[list[Row]] = []
    room = 0
    for number, document in enumerate(documents):
        size = len(document.tokens.ids_T)
        if not 1 <= size <= length:
            raise UserError(f"a document to pack must have 1 to {length} tokens; got {size} in document {number}")
        if size > room:
            together.append([])
            room = length
        together[-1].append(document)
        room -= size
    if not together:
        raise UserError("documents to pack must be at least one; got 0")
    rows, starts = [], []
    for parts in together:
        sizes = [len(part.tokens.ids_T) for part in parts]
        starts.append(np.concatenate((np.repeat(np.cumsum([0, *sizes[:-1]]), sizes), np.arange(sum(sizes), length))))
        ids_T, role_T = (np.concatenate(arrays) for arrays in zip(*(part.tokens for part in parts), strict=True))
        rows.append(Row(Tokens(ids_T, role_T), replace(parts[0].source, episode=NO_EPISODE)))
    return replace(padded(rows, tokenizer, length), segment_start_NT=np.stack(starts).astype(np.int32))


def unpack(values_NT: NDArray[np.generic], samples: Samples) -> list[NDArray[np.generic]]:
    """Per-token values of packed rows, e.g. log-probabilities, cut into one array a document, in order.

    values_NT may have more axes after the token axis. The inverse of `pack` when given `samples.ids_NT`.
    """
    if values_NT.shape[:2] != samples.ids_NT.shape:
        raise UserError(f"values to unpack must have one entry a token {samples.ids_NT.shape}; got {values_NT.shape}")
    found = []
    for row, length in enumerate(samples.length_N.tolist()):
        starts = np.unique(samples.segment_start_NT[row, :length]).tolist()
        found += [values_NT[row, start:stop] for start, stop in zip(starts, [*starts[1:], length], strict=True)]
    return found
