"""One choice of data by name, as commands take it, and the samples that it stands for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from smelt_interp.data.backcopy import backcopy_samples
from smelt_interp.data.dyck import DyckOptions, Pairing, Rendering, dyck_samples
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.data.text import Domain, corpus_samples, file_corpus, text_samples
from smelt_interp.data.tokenizer import PAD
from smelt_interp.errors import UserError

DataName = Literal["dyck", "code", "prose", "math", "backcopy"]
_DYCK = DyckOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Which samples. Raises UserError when a field is outside its rule."""

    data: str = "dyck"
    """dyck, backcopy, held-out code, prose or math, or the path of a text file in UTF-8."""
    samples: int = 64
    """Rows to draw, of Dyck for each number of shots; each depends on the seed and its number alone."""
    seed: int = 0
    length: int = 160
    """Tokens a row of text has, and a Dyck episode may have; at most the network's context."""
    shots: tuple[int, ...] = (_DYCK.shots,)
    """Dyck: demonstrations before the query, one or more numbers; the same queries are asked at each."""
    rendering: Rendering = _DYCK.rendering
    """Dyck: how a shot is written."""
    pairing: Pairing = "episode"
    """Dyck: episode permutes the closers for each episode."""
    num_types: int = _DYCK.num_types
    """Dyck: bracket types, 1 to 4."""
    max_total: int = _DYCK.max_total
    """Dyck: brackets of prefix and answer together, at most; even."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"samples must be at least 1; got {self.samples}")
        if self.seed < 0:
            raise UserError(f"seed must be 0 or above; got {self.seed}")
        if not self.shots or len(set(self.shots)) < len(self.shots):
            raise UserError(f"shots must be one or more different numbers; got {list(self.shots)}")
        if self.length < 2:
            raise UserError(f"length must be at least 2 tokens; got {self.length}")

    def dyck(self, shots: int) -> DyckOptions:
        """The episodes with so many shots. Raises UserError when they do not fit the length."""
        return DyckOptions(
            rendering=self.rendering,
            pairing=self.pairing,
            shots=shots,
            num_types=self.num_types,
            max_total=self.max_total,
            context=self.length,
            seed=self.seed,
        )


def load_samples(options: DataOptions, context: int) -> Samples:
    """The samples of `options` for a network that reads `context` tokens.

    Raises UserError for rows longer than the context, shots that do not fit (naming the most that do), data of no
    known name, and a file that is missing, empty, not UTF-8 or shorter than a row.
    """
    if options.length > context:
        raise UserError(f"length must be at most the network's context of {context} tokens; got {options.length}")
    if options.data == "dyck":
        return concatenate([dyck_samples(options.dyck(shots), options.samples) for shots in options.shots], PAD)
    if options.data == "backcopy":
        return backcopy_samples(options.samples, options.length, options.seed)
    domains: tuple[Domain, ...] = get_args(Domain)
    for domain in domains:
        if options.data == domain:
            return text_samples(domain, "held_out", options.samples, options.length, options.seed)
    path = Path(options.data)
    if not path.exists():
        raise UserError(f"data must be one of {', '.join(get_args(DataName))}, or a file; got {options.data!r}")
    return corpus_samples(file_corpus(path), options.samples, options.length, options.seed)
