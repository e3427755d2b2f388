"""Text with roles on its characters, and how a network's own tokenizer makes rows of tokens of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.samples import DOMAIN_WIDTH, EPISODE, NO_EPISODE, Episode, Role, Samples
from smelt_interp.data.tokenizer import Encoding, Tokenizer, padding_id, text_of
from smelt_interp.errors import UserError


class Span(NamedTuple):
    """A role for the characters from `start` to before `stop`, counted from 0."""

    start: int
    stop: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """One text and what it is; characters outside the spans are plain text."""

    text: str
    spans: tuple[Span, ...] = ()
    document: int
    """By `document_id`: what is independent of other texts."""
    domain: str
    """Printable ASCII."""
    episode: Episode = NO_EPISODE

    def __post_init__(self) -> None:
        if not 1 <= len(self.domain) <= DOMAIN_WIDTH or not (self.domain.isascii() and self.domain.isprintable()):
            raise UserError(f"a domain must be 1 to {DOMAIN_WIDTH} printable ASCII letters; got {self.domain!r:.80}")


class Tokens(NamedTuple):
    """A run of tokens and the role of each."""

    ids_T: NDArray[np.int32]
    role_T: NDArray[np.uint8]


class Row(NamedTuple):
    """One row of samples before it is padded, and the text that it is of."""

    tokens: Tokens
    source: MarkedText
    starts: tuple[int, ...] = (0,)
    """Positions at which documents begin; attention stays inside each."""


def joined(parts: Iterable[tuple[str, Role]]) -> tuple[str, tuple[Span, ...]]:
    """The text of parts that follow one another, and their spans."""
    texts, spans, start = [], [], 0
    for text, role in parts:
        texts.append(text)
        spans.append(Span(start, start + len(text), role))
        start += len(text)
    return "".join(texts), tuple(spans)


def roles_of(encoding: Encoding, text: str, spans: Iterable[Span]) -> NDArray[np.uint8]:
    """The role of each token of a text: that of its last character.

    A token is predicted as a whole, so one that begins in a question and ends in the answer is of the answer.
    """
    role_of_character = np.full(len(text) + 1, Role.TEXT, dtype=np.uint8)
    for start, stop, role in spans:
        role_of_character[start:stop] = role
    return role_of_character[np.maximum(encoding.stop_T - 1, encoding.start_T)]


def tokens_of(source: MarkedText, tokenizer: Tokenizer) -> Tokens:
    """The tokens of a text, no special one among them."""
    encoding = tokenizer.encode(source.text)
    return Tokens(encoding.ids_T, roles_of(encoding, source.text, source.spans))


def joined_tokens(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of parts that follow one another."""
    return Tokens(np.concatenate([part.ids_T for part in parts]), np.concatenate([part.role_T for part in parts]))


def with_bos(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """The tokens after a BOS, or as they are for a tokenizer that has none."""
    if tokenizer.bos_id is None:
        return tokens
    ids_T = np.concatenate(([tokenizer.bos_id], tokens.ids_T)).astype(np.int32)
    return Tokens(ids_T, np.concatenate(([Role.BOS], tokens.role_T)).astype(np.uint8))


def padded(rows: list[Row], tokenizer: Tokenizer, length: int = 0) -> Samples:
    """The rows as samples, padded on the right to the longest or to `length`."""
    if not rows:
        raise UserError("text must hold at least one token; got none")
    length_N = np.array([len(row.tokens.ids_T) for row in rows], dtype=np.int32)
    ids_NT = np.full((len(rows), max(length, length_N.max())), padding_id(tokenizer), dtype=np.int32)
    role_NT = np.full(ids_NT.shape, Role.PAD, dtype=np.uint8)
    start_NT = np.zeros_like(ids_NT)
    for number, (tokens, _, starts) in enumerate(rows):
        ids_NT[number, : len(tokens.ids_T)], role_NT[number, : len(tokens.role_T)] = tokens
        start_NT[number, list(starts)] = starts
    return Samples(
        ids_NT=ids_NT,
        length_N=length_N,
        role_NT=role_NT,
        segment_start_NT=np.maximum.accumulate(start_NT, axis=1),
        domain_N=np.array([row.source.domain.encode() for row in rows], dtype=f"S{DOMAIN_WIDTH}"),
        episode_N=np.array([row.source.episode for row in rows], dtype=EPISODE),
        document_N=np.array([row.source.document for row in rows], dtype=np.int64),
        text=text_of(tokenizer, ids_NT, length_N),
    )
