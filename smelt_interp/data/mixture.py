"""The training mixture: which rows a training step sees, as a pure function of the options and the step."""

import hashlib
from dataclasses import dataclass

import numpy as np

from smelt_interp.data.backcopy import backcopy_rows
from smelt_interp.data.dyck import filled_rows
from smelt_interp.data.marked_text import padded
from smelt_interp.data.samples import Samples
from smelt_interp.data.text import Domain, Source, Split, Windows, corpus
from smelt_interp.data.tokenizer import BYTES, Tokenizer
from smelt_interp.errors import UserError

EMPTY_DIGEST = "0" * 64
"""The order digest before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOptions:
    """How many rows of each kind a step has, in the order in which they stand in the batch."""

    context: int = 160
    """Tokens a row, BOS included; every row is full."""
    dyck_episode: int = 5
    """Compact Dyck with closers permuted for each row."""
    dyck_standard: int = 1
    """Compact Dyck with the usual closers."""
    code: int = 2
    prose: int = 1
    math: int = 1
    backcopy: int = 2
    max_total: int = 12
    """Longest bracket sequence; each Dyck row draws its own limit, even, 4 to this."""
    split: Split = "train"
    """Side of the documents."""
    source: Source = "fetched"
    """Where prose and mathematics come from."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.dyck_episode, self.dyck_standard, self.code, self.prose, self.math, self.backcopy)
        if min(counts) < 0 or not sum(counts):
            raise UserError(f"mixture rows must be 0 or more of each kind and at least 1 in all; got {counts}")
        if self.context < 2:
            raise UserError(f"mixture context must be at least 2 tokens; got {self.context}")
        if self.max_total % 2 or not 4 <= self.max_total <= 100:
            raise UserError(f"mixture max_total must be even, 4 to 100; got {self.max_total}")
        if self.seed < 0:
            raise UserError(f"mixture seed must be 0 or above; got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRecord:
    """What a training run read of one domain: enough to tell whether another run read the same."""

    domain: str
    documents: int
    bytes: int
    digest: str


class TrainingMixture:
    """Batches of training rows; the same options and texts give the same rows at each step, on every machine."""

    def __init__(self, options: MixtureOptions, tokenizer: Tokenizer = BYTES) -> None:
        """Reads the texts. Raises UserError when they are missing or too short for the context."""
        self.options = options
        wanted: dict[Domain, int] = {"code": options.code, "prose": options.prose, "math": options.math}
        corpora = {domain: corpus(domain, options.split, options.source) for domain in wanted if wanted[domain]}
        self.corpora = tuple(
            CorpusRecord(domain=domain, documents=len(texts.documents), bytes=texts.num_bytes(), digest=texts.digest())
            for domain, texts in corpora.items()
        )
        self._tokenizer = tokenizer
        self._text = [(wanted[domain], Windows(texts, options.context, tokenizer)) for domain, texts in corpora.items()]

    def batch(self, step: int) -> Samples:
        """The rows of a step (counted from 0), each exactly `context` tokens, BOS first."""
        o = self.options
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([o.seed, step])))
        rows = [
            *filled_rows(o.dyck_episode, o.context, "episode", o.max_total, generator, self._tokenizer),
            *filled_rows(o.dyck_standard, o.context, "standard", o.max_total, generator, self._tokenizer),
        ]
        for num, windows in self._text:
            rows += windows.draw(generator.random(num))
        rows += backcopy_rows(o.backcopy, o.context, generator, self._tokenizer)
        return padded(rows, self._tokenizer)

    def order_digest(self, num_steps: int) -> str:
        """The digest of the token order of the first `num_steps` steps."""
        digest = EMPTY_DIGEST
        for step in range(num_steps):
            digest = extend(digest, self.batch(step))
        return digest


def extend(digest: str, samples: Samples) -> str:
    """The order digest after one more batch: SHA-256 of the digest so far and the ids (int32, little-endian)."""
    return hashlib.sha256(bytes.fromhex(digest) + samples.ids_NT.astype("<i4").tobytes()).hexdigest()
