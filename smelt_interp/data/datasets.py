"""Choices of data by name, as commands take them, and the samples that they stand for."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from smelt_interp.data.backcopy import backcopy_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.data.text import Cut, Domain, corpus, corpus_samples, own_corpus
from smelt_interp.data.tokenizer import Tokenizer, padding_id
from smelt_interp.errors import UserError

DataName = Literal["dyck", "code", "prose", "math", "backcopy"]
MOST_SAMPLES = 1_000_000
MOST_TOKENS = 1_000_000
"""Of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(DyckOptions):
    """Which samples. Raises UserError when a field is outside its rule."""

    data: tuple[str, ...] = ("dyck",)
    """One or more of dyck, backcopy, held-out code, prose or math, and paths of text files or folders in UTF-8."""
    samples: int = 64
    """Rows of each, of Dyck for each number of shots; each row depends on the seed and its number alone."""
    seed: int = 0
    length: int = 160
    """Tokens a row of text has, and a Dyck episode may have; at most the network's context."""
    cut: Cut = "tiled"
    """Text: tiled rows do not overlap; drawn ones may, and there are as many as asked for."""

    def __post_init__(self) -> None:
        DyckOptions.__post_init__(self)
        if not self.data or len(set(self.data)) < len(self.data):
            raise UserError(f"data must be one or more different names; got {' '.join(self.data) or 'none'}")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise UserError(f"samples must be 1 to {MOST_SAMPLES}; got {self.samples}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be 0 to 2**63 - 1; got {self.seed}")
        if not 2 <= self.length <= MOST_TOKENS:
            raise UserError(f"length must be 2 to {MOST_TOKENS} tokens; got {self.length}")
        if self.cut not in get_args(Cut):
            raise UserError(f"cut must be one of {', '.join(get_args(Cut))}; got {self.cut}")


def load_samples(options: DataOptions, context: int, tokenizer: Tokenizer) -> Samples:
    """The samples of `options` for a network that reads `context` tokens of `tokenizer`, name after name.

    Raises UserError for rows longer than the context, shots that do not fit (naming the most that do), data of no
    known name, more rows than a text holds, and a file that is missing, empty, not UTF-8 or shorter than a row.
    """
    if options.length > context:
        raise UserError(f"length must be at most the network's context of {context} tokens; got {options.length}")
    parts = [_load(name, options, tokenizer) for name in options.data]
    return concatenate(parts, padding_id(tokenizer))


def _load(name: str, options: DataOptions, tokenizer: Tokenizer) -> Samples:
    num, length, seed = options.samples, options.length, options.seed
    if name == "dyck":
        return dyck_samples(options, num, length=length, seed=seed, tokenizer=tokenizer)
    if name == "backcopy":
        return backcopy_samples(num, length=length, seed=seed, tokenizer=tokenizer)
    domains: tuple[Domain, ...] = get_args(Domain)
    found = [corpus(domain, "held_out") for domain in domains if domain == name]
    if not found and not os.path.exists(name):
        raise UserError(f"data must be one of {', '.join(get_args(DataName))}, or a file or folder; got {name!r:.120}")
    texts = found[0] if found else own_corpus(Path(name))
    return corpus_samples(texts, num, length=length, seed=seed, tokenizer=tokenizer, cut=options.cut)
