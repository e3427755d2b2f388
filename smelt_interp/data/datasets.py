"""Choices of data by name, as commands take them, and the samples that they stand for."""

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from smelt_interp.data.backcopy import backcopy_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.repeats import repeated_samples
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.data.text import Cut, Domain, corpus, corpus_samples, own_corpus
from smelt_interp.data.tokenizer import Tokenizer, padding_id
from smelt_interp.errors import UserError
from smelt_interp.validation import Seed, different, validated

DataName = Literal["dyck", "code", "prose", "math", "backcopy", "repeats"]


@validated
class DataOptions(DyckOptions):
    """Which samples."""

    data: tuple[str, ...] = ("dyck",)
    """One or more of dyck, backcopy, repeats (random tokens, twice), held-out code, prose or math, and paths of text
    files or folders in UTF-8."""
    samples: Annotated[int, Field(ge=1, le=10**6)] = 64
    """Rows of each, of Dyck for each number of shots; each row depends on the seed and its number alone."""
    seed: Seed = 0
    length: Annotated[int, Field(ge=2, le=10**6)] = 160
    """Tokens a row of text has, and a Dyck episode may have; at most the network's context."""
    cut: Cut = "tiled"
    """Text: tiled rows do not overlap; drawn ones may, and there are as many as asked for."""

    def __post_init__(self) -> None:
        DyckOptions.__post_init__(self)
        different("data", self.data)


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
    if name == "repeats":
        return repeated_samples(num, length=length, seed=seed, tokenizer=tokenizer)
    domains: tuple[Domain, ...] = get_args(Domain)
    found = [corpus(domain, "held_out") for domain in domains if domain == name]
    if not found and not os.path.exists(name):
        raise UserError(f"data must be one of {', '.join(get_args(DataName))}, or a file or folder; got {name!r:.120}")
    texts = found[0] if found else own_corpus(Path(name))
    return corpus_samples(texts, num, length=length, seed=seed, tokenizer=tokenizer, cut=options.cut)
