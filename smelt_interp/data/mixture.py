"""The training mixture: which rows a training step sees, as a pure function of the options and the step."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from smelt_interp.data.backcopy import backcopy_rows
from smelt_interp.data.dyck import Total, filled_rows
from smelt_interp.data.marked_text import padded
from smelt_interp.data.packing import PackedText
from smelt_interp.data.samples import Samples
from smelt_interp.data.text import Domain, Source, Split, Windows, corpus, own_corpus, split_corpus
from smelt_interp.data.tokenizer import BYTES, Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.validation import Seed, validated

EMPTY_DIGEST = "0" * 64
"""The order digest before the first step."""


Rows = Annotated[int, Field(ge=0, le=10**6)]


@validated
class MixtureOptions:
    """How many rows of each kind a step has, in the order in which they stand in the batch."""

    context: Annotated[int, Field(ge=2, le=10**6)] = 160
    """Tokens a row, BOS included; every row is full."""
    dyck_episode: Rows = 5
    """Compact Dyck with closers permuted for each row."""
    dyck_standard: Rows = 1
    """Compact Dyck with the usual closers."""
    code: Rows = 2
    prose: Rows = 1
    math: Rows = 1
    backcopy: Rows = 2
    text: tuple[str, ...] = ()
    """Files or folders of text, each a domain: documents packed end to end, every one once an epoch."""
    text_rows: Rows = 1
    """Rows of each of these."""
    max_total: Total = 12
    """Longest bracket sequence; each Dyck row draws its own limit, even, 4 to this."""
    split: Split = "train"
    """Side of the documents."""
    source: Source = "fetched"
    """Where prose and mathematics come from."""
    seed: Seed = 0

    def __post_init__(self) -> None:
        own = self.text_rows * len(self.text)
        if not sum((self.dyck_episode, self.dyck_standard, self.code, self.prose, self.math, self.backcopy, own)):
            raise UserError("mixture rows must be at least 1 in all; got 0 of every kind")


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
        own = {path: split_corpus(own_corpus(Path(path)), options.split) for path in options.text}
        for path, texts in own.items():
            if not texts.documents:
                raise UserError(
                    f"{path} must have documents to train on and others held out; got none of the {options.split} "
                    "side: give a folder of more files, each a document"
                )
        self.corpora = tuple(
            CorpusRecord(
                domain=texts.domain, documents=len(texts.documents), bytes=texts.num_bytes(), digest=texts.digest()
            )
            for texts in (*corpora.values(), *own.values())
        )
        self.tokenizer = tokenizer
        self._text = [(wanted[domain], Windows(texts, options.context, tokenizer)) for domain, texts in corpora.items()]

        self._own = [PackedText(texts, options.context, options.seed, tokenizer) for texts in own.values()]

    def batch(self, step: int) -> Samples:
        """The rows of a step (counted from 0), each exactly `context` tokens; one document a row, BOS first, but for
        packed text."""
        o = self.options
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([o.seed, step])))
        rows = [
            *filled_rows(o.dyck_episode, o.context, "episode", o.max_total, generator, self.tokenizer),
            *filled_rows(o.dyck_standard, o.context, "standard", o.max_total, generator, self.tokenizer),
        ]
        for num, windows in self._text:
            rows += windows.draw(generator.random(num))
        rows += backcopy_rows(o.backcopy, o.context, generator, self.tokenizer)
        for texts in self._own:
            rows += texts.rows(step * o.text_rows, o.text_rows)
        return padded(rows, self.tokenizer)

    def order_digest(self, num_steps: int) -> str:
        """The digest of the token order of the first `num_steps` steps."""
        digest = EMPTY_DIGEST
        for step in range(num_steps):
            digest = extend(digest, self.batch(step))
        return digest


def extend(digest: str, samples: Samples) -> str:
    """The order digest after one more batch: SHA-256 of the digest so far and the ids (int32, little-endian)."""
    return hashlib.sha256(bytes.fromhex(digest) + samples.ids_NT.astype("<i4").tobytes()).hexdigest()
