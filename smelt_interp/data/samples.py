"""Token sequences with what each token is: the one form in which data enters training, captures and probes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.token_text import SPECIAL, TokenClass, TokenText, label
from smelt_interp.errors import UserError


class Role(IntEnum):
    """What a token is to the reader of its sequence."""

    PAD = 0
    BOS = 1
    INSTRUCTION = 2
    DEMONSTRATION_INPUT = 3
    DEMONSTRATION_ANSWER = 4
    QUERY = 5
    ANSWER = 6
    TEXT = 7


def role_name(role: Role) -> str:
    """`demonstration answer`: a role as a person reads it."""
    return role.name.lower().replace("_", " ")


class Episode(NamedTuple):
    """What a Dyck row asks; the defaults are those of a row that is no Dyck episode."""

    shots: int = -1
    """Demonstrations before the query."""
    depth: int = 0
    """Bracket depth of the query."""
    answer_length: int = 0
    """Closers in its answer."""
    episode_pairing: bool = False
    """Whether closers were permuted for the episode."""
    pair_shown: bool = False
    """Whether the query's own prefix already shows a pair that the answer needs."""


EPISODE = np.dtype(
    [
        ("shots", np.int16),
        ("depth", np.int16),
        ("answer_length", np.int16),
        ("episode_pairing", np.bool_),
        ("pair_shown", np.bool_),
    ]
)
"""The fields of `Episode` as they are stored."""

NO_EPISODE = Episode()


DOMAIN_WIDTH = 16
"""Letters that the name of a domain may have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """N sequences of T tokens, padded on the right.

    segment_start_NT holds, for each position, the position at which its document begins: attention never crosses
    it. A row of one document has 0 everywhere.
    """

    ids_NT: NDArray[np.int32]
    length_N: NDArray[np.int32]
    role_NT: NDArray[np.uint8]
    segment_start_NT: NDArray[np.int32]
    domain_N: NDArray[np.bytes_]
    """Domain name of each row, ASCII, e.g. b"dyck" or b"code"."""
    episode_N: NDArray[np.void]
    """Records of dtype EPISODE."""
    document_N: NDArray[np.int64]
    """What is independent, by `document_id`: rows that share it are windows of one document, or ask one Dyck query
    after different numbers of shots."""
    text: TokenText
    """Every token's own bytes, row after row, N * T tokens; padding and special tokens have none."""

    def __post_init__(self) -> None:
        num_rows, num_tokens = self.ids_NT.shape
        for name in ("role_NT", "segment_start_NT"):
            if getattr(self, name).shape != (num_rows, num_tokens):
                raise UserError(f"{name} must have the shape of ids_NT; got {getattr(self, name).shape}")
        for name in ("length_N", "domain_N", "episode_N", "document_N"):
            if getattr(self, name).shape != (num_rows,):
                raise UserError(f"{name} must have one entry a row ({num_rows}); got {getattr(self, name).shape}")
        domains = np.unique(self.domain_N).tolist()
        if bad := [domain for domain in domains if not (domain.isascii() and domain.decode().isprintable())]:
            raise UserError(f"a domain must be printable ASCII; got {bad[0]!r}")
        if len(self.text) != num_rows * num_tokens:
            raise UserError(f"text must have one entry a token ({num_rows * num_tokens}); got {len(self.text)}")

    def __len__(self) -> int:
        return len(self.ids_NT)

    @property
    def num_documents(self) -> int:
        """How many of the rows are independent: different documents, different Dyck queries."""
        return len(np.unique(self.document_N))

    def rows(self, which: slice | NDArray[np.intp]) -> Self:
        """The chosen rows, in that order."""
        arrays = {field.name: getattr(self, field.name)[which] for field in fields(self) if field.name != "text"}
        token_NT = np.arange(self.ids_NT.size).reshape(self.ids_NT.shape)[which]
        return type(self)(**arrays, text=self.text.take(token_NT.ravel()))

    def digest(self) -> str:
        """SHA-256 over every array, its shape and its type: equal exactly when the samples are."""
        sha = hashlib.sha256()
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "text"}
        for name, value in (arrays | {"text": self.text.data, "text_offsets": self.text.offsets}).items():
            array = np.ascontiguousarray(value)
            sha.update(f"{name}:{array.dtype.descr}:{array.shape};".encode())
            sha.update(array.tobytes())
        return sha.hexdigest()

    def row_text(self, row: int) -> list[bytes]:
        """The bytes of each token of a row, padding included."""
        num_tokens = self.ids_NT.shape[1]
        return [self.text[row * num_tokens + position] for position in range(num_tokens)]

    def labels(self, row: int) -> tuple[str, ...]:
        """A visible label for each token of a row, padding included; those without text say what they are."""
        roles = self.role_NT[row].tolist()
        names = {Role.BOS: "<bos>", Role.PAD: "<pad>"}
        texts = zip(self.row_text(row), roles, strict=True)
        return tuple(label(text) if text else names.get(Role(role), SPECIAL) for text, role in texts)


def token_class(samples: Samples, name: TokenClass) -> NDArray[np.bool_]:
    """Which tokens are of a class, read from their text: see `TokenText.is_class`. -> (N, T)"""
    return samples.text.is_class(name).reshape(samples.ids_NT.shape)


def document_id(domain: str, name: str) -> int:
    """The number by which a document is known wherever it is read: 63 bits of the SHA-256 of domain and name."""
    digest = hashlib.sha256(f"{domain}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def concatenate(parts: Sequence[Samples], pad_id: int) -> Samples:
    """All rows of several `Samples`, padded with `pad_id` on the right to the longest."""
    if not parts:
        raise UserError("samples to concatenate must be at least one; got 0")
    longest = max(part.ids_NT.shape[1] for part in parts)

    def widened(array_NT: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
        return np.pad(array_NT, ((0, 0), (0, longest - array_NT.shape[1])), constant_values=fill)

    text_lengths = [widened(np.diff(part.text.offsets).reshape(part.ids_NT.shape), 0).ravel() for part in parts]
    return Samples(
        ids_NT=np.concatenate([widened(part.ids_NT, pad_id) for part in parts]).astype(np.int32),
        length_N=np.concatenate([part.length_N for part in parts]),
        role_NT=np.concatenate([widened(part.role_NT, Role.PAD) for part in parts]).astype(np.uint8),
        segment_start_NT=np.concatenate([widened(part.segment_start_NT, 0) for part in parts]).astype(np.int32),
        domain_N=np.concatenate([part.domain_N for part in parts]),
        episode_N=np.concatenate([part.episode_N for part in parts]),
        document_N=np.concatenate([part.document_N for part in parts]),
        text=TokenText(
            np.concatenate([part.text.data for part in parts]),
            np.concatenate(([0], np.cumsum(np.concatenate(text_lengths), dtype=np.int64))),
        ),
    )
