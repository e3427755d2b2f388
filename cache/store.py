"""Reads captures: opens a file by path, checks what it is, and gives slices of what was recorded, by visit.

A capture opens with numpy and h5py alone. No handle is kept: the file is opened, sliced and closed at each use.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch, SiteKey
from cache.layout import (
    OUTPUT_TYPES,
    SCHEMA,
    TOKEN_COLUMNS,
    TOKEN_TYPES,
    VERSION,
    check_kept,
    contents_digest,
    decode,
    site_shape,
)
from cache.selection import Kept, check_batch_size, head_axis
from smelt_interp.architecture import Architecture
from smelt_interp.arrays import Array
from smelt_interp.data.samples import Role, Samples
from smelt_interp.data.tokenizer import BYTES, text_of
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, check_suffix

REQUEST_FILE = "request.json"
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
_SITE_TYPES = {np.dtype(kind) for kind in ("float16", "float32", "uint16", "int32")}
DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError)
"""What h5py raises when a file's structure is not what it says."""


def parts_folder(out: Path) -> Path:
    """Where the parts of a capture lie while it is recorded: `NAME.parts` beside `NAME.h5`."""
    return out.with_suffix(".parts")


def sidecar(path: Path) -> Path:
    """Where the digest of a capture's bytes lies: `NAME.h5.sha256`, in the format of sha256sum."""
    return path.with_name(f"{path.name}.sha256")


class Capture:
    """A finished capture. Raises UserError when the file is not one, or not whole.

    Opening checks the structure and the tokens; `cache.verify` checks the bytes and the numbers.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        _check_finished(self.path)
        with self.file("open") as file:
            check_links(file)
            _check_schema(file)
            architecture_json, request_json = _text(file, "architecture"), _text(file, "request")
            self.contents_digest = contents_digest(architecture_json, request_json)
            self.command = _text(file, "command")
            self.architecture = Architecture.from_json(_json_object(architecture_json))
            self.request = _json_object(request_json)
            self.samples, self.sample_ids = _read_samples(file)
            self.kept = _read_kept(file, self.architecture, self.samples.ids_NT.shape)
            _check_tokens(self.samples, self.sample_ids, self.architecture)
        requested = self.request.get("sites")
        if not isinstance(requested, dict) or set(requested) != set(self.kept):
            raise UserError(f"a capture must hold the sites of its request; {self.path} holds {', '.join(self.kept)}")

    @property
    def sites(self) -> tuple[str, ...]:
        """Suffixes of the recorded sites, in the order of `smelt_interp.sites.SITES`."""
        return tuple(self.kept)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's bytes: as the file beside it says, or else computed."""
        try:
            digest = sidecar(self.path).read_text(encoding="ascii").split()[0]
        except (FileNotFoundError, IndexError, UnicodeDecodeError):
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest

    def read(
        self, suffix: str, step: int, samples: slice = slice(None), head: int | Literal["all"] = "all"
    ) -> NDArray[np.generic]:
        """What one site held at one step, float32 or int32, with the axes of `smelt_interp.sites.SITES`, B first.

        Of attention, one (step, sample, head) matrix is read without the others. `head` is a number of the network;
        with one, the head axis is gone. Raises UserError for a site, step or head that was not recorded.
        """
        kept = self._kept(suffix)
        if step not in kept.steps:
            raise UserError(f"a step of {suffix} must be one of those recorded, {list(kept.steps)}; got {step}")
        chosen: list[int | slice] = [kept.steps.index(step), samples]
        if head != "all":
            if head not in kept.heads:
                raise UserError(f"a head of {suffix} must be one of those recorded, {list(kept.heads)}; got {head}")
            chosen += [slice(None)] * (head_axis(suffix) - 1)
            chosen.append(kept.heads.index(head))
        with self.file("read") as file:
            return decode(file[suffix][tuple(chosen)])

    def batches(self, suffixes: Sequence[str], batch_size: int = 8) -> Iterator[Batch]:
        """All samples in order, `batch_size` at a time, with every recorded step of the chosen sites.

        Raises UserError for a site that was not recorded.
        """
        kept = {suffix: self._kept(suffix) for suffix in suffixes}
        check_batch_size(batch_size)
        return (
            self._batch(kept, slice(first, first + batch_size)) for first in range(0, len(self.samples), batch_size)
        )

    def text(self, sample: int) -> str:
        """The text of one sample, by its position; bytes that are no UTF-8 become U+FFFD. Raises UserError for a sample
        that was not recorded."""
        if not 0 <= sample < len(self.samples):
            raise UserError(f"a sample must be 0 to {len(self.samples) - 1}; got {sample}")
        with self.file("read") as file:
            start, stop = file["tokens/text/offsets"][sample : sample + 2]
            data: bytes = file["tokens/text/bytes"][start:stop].tobytes()
        return data.decode(errors="replace")

    def _batch(self, kept: dict[str, Kept], rows: slice) -> Batch:
        sites: dict[SiteKey, Array] = {}
        with self.file("read") as file:
            for suffix, (steps, _) in kept.items():
                for index, step in enumerate(steps):
                    sites[step, suffix] = decode(file[suffix][index, rows])
            logprob_BT, argmax_BT = file["logprob"][rows], file["argmax"][rows]
            bfloat16 = frozenset(suffix for suffix in kept if file[suffix].dtype == np.uint16)
        return Batch(
            architecture=self.architecture,
            samples=self.samples.rows(rows),
            sample_ids=self.sample_ids[rows],
            logprob_BT=logprob_BT,
            argmax_BT=argmax_BT,
            sites=sites,
            heads={suffix: heads for suffix, (_, heads) in kept.items() if heads},
            bfloat16=bfloat16,
        )

    def _kept(self, suffix: str) -> Kept:
        if check_suffix(suffix) not in self.kept:
            raise UserError(
                f"a capture must hold the site {suffix}; {self.path} holds {', '.join(self.kept) or 'none'}: "
                "record it again with that site"
            )
        return self.kept[suffix]

    @contextmanager
    def file(self, purpose: Literal["open", "read"]) -> Iterator[h5py.File]:
        """The HDF5 file, closed at the end of the block. What h5py raises inside it is a `UserError` that names the
        file and what it was opened for."""
        try:
            with h5py.File(self.path, "r", locking=False) as file:
                yield file
        except UserError as error:
            raise UserError(str(error) if str(self.path) in str(error) else f"{self.path}: {error}") from None
        except DAMAGE as error:
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"a capture must be a whole HDF5 file to {purpose}; got {self.path}: {detail}: copy or record it again"
            ) from None


def _check_finished(path: Path) -> None:
    parts = path if path.suffix == ".parts" else parts_folder(path)
    if path.is_file():
        return
    if parts.is_dir():
        try:
            command = json.loads((parts / REQUEST_FILE).read_text(encoding="utf-8"))["command"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            command = ""
        if not isinstance(command, str) or not command.isprintable():
            command = ""
        num_parts = len(list(parts.glob("*-*.h5")))
        way_out = f"go on with: {command}" if command else "run the command that records it again"
        raise UserError(f"a capture must be finished; got {parts} with {num_parts} finished parts: {way_out}")
    raise UserError(f"a capture must be a file; got {path}")


def check_links(file: h5py.File) -> None:
    """Refuse whatever would read another file, or run a filter that is not HDF5's own."""
    groups = [file]
    while groups:
        group = groups.pop()
        for name in group:
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise UserError(f"a capture must hold no links to elsewhere; got {type(link).__name__} {name!r}")
            child = group[name]
            if isinstance(child, h5py.Group) and child.name in ("/tokens", "/tokens/text"):
                groups.append(child)
            elif not isinstance(child, h5py.Dataset):
                raise UserError(f"a capture must hold the datasets of its schema alone; got {child.name}")
            else:
                _check_storage(child)


def _check_storage(dataset: h5py.Dataset) -> None:
    properties = dataset.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise UserError(f"a capture must hold its own data; got {dataset.name}, which is virtual or in another file")
    filters = {properties.get_filter(index)[0] for index in range(properties.get_nfilters())}
    if filters - _FILTERS:
        raise UserError(f"a capture must use the filters gzip, shuffle, fletcher32; got number {max(filters)}")


def _check_schema(file: h5py.File) -> None:
    schema = _text(file, "schema") if "schema" in file.attrs else "none"
    if schema != SCHEMA:
        raise UserError(f"a capture must have the schema {SCHEMA}; got {schema}")
    version = int(file.attrs["version"])
    if version != VERSION:
        raise UserError(
            f"a capture must be of version {VERSION}; got {version}: read it with the release that wrote it"
        )


def _text(file: h5py.File, name: str) -> str:
    # A fixed-length string only: variable-length ones lie in a heap without checksums.
    if name not in file.attrs or file.attrs.get_id(name).dtype.kind != "S":
        raise UserError(f"a capture must have the text attribute {name}")
    return bytes(file.attrs[name]).decode()


def _json_object(text: str) -> dict[str, object]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise UserError(f"architecture and request of a capture must be JSON objects; got {type(values).__name__}")
    return values


def _dataset(file: h5py.File, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> h5py.Dataset:
    if name not in file:
        raise UserError(f"a capture must hold {name}")
    dataset = file[name]
    if dataset.dtype != dtype or dataset.shape != shape:
        raise UserError(f"{name} must be {dtype} {shape}; got {dataset.dtype} {dataset.shape}")
    return dataset


def _read_samples(file: h5py.File) -> tuple[Samples, NDArray[np.int64]]:
    if "tokens/ids" not in file or file["tokens/ids"].ndim != 2 or not file["tokens/ids"].size:
        raise UserError("a capture must hold tokens/ids, one row a sample")
    shape = file["tokens/ids"].shape
    arrays = {
        name: _dataset(file, f"tokens/{name}", dtype, shape if name in TOKEN_COLUMNS else shape[:1])[()].astype(dtype)
        for name, dtype in TOKEN_TYPES.items()
    }
    for name, dtype in OUTPUT_TYPES.items():
        _dataset(file, name, dtype, shape)
    num_bytes = int(_dataset(file, "tokens/text/offsets", np.dtype(np.int64), (shape[0] + 1,))[-1])
    _dataset(file, "tokens/text/bytes", np.dtype(np.uint8), (num_bytes,))
    samples = Samples(
        ids_NT=arrays["ids"],
        length_N=arrays["length"],
        role_NT=arrays["role"],
        segment_start_NT=arrays["segment_start"],
        domain_N=arrays["domain"],
        episode_N=arrays["episode"],
        document_N=np.arange(shape[0]),
        text=text_of(BYTES, arrays["ids"], arrays["length"]),
    )
    return samples, arrays["sample_id"]


def _check_tokens(samples: Samples, sample_ids: NDArray[np.int64], architecture: Architecture) -> None:
    num_tokens = samples.ids_NT.shape[1]
    if num_tokens > architecture.context:
        raise UserError(f"tokens/ids must have rows of at most the context of {architecture.context}; got {num_tokens}")
    episode_N = samples.episode_N
    letters_NL = np.ascontiguousarray(samples.domain_N).view(np.uint8).reshape(len(samples), -1)
    rules = (
        ("ids must be in the vocabulary", (samples.ids_NT >= 0) & (samples.ids_NT < architecture.vocab_size)),
        ("role must be one of the roles", np.isin(samples.role_NT, list(Role))),
        (
            "segment_start must not lie ahead",
            (samples.segment_start_NT >= 0) & (samples.segment_start_NT <= np.arange(num_tokens)),
        ),
        ("length must be 1 to the length of a row", (samples.length_N >= 1) & (samples.length_N <= num_tokens)),
        ("domain must be ASCII", (letters_NL < 128).all(1)),
        (
            "episode must have shots from -1 and counts from 0",
            (episode_N["shots"] >= -1) & (episode_N["depth"] >= 0) & (episode_N["answer_length"] >= 0),
        ),
        ("sample_id must be 0 or above and ascend", np.diff(sample_ids, prepend=-1) > 0),
    )
    for rule, holds in rules:
        if not holds.all():
            raise UserError(f"tokens/{rule}; {int((~holds).sum())} are not")


def _read_kept(file: h5py.File, architecture: Architecture, tokens_shape: tuple[int, ...]) -> dict[str, Kept]:
    num_samples, num_tokens = tokens_shape
    known = {"tokens", *OUTPUT_TYPES, *SITES}
    if unknown := sorted(set(file) - known):
        raise UserError(f"a capture must hold the datasets of its schema alone; got {unknown[0]}")
    sites = {}
    for suffix in SITES:
        if suffix not in file:
            continue
        dataset = file[suffix]
        steps, heads = (tuple(int(number) for number in dataset.attrs[name]) for name in ("steps", "heads"))
        kept = Kept(steps, heads)
        check_kept(suffix, kept, architecture)
        shape = (len(steps), num_samples, *site_shape(suffix, architecture, num_tokens, len(heads)))
        if dataset.shape != shape or dataset.dtype not in _SITE_TYPES:
            raise UserError(f"{suffix} must be numbers of shape {shape}; got {dataset.dtype} {dataset.shape}")
        sites[suffix] = kept
    return sites
