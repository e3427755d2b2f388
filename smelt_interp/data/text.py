"""Real text by domain: which documents there are, which of them are held out, and windows of them as samples.

`code` is the standard library of the running interpreter; `prose` and `math` are excerpts that come with the
package, or the whole documents once `python -m smelt_interp.data.fetch_texts` has fetched them. A document (a file, a
book) is in training or held out as a whole, by a hash of its name; an excerpt has the name of the document that it
is the beginning of, so it is on the same side.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.samples import NO_EPISODE, Role, Samples
from smelt_interp.data.tokenizer import BOS
from smelt_interp.errors import UserError

Domain = Literal["code", "prose", "math"]
Split = Literal["train", "held_out"]
Source = Literal["excerpts", "fetched"]

HELD_OUT_SHARE = 0.15
EXCERPTS_FOLDER = Path(__file__).parent / "texts"
FILE_DOMAIN = b"file"
_NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
"""Folders of the library without code to learn from: other people's packages, tests, tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file or book."""

    name: str
    """Stable across machines: the path in its collection, e.g. `json/decoder.py`."""
    data: bytes
    """UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents of one domain and split, in the order of their names."""

    domain: str
    documents: tuple[Document, ...]

    def digest(self) -> str:
        """SHA-256 over names and contents in order."""
        sha = hashlib.sha256()
        for document in self.documents:
            for part in (document.name.encode(), document.data):
                sha.update(len(part).to_bytes(8, "little"))
                sha.update(part)
        return sha.hexdigest()

    def num_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(len(document.data) for document in self.documents)


def split_of(domain: str, name: str) -> Split:
    """The side on which a document is, from the hash of its name alone."""
    draw = int.from_bytes(hashlib.sha256(f"{domain}/{name}".encode()).digest()[:4], "big") / 2**32
    return "held_out" if draw < HELD_OUT_SHARE else "train"


def fetched_folder() -> Path:
    """Where fetched texts lie: `smelt-interp/texts` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smelt-interp" / "texts"


def fetched() -> bool:
    """Whether the fetched texts are there, so that `source="fetched"` can be read."""
    return fetched_folder().is_dir()


def _library_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _NOT_CODE and not name.startswith("config-"))
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                data = path.read_bytes()
                try:
                    data.decode()
                except UnicodeDecodeError:  # a few old files declare another encoding
                    continue
                yield Document(name=path.relative_to(root).as_posix(), data=data)


def _folder_documents(folder: Path) -> Iterator[Document]:
    for path in folder.glob("*.txt"):
        if path.is_file():
            yield Document(name=path.stem, data=path.read_bytes())


@lru_cache(maxsize=12)
def corpus(domain: Domain, split: Split, source: Source = "excerpts") -> Corpus:
    """The documents of a domain and split. `source` says where prose and mathematics come from; code has one source.

    Raises UserError for an unknown name, or when `source` is "fetched" and the texts have not been fetched.
    """
    for what, value, choices in (("domain", domain, Domain), ("split", split, Split), ("source", source, Source)):
        if value not in get_args(choices):
            raise UserError(f"text {what} must be one of {', '.join(get_args(choices))}; got {value}")
    if domain == "code":
        documents = _library_documents()
    elif source == "excerpts":
        documents = _folder_documents(EXCERPTS_FOLDER / domain)
    elif fetched():
        documents = _folder_documents(fetched_folder() / domain)
    else:
        raise UserError(
            f"fetched texts must be in {fetched_folder()}; got no such folder: "
            "run `python -m smelt_interp.data.fetch_texts`, or choose the excerpts"
        )
    chosen = sorted((d for d in documents if split_of(domain, d.name) == split), key=lambda document: document.name)
    return Corpus(domain=domain, documents=tuple(chosen))


def file_corpus(path: Path) -> Corpus:
    """A user's own file as a corpus of one document. Raises UserError when it is missing, empty or not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"text file must be readable; got {path}: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"text file must not be empty; got {path} with {len(data)} bytes")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"text file must be UTF-8; got {path} with byte 0x{data[error.start]:02x} at {error.start}: "
            "convert it first, e.g. with iconv"
        ) from None
    return Corpus(domain=FILE_DOMAIN.decode(), documents=(Document(name=path.name, data=data),))


class Windows:
    """Windows of a corpus: runs of bytes that lie in one document, every starting byte equally likely."""

    def __init__(self, texts: Corpus, width: int) -> None:
        """Documents shorter than `width` bytes are left out. Raises UserError when there are none left."""
        if not texts.documents:
            raise UserError(
                f"texts of {texts.domain} must hold a document; got none, so those in {fetched_folder()} are "
                "not whole: run `python -m smelt_interp.data.fetch_texts`, or choose the excerpts"
            )
        long_enough = [document.data for document in texts.documents if len(document.data) >= width]
        if not long_enough:
            longest = max(len(document.data) for document in texts.documents)
            raise UserError(
                f"text rows must be at most {longest + 1} tokens here, the longest document of {texts.domain} "
                f"and its bos; got {width + 1}"
            )
        self.width = width
        self._bytes = np.frombuffer(b"".join(long_enough), dtype=np.uint8)
        sizes = np.array([len(data) for data in long_enough])
        self._shift = np.cumsum(sizes) - sizes - (np.cumsum(sizes - width + 1) - (sizes - width + 1))
        """Added to the number of a starting byte among all possible ones, gives its place in `_bytes`."""
        self._last = np.cumsum(sizes - width + 1)

    def draw(self, uniform_N: NDArray[np.float64]) -> NDArray[np.int32]:
        """One window for each uniform number in [0, 1). -> (N, width)"""
        start_N = (uniform_N * self._last[-1]).astype(np.int64)
        start_N += self._shift[np.searchsorted(self._last, start_N, side="right")]
        window_NT: NDArray[np.int32] = self._bytes[start_N[:, None] + np.arange(self.width)].astype(np.int32)
        return window_NT


def text_rows(ids_NT: NDArray[np.int32], domain: bytes) -> Samples:
    """Full rows of one document each, BOS first, as `Samples` of role TEXT."""
    num, length = ids_NT.shape
    role_NT = np.full((num, length), Role.TEXT, dtype=np.uint8)
    role_NT[:, 0] = Role.BOS
    return Samples(
        ids_NT=ids_NT,
        length_N=np.full(num, length, dtype=np.int32),
        role_NT=role_NT,
        segment_start_NT=np.zeros((num, length), dtype=np.int32),
        domain_N=np.full(num, domain, dtype="S16"),
        episode_N=np.full(num, NO_EPISODE),
    )


def with_bos(bytes_NT: NDArray[np.int32]) -> NDArray[np.int32]:
    """BOS before each row. (N, T) -> (N, T + 1)"""
    return np.pad(bytes_NT, ((0, 0), (1, 0)), constant_values=BOS)


def corpus_samples(texts: Corpus, num: int, length: int, seed: int) -> Samples:
    """`num` windows of a corpus as rows of `length` tokens: BOS, then length - 1 bytes of one document."""
    if num < 1 or length < 2:
        raise UserError(f"text must have at least 1 row of at least 2 tokens; got {num} of {length}")
    tag = int.from_bytes(hashlib.sha256(texts.domain.encode()).digest()[:4], "big")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, tag])))
    ids_NT = with_bos(Windows(texts, length - 1).draw(generator.random(num)))
    return text_rows(ids_NT, texts.domain.encode())


def text_samples(
    domain: Domain, split: Split, num: int, length: int, seed: int, source: Source = "excerpts"
) -> Samples:
    """`num` rows of `length` tokens from a domain's training or held-out documents; same arguments, same rows.

    Raises UserError when no document of the split is that long, and as `corpus` does.
    """
    return corpus_samples(corpus(domain, split, source), num, length, seed)
