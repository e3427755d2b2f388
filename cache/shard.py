"""One shard: an HDF5 file built in memory from batches, and read only when it is what its capture says.

Everything is checked before HDF5 gives out a number: the file's digest before HDF5 sees it, then links, filters, types,
shapes, chunks and their stored sizes, so that no more memory is taken than the shard may ask for.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from math import prod
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Self

import h5py
import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from cache.layout import (
    SCHEMA,
    STORED_TYPES,
    TEXT_BYTES,
    TEXT_OFFSETS,
    TOKEN_TYPES,
    VERSION,
    Contents,
    Layout,
    Stored,
    as_stored,
    encode,
    host,
    row_layouts,
    site_layout,
    site_shape,
    stored_as,
    text_layout,
)
from cache.manifest import Manifest, Shard
from smelt_interp.data.samples import Role, Samples
from smelt_interp.data.token_text import TokenText
from smelt_interp.errors import UserError, shown

LIBRARY_FORMAT = ("v110", "v110")
"""The HDF5 1.10 file format, whatever library writes: its metadata carries checksums."""
DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError)
"""What h5py raises when a file's structure is not what it says."""
LARGEST_RATIO = 1032
"""How much less room deflate can take than what it packs."""

_verified: dict[tuple[str, int, int, int], str] = {}
"""Digests of the files that this process has read, by path, inode, size and time of the last change."""
_sound: set[tuple[str, str]] = set()
"""Shards whose structure this process has checked, by name and manifest: the manifest says their bytes."""


class ShardWriter:
    """A shard that is built in memory, batch by batch, in a `with` block."""

    def __init__(self, contents: Contents, digest: str, positions: range) -> None:
        self._contents, self._positions, self._done = contents, positions, 0
        self._samples = contents.samples.rows(slice(positions.start, positions.stop))
        self._sample_ids = contents.sample_ids[positions.start : positions.stop]
        self._file = h5py.File("shard", "w", driver="core", backing_store=False, libver=LIBRARY_FORMAT)
        self._file.attrs.update({"schema": np.bytes_(SCHEMA), "version": np.int64(VERSION)})
        self._file.attrs["request"] = np.bytes_(digest)
        self._site_data: dict[str, h5py.Dataset] = {}
        """The datasets of sites, open until the end: to close one is to empty its cache of chunks."""
        for name, layout in row_layouts(len(positions), contents.samples.ids_NT.shape[1]).items():
            layout.create(self._file, name)
        self._write_tokens()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, batch: Batch) -> None:
        """Store the next samples. Raises UserError for others, for sites that are not those of the capture, and for
        numbers that cannot be stored."""
        rows = slice(self._done, self._done + len(batch.samples))
        if not np.array_equal(self._sample_ids[rows], batch.sample_ids) or not np.array_equal(
            self._samples.ids_NT[rows], batch.samples.ids_NT
        ):
            raise UserError(f"a batch must hold the next samples of its shard; got {shown(batch.sample_ids.tolist())}")
        for name, values in (("logprob", batch.logprob_BT), ("argmax", batch.argmax_BT)):
            data = host(values)
            if not np.isfinite(data).all():
                raise UserError(f"values of {name} must be finite; got {data[~np.isfinite(data)][0]}")
            self._file[name][rows] = data
        for suffix in self._contents.sites:
            self._add_site(batch, suffix, rows)
        self._done = rows.stop

    def image(self) -> bytes:
        """The bytes of the file. Raises UserError while samples are missing."""
        if self._done != len(self._positions):
            raise UserError(f"a shard must have all its {len(self._positions)} samples; got {self._done}")
        self._file.flush()
        image: bytes = self._file.id.get_file_image()
        return image

    def _add_site(self, batch: Batch, suffix: str, rows: slice) -> None:
        """Store one site of a batch, all steps at once; the first batch says whether it is in bfloat16."""
        contents, kept = self._contents, self._contents.sites[suffix]
        num_tokens = self._samples.ids_NT.shape[1]
        shape = site_shape(suffix, contents.architecture, num_tokens, len(kept.heads))
        stored = stored_as(suffix, contents.precision, bfloat16=suffix in batch.bfloat16)
        layout = site_layout(suffix, shape, len(kept.steps), len(self._positions), stored, contents.compression)
        if suffix not in self._site_data:
            self._site_data[suffix] = layout.create(self._file, suffix)
        dataset = self._site_data[suffix]
        if dataset.dtype != layout.dtype:
            raise UserError(f"{suffix} must be of one type in every batch; got {dataset.dtype} and {layout.dtype}")
        expected = (len(batch.samples), *shape)
        encoded = np.empty((len(kept.steps), *expected), layout.dtype)
        for index, step in enumerate(kept.steps):
            if (step, suffix) not in batch.sites:
                raise UserError(f"a batch must hold every site of its capture; missing {suffix} of step {step}")
            values, heads = batch.sites[step, suffix], batch.heads.get(suffix, ())
            if tuple(values.shape) != expected or heads != kept.heads:
                raise UserError(
                    f"{suffix} must have shape {expected} for heads {list(kept.heads)}; got {tuple(values.shape)} "
                    f"for heads {list(heads)}"
                )
            encoded[index] = encode(values, suffix, stored)
        dataset[:, rows] = encoded

    def _write_tokens(self) -> None:
        samples = as_stored(self._samples)
        columns = {
            "ids": samples.ids_NT,
            "role": samples.role_NT,
            "segment_start": samples.segment_start_NT,
            "length": samples.length_N,
            "domain": samples.domain_N,
            "episode": samples.episode_N,
            "document": samples.document_N,
            "sample_id": self._sample_ids,
        }
        for name, column in columns.items():
            self._file[f"tokens/{name}"][...] = column
        self._file[TEXT_OFFSETS][...] = samples.text.offsets
        text = text_layout(len(samples.text.data)).create(self._file, TEXT_BYTES)
        text[: len(samples.text.data)] = samples.text.data


# Opening


@contextmanager
def open_shard(folder: Path, shard: Shard, manifest: Manifest) -> Iterator[h5py.File]:
    """A shard of a finished capture, closed at the end of the block.

    Raises UserError that names the file when its bytes are not those of the manifest, when its structure is not that of
    the manifest, and for what h5py raises inside the block.
    """
    path = folder / shard.name
    with _plain_file(path) as raw, told(path):
        if _sha256(path, raw, shard.num_bytes) != shard.sha256:
            raise UserError("a shard must be as it was written; this one was changed or replaced")
        sound = (shard.name, manifest.digest)
        # Python's own file: HDF5 would refuse one that someone in this process holds open with other locks.
        with h5py.File(raw, "r") as file:
            if sound not in _sound:  # the same bytes under the same manifest are as sound as they were
                check_structure(file, shard.num_bytes, manifest.request_digest, manifest.layouts(shard))
                _sound.add(sound)
            yield file


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What goes wrong inside the block is a UserError that names the file."""
    try:
        yield
    except UserError as error:
        raise UserError(
            str(error) if str(path) in str(error) else f"{path}: {error}: copy or record it again"
        ) from None
    except DAMAGE as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"a shard must be a whole HDF5 file; got {path}: {detail}: copy or record it again") from None


@contextmanager
def _plain_file(path: Path) -> Iterator[FileIO]:
    try:
        if not S_ISREG(path.stat().st_mode):
            raise UserError(f"a shard must be a plain file; got {path}")
        raw = FileIO(path)
    except FileNotFoundError:
        raise UserError(f"a capture must have all its shards; got no {path}: copy or record it again") from None
    except OSError as error:
        raise UserError(f"a shard must be readable; got {path}: {error.strerror}") from None
    with raw:
        yield raw


def _sha256(path: Path, raw: FileIO, num_bytes: int) -> str:
    """The digest of an open file, computed once a process and file; of one that has another size, nothing."""
    stat = os.fstat(raw.fileno())
    if stat.st_size != num_bytes:
        return ""
    key = (str(path.absolute()), stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if key not in _verified:
        _verified[key] = hashlib.file_digest(raw, "sha256").hexdigest()
        raw.seek(0)
    return _verified[key]


def sha256_of(path: Path) -> tuple[int, str]:
    """Bytes and digest of a shard on the disk."""
    with _plain_file(path) as raw:
        num_bytes = os.fstat(raw.fileno()).st_size
        return num_bytes, _sha256(path, raw, num_bytes)


def request_of(path: Path) -> str:
    """The request that a shard on the disk says it belongs to. Raises UserError for a file that is no shard."""
    with _plain_file(path) as raw, told(path), h5py.File(raw, "r") as file:
        return bytes(file.attrs["request"]).decode("ascii")


def stored_sites(path: Path, suffixes: Sequence[str]) -> dict[str, Stored]:
    """What the numbers of each site are stored as. Raises UserError for a site that the shard does not hold."""
    types = {dtype: stored for stored, dtype in STORED_TYPES.items()}
    with _plain_file(path) as raw, told(path), h5py.File(raw, "r") as file:
        return {suffix: types[file[suffix].dtype] for suffix in suffixes}


# Structure


def check_structure(file: h5py.File, num_bytes: int, digest: str, layouts: Mapping[str, Layout]) -> None:
    """Raise UserError unless a file of so many bytes is a shard of the request and holds these datasets, each as it is
    laid out, and the bytes of its text, nothing else."""
    for name, expected in (("schema", SCHEMA.encode()), ("version", VERSION), ("request", digest.encode())):
        # Fixed-length strings only: variable-length ones lie in a heap without checksums.
        found = file.attrs[name] if name in file.attrs and file.attrs.get_id(name).shape == () else None
        if found != expected:
            raise UserError(f"a shard must have the {name} of its capture; got {shown(found)}")
    datasets = _datasets(file)
    if TEXT_BYTES in datasets:
        layouts = {**layouts, TEXT_BYTES: text_layout(datasets[TEXT_BYTES].size)}
    if wrong := sorted(datasets.keys() ^ {*layouts, TEXT_BYTES}):
        raise UserError(f"a shard must hold the datasets of its capture; {shown(wrong[0])} is missing or too much")
    room = num_bytes
    for name, layout in layouts.items():
        room -= _check_dataset(datasets[name], layout)
        if room < 0:
            raise UserError(f"the chunks of a shard must fit into its {num_bytes} bytes; those of {name} do not")


def _datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Every dataset by name. Raises UserError for whatever would read another file, and for groups of no use."""
    found: dict[str, h5py.Dataset] = {}
    groups = [file]
    while groups:
        group = groups.pop()
        for name in group:
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise UserError(f"a shard must hold no links to elsewhere; got {type(link).__name__} {shown(name)}")
            child = group[name]
            if isinstance(child, h5py.Dataset):
                found[child.name.removeprefix("/")] = child
            elif isinstance(child, h5py.Group) and child.name in ("/tokens", "/tokens/text"):
                groups.append(child)
            else:
                raise UserError(f"a shard must hold the datasets of its capture alone; got {shown(child.name)}")
    return found


def _check_dataset(dataset: h5py.Dataset, layout: Layout) -> int:
    """Raise UserError unless a dataset is laid out like this, every chunk there; the bytes that its chunks take."""
    name = dataset.name.removeprefix("/")
    properties = dataset.id.get_create_plist()
    if properties.get_layout() != h5py.h5d.CHUNKED or properties.get_external_count():
        raise UserError(f"{name} must lie in chunks in its own file; got another layout, virtual or external")
    filters = tuple(properties.get_filter(index)[0] for index in range(properties.get_nfilters()))
    found = (dataset.shape, dataset.dtype, dataset.chunks, filters)
    expected = (layout.shape, layout.dtype, layout.chunks, layout.filters)
    for what, is_, must in zip(("shape", "type", "chunks", "filters"), found, expected, strict=True):
        if is_ != must:
            raise UserError(f"{name} must have the {what} {must}; got {is_}")
    sizes: list[int] = []
    masks: set[int] = set()

    def count(chunk: h5py.h5d.StoreInfo) -> None:
        sizes.append(chunk.size)
        masks.add(chunk.filter_mask)

    dataset.id.chunk_iter(count)
    if len(sizes) != layout.num_chunks or masks - {0}:
        raise UserError(f"{name} must be complete, every chunk filtered; {len(sizes)} of {layout.num_chunks} chunks")
    full = prod(layout.chunks) * layout.dtype.itemsize
    # A checksum of 4 bytes; lzf and deflate leave what does not shrink as it is, with a few bytes more.
    low, high = (
        (full + 4, full + 4) if layout.compression == "none" else (full // LARGEST_RATIO, full + full // 100 + 64)
    )
    if sizes and not low <= min(sizes) <= max(sizes) <= high:
        raise UserError(f"chunks of {name} must take {low} to {high} bytes; got {min(sizes)} to {max(sizes)}")
    return sum(sizes)


# Tokens


def read_tokens(file: h5py.File, rows: slice, num_tokens: int) -> tuple[Samples, NDArray[np.int64]]:
    """Samples and sample ids of the chosen rows of a shard."""
    tokens = {name: file[f"tokens/{name}"][rows] for name in TOKEN_TYPES}
    first = rows.start * num_tokens
    offsets = file[TEXT_OFFSETS][first : rows.stop * num_tokens + 1]
    samples = Samples(
        ids_NT=tokens["ids"],
        length_N=tokens["length"],
        role_NT=tokens["role"],
        segment_start_NT=tokens["segment_start"],
        domain_N=tokens["domain"],
        episode_N=tokens["episode"],
        document_N=tokens["document"],
        text=TokenText(file[TEXT_BYTES][offsets[0] : offsets[-1]], offsets - offsets[0]),
    )
    return samples, tokens["sample_id"]


def check_tokens(samples: Samples, sample_ids: NDArray[np.int64], vocab_size: int) -> None:
    """Raise UserError unless the tokens are within their ranges, so that a probe can compute with them."""
    num_tokens = samples.ids_NT.shape[1]
    episode_N = samples.episode_N
    rules = (
        ("ids must be in the vocabulary", (samples.ids_NT >= 0) & (samples.ids_NT < vocab_size)),
        ("role must be one of the roles", np.isin(samples.role_NT, list(Role))),
        (
            "segment_start must not lie ahead",
            (samples.segment_start_NT >= 0) & (samples.segment_start_NT <= np.arange(num_tokens)),
        ),
        ("length must be 1 to the length of a row", (samples.length_N >= 1) & (samples.length_N <= num_tokens)),
        (
            "episode must have shots from -1 and counts from 0",
            (episode_N["shots"] >= -1) & (episode_N["depth"] >= 0) & (episode_N["answer_length"] >= 0),
        ),
        ("sample_id must be 0 or above and ascend", np.diff(sample_ids, prepend=-1) > 0),
    )
    for rule, holds in rules:
        if not holds.all():
            raise UserError(f"tokens/{rule}; {int((~holds).sum())} are not")
