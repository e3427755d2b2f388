"""Real text by domain: which documents there are, which of them are held out, and rows of them as samples.

`code` is the standard library of the running interpreter, so its documents differ with Python's version, patch
releases included; `prose` and `math` are excerpts that come with the package, most of them held out, or the whole
documents once `python -m smelt_interp.data.fetch_texts` has fetched them. A document (a file, a book) is in training
or held out as a whole, by a hash of its name; an excerpt has the name of the document that it is the beginning of, so
it is on the same side. A user's own file is one document; of a folder, every file is one.

A byte order mark at the beginning of a document is no text: it is left out.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.marked_text import MarkedText, Row, Tokens, padded, tokens_of, with_bos
from smelt_interp.data.samples import DOMAIN_WIDTH, Samples, document_id
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input

Domain = Literal["code", "prose", "math"]
Split = Literal["train", "held_out"]
Source = Literal["excerpts", "fetched"]
Cut = Literal["tiled", "drawn"]
"""How rows are cut: `tiled` one after the other without overlap, taken in a random order; `drawn` every starting token
equally likely, so that rows may overlap, as in training."""

HELD_OUT_SHARE = 0.15
EXCERPTS_FOLDER = Path(__file__).parent / "texts"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGEST_TEXT = 200_000_000
"""Bytes of a user's own texts together."""
MOST_FILES = 100_000
"""Of a folder, read in one go."""
_NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
"""Folders of the library without code to learn from: other people's packages, tests, tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file or book."""

    name: str
    """Stable across machines: the path in its collection, e.g. `json/decoder.py`."""
    data: bytes
    """UTF-8, without a byte order mark."""

    def marked(self, domain: str) -> MarkedText:
        """The document as plain text."""
        return MarkedText(text=self.data.decode(), document=document_id(domain, self.name), domain=domain)


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
                data = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
                try:
                    data.decode()
                except UnicodeDecodeError:  # a few old files declare another encoding
                    continue
                yield Document(name=path.relative_to(root).as_posix(), data=data)


def _folder_documents(folder: Path) -> Iterator[Document]:
    for path in folder.glob("*.txt"):
        if path.is_file():
            yield Document(name=path.stem, data=path.read_bytes().removeprefix(BYTE_ORDER_MARK))


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
            "run `python -m smelt_interp.data.fetch_texts`, or say `--mixture.source excerpts`"
        )
    chosen = sorted((d for d in documents if split_of(domain, d.name) == split), key=lambda document: document.name)
    return Corpus(domain=domain, documents=tuple(chosen))


def own_corpus(path: Path) -> Corpus:
    """A user's own file as one document, or a folder with a document for each file at any depth that is not hidden.

    Raises UserError for what is missing, no regular file, empty, too large or not UTF-8.
    """
    files = [path]
    if path.is_dir():
        found = (each for each in path.rglob("[!.]*") if not each.is_dir() and not _hidden(each, path))
        files = sorted(islice(found, MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise UserError(f"a folder of text must hold at most {MOST_FILES} files; got more in {path}")
    documents, room = [], LARGEST_TEXT
    for file in files:
        name = file.relative_to(path).as_posix() if file != path else path.name
        documents.append(_own_document(file, name, room))
        room -= len(documents[-1].data)
    if not documents:
        raise UserError(f"a folder of text must hold a file; got none in {path}")
    letters = "".join(letter if 32 < ord(letter) < 127 else "_" for letter in path.resolve().stem)
    return Corpus(domain=f"file:{letters}"[:DOMAIN_WIDTH], documents=tuple(documents))


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def split_corpus(texts: Corpus, split: Split) -> Corpus:
    """The documents of one side."""
    return replace(texts, documents=tuple(d for d in texts.documents if split_of(texts.domain, d.name) == split))


def _own_document(path: Path, name: str, room: int) -> Document:
    read = read_input(path, "a text file", room)
    data = read.removeprefix(BYTE_ORDER_MARK)
    if not data.strip():
        raise UserError(f"a text file must not be empty; got {path} with {len(read)} bytes")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"a text file must be UTF-8; got {path} with byte 0x{data[error.start]:02x} at {error.start}: "
            "convert it first, e.g. with iconv"
        ) from None
    return Document(name=name, data=data)


class Windows:
    """Windows of a corpus: runs of tokens that lie in one document, as `cut` says."""

    def __init__(self, texts: Corpus, length: int, tokenizer: Tokenizer, cut: Cut = "drawn") -> None:
        """Windows that fill rows of `length` tokens. Raises UserError when no document is that long."""
        sources, tokens = zip(*_long_enough(texts, length, tokenizer), strict=True)
        self._sources: tuple[MarkedText, ...] = sources
        self._tokens: tuple[Tokens, ...] = tokens
        self._tokenizer = tokenizer
        self._width = length - (tokenizer.bos_id is not None)
        self._apart = self._width if cut == "tiled" else 1
        self._last = np.cumsum([(len(each.ids_T) - self._width) // self._apart + 1 for each in self._tokens])
        """Windows of all documents up to each."""

    def __len__(self) -> int:
        """Windows of all documents."""
        return int(self._last[-1])

    def draw(self, uniform_N: NDArray[np.float64]) -> list[Row]:
        """One row for each uniform number in [0, 1)."""
        return self.rows((uniform_N * len(self)).astype(np.int64))

    def rows(self, number_N: NDArray[np.int64]) -> list[Row]:
        """The windows of these numbers, counted from 0 in the order of documents."""
        document_N = np.searchsorted(self._last, number_N, side="right")
        rows = []
        for number, document in zip(number_N.tolist(), document_N.tolist(), strict=True):
            ids_T, role_T = self._tokens[document]
            start = (number - (int(self._last[document - 1]) if document else 0)) * self._apart
            part = slice(start, start + self._width)
            tokens = with_bos(Tokens(ids_T[part], role_T[part]), self._tokenizer)
            rows.append(Row(tokens, self._sources[document]))
        return rows


def _long_enough(texts: Corpus, length: int, tokenizer: Tokenizer) -> list[tuple[MarkedText, Tokens]]:
    """The documents that fill a row of `length` tokens. Raises UserError when there are none."""
    if not texts.documents:
        raise UserError(
            f"texts of {texts.domain} must hold a document; got none, so those in {fetched_folder()} are "
            "not whole: run `python -m smelt_interp.data.fetch_texts`, or say `--mixture.source excerpts`"
        )
    room = length - (tokenizer.bos_id is not None)
    found = [(source, tokens_of(source, tokenizer)) for source in (d.marked(texts.domain) for d in texts.documents)]
    if not (fitting := [(source, tokens) for source, tokens in found if len(tokens.ids_T) >= room]):
        longest = max(len(tokens.ids_T) for _, tokens in found) + length - room
        raise UserError(
            f"text rows must be at most {longest} tokens here, the longest document of {texts.domain}; got {length}"
        )
    return fitting


def corpus_samples(
    texts: Corpus, num: int, *, length: int, seed: int, tokenizer: Tokenizer, cut: Cut = "tiled"
) -> Samples:
    """`num` rows of `length` tokens, each of one document, BOS first where the tokenizer has one.

    Raises UserError when the texts hold fewer tiles, naming their number, or when no document is that long.
    """
    if num < 1 or length < 2:
        raise UserError(f"text must have at least 1 row of at least 2 tokens; got {num} of {length}")
    tag = int.from_bytes(hashlib.sha256(texts.domain.encode()).digest()[:4], "big")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, tag])))
    windows = Windows(texts, length, tokenizer, cut)
    if cut == "drawn":
        return padded(windows.draw(generator.random(num)), tokenizer)
    if num > len(windows):
        raise UserError(
            f"samples must be at most {len(windows)}, the rows of {length} tokens that {texts.domain} holds without "
            f"overlap; got {num}: shorten the rows or give more text"
        )
    return padded(windows.rows(generator.permutation(len(windows))[:num]), tokenizer)
