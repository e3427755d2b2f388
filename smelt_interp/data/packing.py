"""Packing: documents of different lengths laid end to end in rows of one length, and taken apart again."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.samples import NO_EPISODE, Role, Samples
from smelt_interp.data.tokenizer import PAD
from smelt_interp.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One document: its token ids, BOS included where it has one, and the role of each."""

    ids_T: NDArray[np.int32]
    role_T: NDArray[np.uint8]


def segments(samples: Samples) -> list[Segment]:
    """The documents of rows, in order, padding removed: a document begins where `segment_start_NT` says so."""
    pairs = zip(unpack(samples.ids_NT, samples), unpack(samples.role_NT, samples), strict=True)
    return [Segment(ids_T=ids_T.astype(np.int32), role_T=role_T.astype(np.uint8)) for ids_T, role_T in pairs]


def pack(documents: Iterable[Segment], length: int, domain: bytes) -> Samples:
    """Documents in their order, each in the present row if it still fits whole, else in the next. -> rows of `length`

    Every position holds where its document starts, so attention can stay inside it; a row's tail is padding, each
    position of it a segment of its own. Raises UserError for no documents, an empty one, or one longer than a row.
    """
    rows: list[list[Segment]] = []
    room = 0
    for number, document in enumerate(documents):
        size = len(document.ids_T)
        if not 1 <= size <= length:
            raise UserError(f"a document to pack must have 1 to {length} tokens; got {size} in document {number}")
        if size > room:
            rows.append([])
            room = length
        rows[-1].append(document)
        room -= size
    if not rows:
        raise UserError("documents to pack must be at least one; got 0")
    ids_NT = np.full((len(rows), length), PAD, dtype=np.int32)
    role_NT = np.full((len(rows), length), Role.PAD, dtype=np.uint8)
    segment_start_NT = np.tile(np.arange(length, dtype=np.int32), (len(rows), 1))
    length_N = np.zeros(len(rows), dtype=np.int32)
    for row, row_documents in enumerate(rows):
        start = 0
        for document in row_documents:
            stop = start + len(document.ids_T)
            ids_NT[row, start:stop] = document.ids_T
            role_NT[row, start:stop] = document.role_T
            segment_start_NT[row, start:stop] = start
            start = stop
        length_N[row] = start
    return Samples(
        ids_NT=ids_NT,
        length_N=length_N,
        role_NT=role_NT,
        segment_start_NT=segment_start_NT,
        domain_N=np.full(len(rows), domain, dtype="S16"),
        episode_N=np.full(len(rows), NO_EPISODE),
    )


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
