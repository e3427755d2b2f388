"""Token sequences with what each token is: the one form in which data enters training, captures and probes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

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


EPISODE = np.dtype(
    [
        ("shots", np.int16),
        ("depth", np.int16),
        ("answer_length", np.int16),
        ("episode_pairing", np.bool_),
        ("pair_shown", np.bool_),
    ]
)
"""One Dyck episode: shots before the query, bracket depth of the query, closers in its answer, whether closers were
permuted for the episode, and whether the query's own prefix already shows a pair that the answer needs. Rows that
are not Dyck episodes have shots = -1."""

NO_EPISODE = np.array((-1, 0, 0, False, False), dtype=EPISODE)


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def __post_init__(self) -> None:
        num_rows, num_tokens = self.ids_NT.shape
        for name in ("role_NT", "segment_start_NT"):
            if getattr(self, name).shape != (num_rows, num_tokens):
                raise UserError(f"{name} must have the shape of ids_NT; got {getattr(self, name).shape}")
        for name in ("length_N", "domain_N", "episode_N"):
            if getattr(self, name).shape != (num_rows,):
                raise UserError(f"{name} must have one entry a row ({num_rows}); got {getattr(self, name).shape}")

    def __len__(self) -> int:
        return len(self.ids_NT)

    def rows(self, which: slice | NDArray[np.intp]) -> Self:
        """The chosen rows, in that order."""
        return type(self)(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def digest(self) -> str:
        """SHA-256 over every array, its shape and its type: equal exactly when the samples are."""
        sha = hashlib.sha256()
        for field in fields(self):
            array = np.ascontiguousarray(getattr(self, field.name))
            sha.update(f"{field.name}:{array.dtype.descr}:{array.shape};".encode())
            sha.update(array.tobytes())
        return sha.hexdigest()


def concatenate(parts: Sequence[Samples], pad_id: int) -> Samples:
    """All rows of several `Samples`, padded with `pad_id` on the right to the longest."""
    if not parts:
        raise UserError("samples to concatenate must be at least one; got 0")
    longest = max(part.ids_NT.shape[1] for part in parts)

    def widened(array_NT: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
        return np.pad(array_NT, ((0, 0), (0, longest - array_NT.shape[1])), constant_values=fill)

    return Samples(
        ids_NT=np.concatenate([widened(part.ids_NT, pad_id) for part in parts]).astype(np.int32),
        length_N=np.concatenate([part.length_N for part in parts]),
        role_NT=np.concatenate([widened(part.role_NT, Role.PAD) for part in parts]).astype(np.uint8),
        segment_start_NT=np.concatenate([widened(part.segment_start_NT, 0) for part in parts]).astype(np.int32),
        domain_N=np.concatenate([part.domain_N for part in parts]),
        episode_N=np.concatenate([part.episode_N for part in parts]),
    )
