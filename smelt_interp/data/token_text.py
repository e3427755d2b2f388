"""The text of tokens: each one's own bytes, laid end to end, so that what it is never has to be read off an id."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError

TokenClass = Literal["brackets", "opening", "closing", "letters", "digits", "punctuation", "whitespace", "newline"]
_MEMBERS: dict[TokenClass, bytes] = {
    "brackets": b"()[]{}<>",
    "opening": b"([{<",
    "closing": b")]}>",
    "letters": bytes([*range(65, 91), *range(97, 123)]),
    "digits": b"0123456789",
    "punctuation": b"!\"#$%&'*+,-./:;=?@\\^_`|~",
    "whitespace": b" \t\n\r",
    "newline": b"\n\r",
}

SPECIAL = "<special>"
"""The label of a token without text."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """The bytes of a number of tokens; token i has `data[offsets[i] : offsets[i + 1]]`, which may be none."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    """One more than there are tokens; begins with 0, never falls, ends with the number of bytes."""

    def __post_init__(self) -> None:
        offsets = self.offsets
        if not offsets.ndim == self.data.ndim == 1 or not len(offsets):
            raise UserError(f"token text must be two rows, bytes and offsets; got {self.data.shape}, {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != len(self.data) or (np.diff(offsets) < 0).any():
            raise UserError(f"offsets of token text must rise from 0 to its {len(self.data)} bytes; got {offsets[-1]}")

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> Self:
        """The text of tokens given one by one."""
        lengths = np.array([len(token) for token in tokens], dtype=np.int64)
        return cls(np.frombuffer(b"".join(tokens), np.uint8), np.concatenate(([0], np.cumsum(lengths))))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def take(self, index_N: NDArray[np.integer]) -> Self:
        """The text of the chosen tokens, in that order; one may be chosen often."""
        lengths_N = np.diff(self.offsets)[index_N]
        offsets = np.concatenate(([0], np.cumsum(lengths_N)))
        source = np.repeat(self.offsets[index_N] - offsets[:-1], lengths_N) + np.arange(offsets[-1])
        return type(self)(self.data[source], offsets)

    def label(self, index: int) -> str:
        """A visible label of one token; a special one has no text, nor has an id behind the last."""
        text = self[index] if index < len(self) else b""
        return label(text) if text else SPECIAL

    def is_class(self, name: TokenClass) -> NDArray[np.bool_]:
        """Which tokens are of a class: some of its characters, and beside them nothing but white space. -> (N,)

        So ` (` is a bracket as `(` is, `()` is a bracket that neither opens nor closes, and a token of white space is a
        newline when it holds one. Letters are ASCII letters. Raises UserError for a class of no known name.
        """
        if name not in get_args(TokenClass):
            raise UserError(f"a token class must be one of {', '.join(get_args(TokenClass))}; got {name}")
        member, blank = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
        member[np.frombuffer(_MEMBERS[name], np.uint8)] = True
        blank[np.frombuffer(_MEMBERS["whitespace"], np.uint8)] = True
        holds_N = self._count(member) > 0
        pure_N = self._count(member | blank) == np.diff(self.offsets)
        both_N: NDArray[np.bool_] = holds_N & pure_N
        return both_N

    def _count(self, table: NDArray[np.bool_]) -> NDArray[np.int64]:
        """How many bytes of each token are in a table of bytes. -> (N,)"""
        total = np.concatenate(([0], np.cumsum(table[self.data], dtype=np.int64)))
        count_N: NDArray[np.int64] = np.diff(total[self.offsets])
        return count_N


def label(token: bytes) -> str:
    """A visible label of a token's text for axes and tables: the characters, `\\n`, `\\x1b`; a space is `␣`."""
    try:
        text = token.decode()
    except UnicodeDecodeError:  # part of a character
        text = token.decode("latin-1")
        return "".join("␣" if c == " " else c if " " < c < "\x7f" else f"\\x{ord(c):02x}" for c in text)
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text)
