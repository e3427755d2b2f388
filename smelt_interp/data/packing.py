"""Packing: documents of different lengths laid end to end in rows of one length, and taken apart again."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.marked_text import Row, Tokens, joined_tokens, padded, tokens_of, with_bos
from smelt_interp.data.samples import NO_EPISODE, Role, Samples
from smelt_interp.data.text import Corpus
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
    rows = []
    for parts in together:
        first = np.cumsum([0, *(len(part.tokens.ids_T) for part in parts)]).tolist()
        starts = (*first[:-1], *range(first[-1], length))
        rows.append(
            Row(joined_tokens([part.tokens for part in parts]), replace(parts[0].source, episode=NO_EPISODE), starts)
        )
    return padded(rows, tokenizer, length)


class PackedText:
    """A corpus as rows of one length without end, for training: every document once an epoch, in an order of its own.

    Documents, each behind its BOS and before its EOS where the tokenizer has them, are laid end to end and cut into
    rows; what is cut off goes on in the next row as a segment of its own. Row r depends on the seed and r alone.
    """

    def __init__(self, texts: Corpus, length: int, seed: int, tokenizer: Tokenizer) -> None:
        """Raises UserError for texts that do not fill one row."""
        sources = [document.marked(texts.domain) for document in texts.documents]
        self._documents = [(_whole(tokens_of(source, tokenizer), tokenizer), source) for source in sources]
        self._sizes = np.array([len(tokens.ids_T) for tokens, _ in self._documents], dtype=np.int64)
        self._length, self._seed = length, seed
        self.rows_per_epoch = int(self._sizes.sum()) // length
        if not self.rows_per_epoch:
            raise UserError(
                f"texts of {texts.domain} must fill a row of {length} tokens; got {int(self._sizes.sum())} in "
                f"{len(self._sizes)} documents"
            )

    def rows(self, first: int, num: int) -> list[Row]:
        """The rows first, first + 1, ... of the run, counted from 0."""
        return [self._row(*divmod(number, self.rows_per_epoch)) for number in range(first, first + num)]

    def _row(self, epoch: int, place: int) -> Row:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        order = generator.permutation(len(self._sizes))
        ends = np.cumsum(self._sizes[order])
        start, stop = place * self._length, (place + 1) * self._length
        # The documents that have a token in the row, the first and the last of them perhaps in part.
        chosen = range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop) + 1)
        parts, starts = [], []
        for index in chosen:
            ids_T, role_T = self._documents[order[index]][0]
            begin = int(ends[index]) - len(ids_T)
            part = slice(max(start - begin, 0), stop - begin)
            parts.append(Tokens(ids_T[part], role_T[part]))
            starts.append(max(begin - start, 0))
        return Row(joined_tokens(parts), self._documents[order[chosen[0]]][1], tuple(starts))


def _whole(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """A document from its BOS to its EOS."""
    tokens = with_bos(tokens, tokenizer)
    if tokenizer.eos_id is None:
        return tokens
    end = Tokens(np.array([tokenizer.eos_id], dtype=np.int32), np.array([Role.TEXT], dtype=np.uint8))
    return joined_tokens([tokens, end])


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
