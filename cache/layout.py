"""The layout of a capture: names, shapes, storage types, chunks and filters of a shard's datasets, and what is asked of
one before its first batch is recorded."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple, get_args

import h5py
import numpy as np
from array_api_compat import array_namespace, to_device
from numpy.typing import NDArray

from cache.selection import Kept, num_heads
from smelt_interp.architecture import Architecture
from smelt_interp.arrays import Array
from smelt_interp.data.samples import DOMAIN_WIDTH, EPISODE, Samples
from smelt_interp.errors import UserError, shown
from smelt_interp.sites import SITES

SCORES = "attn.hook_attn_scores"
"""The site whose numbers may be -inf: the score of a key that a query may not see."""
SCHEMA = "smelt.capture"
VERSION = 2

Precision = Literal["float16", "float32"]
"""How float sites are stored. Whatever it is, values that the network holds in bfloat16 keep their bits, attention
excepted, and expert indices are int32."""
Compression = Literal["none", "lzf", "gzip"]
"""How attention and expert indices are compressed, which compress well; the other sites never are."""
Stored = Literal["float16", "float32", "bfloat16", "int32"]
"""What a site's stored numbers are."""
STORED_TYPES: dict[Stored, np.dtype[np.generic]] = {
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
}
"""bfloat16 is kept as its bits."""

TOKEN_TYPES: dict[str, np.dtype[np.generic]] = {
    "ids": np.dtype(np.int32),
    "role": np.dtype(np.uint8),
    "segment_start": np.dtype(np.int32),
    "length": np.dtype(np.int32),
    "domain": np.dtype(f"S{DOMAIN_WIDTH}"),
    "episode": EPISODE,
    "document": np.dtype(np.int64),
    "sample_id": np.dtype(np.int64),
}
"""Datasets of `/tokens`, one entry a sample: the first three have T columns, the others none."""
TOKEN_COLUMNS = ("ids", "role", "segment_start")
OUTPUT_TYPES: dict[str, np.dtype[np.generic]] = {"logprob": np.dtype(np.float32), "argmax": np.dtype(np.int32)}
"""Datasets (N, T) of what the network answered."""
TEXT_OFFSETS, TEXT_BYTES = "tokens/text/offsets", "tokens/text/bytes"
ROWS_A_CHUNK = 64
"""Of tokens and outputs."""
TEXT_CHUNK = 2**16
"""Bytes, or offsets, of text."""

_FILTERS: dict[Compression, tuple[int, ...]] = {
    "none": (h5py.h5z.FILTER_FLETCHER32,),
    "lzf": (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_FLETCHER32),
    "gzip": (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a capture will hold, fixed before its first batch is recorded."""

    architecture: Architecture
    samples: Samples
    sample_ids: NDArray[np.int64]
    """Number of each row in the whole data set."""
    sites: Mapping[str, Kept]
    precision: Precision
    compression: Compression
    shard_samples: int
    """Samples of a shard; the last one may have less."""
    source: Mapping[str, object]
    """Where it comes from, as JSON values: checkpoint, data, threads, versions."""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("dtype", self.precision, get_args(Precision)),
            ("compression", self.compression, get_args(Compression)),
        ):
            if value not in known:
                raise UserError(f"{what} must be one of {', '.join(known)}; got {shown(value)}")
        if not len(self.samples):
            raise UserError("a capture must hold at least one sample; got 0")
        if self.shard_samples < 1:
            raise UserError(f"a shard must hold at least one sample; got {self.shard_samples}")
        if self.sample_ids.shape != (len(self.samples),) or (np.diff(self.sample_ids) <= 0).any():
            raise UserError(f"sample ids must ascend, one a sample; got {shown(self.sample_ids.tolist())}")
        if (longest := max(self.samples.domain_N.tolist(), key=len)) != longest[:DOMAIN_WIDTH]:
            raise UserError(f"a domain must have at most {DOMAIN_WIDTH} letters; got {shown(longest)}")
        for suffix, kept in self.sites.items():
            check_kept(suffix, kept, self.architecture)

    def request(self) -> dict[str, object]:
        """Everything that fixes the recorded numbers, as JSON values."""
        num_samples, num_tokens = self.samples.ids_NT.shape
        return {
            **self.source,
            "samples": {
                "number": num_samples,
                "tokens": num_tokens,
                "digest": as_stored(self.samples).digest(),
                "ids_digest": hashlib.sha256(self.sample_ids.tobytes()).hexdigest(),
            },
            "sites": {suffix: {"steps": kept.steps, "heads": kept.heads} for suffix, kept in self.sites.items()},
            "dtype": self.precision,
            "compression": self.compression,
            "shard_samples": self.shard_samples,
        }

    def shards(self) -> list[range]:
        """The positions of each shard's samples, in order."""
        number, size = len(self.samples), self.shard_samples
        return [range(first, min(first + size, number)) for first in range(0, number, size)]

    def num_bytes(self) -> int:
        """Bytes that sites, outputs and token columns take before compression."""
        return len(self.samples) * sample_bytes(
            self.architecture, self.sites, self.samples.ids_NT.shape[1], self.precision
        )


def as_stored(samples: Samples) -> Samples:
    """The samples with the types in which a capture keeps them, so that the digest is that of what is read back."""
    return replace(
        samples,
        ids_NT=samples.ids_NT.astype(TOKEN_TYPES["ids"], copy=False),
        role_NT=samples.role_NT.astype(TOKEN_TYPES["role"], copy=False),
        segment_start_NT=samples.segment_start_NT.astype(TOKEN_TYPES["segment_start"], copy=False),
        length_N=samples.length_N.astype(TOKEN_TYPES["length"], copy=False),
        domain_N=samples.domain_N.astype(TOKEN_TYPES["domain"], copy=False),
        document_N=samples.document_N.astype(TOKEN_TYPES["document"], copy=False),
    )


def request_digest(architecture: Architecture, request: Mapping[str, object]) -> str:
    """SHA-256 of an architecture and a request of JSON values: shards with the same one belong together."""
    text = json.dumps([architecture.to_json(), request], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_kept(suffix: str, kept: Kept, architecture: Architecture) -> None:
    """Raise UserError unless steps and heads are ascending numbers that this network has."""
    counts = {"steps": len(architecture.steps), "heads": num_heads(suffix, architecture)}
    for (what, count), numbers in zip(counts.items(), kept, strict=True):
        ascending = all(low < high for low, high in pairwise(numbers))
        if not ascending or any(not 0 <= number < count for number in numbers) or (count and not numbers):
            raise UserError(f"{what} of {suffix} must be ascending numbers below {count}; got {shown(list(numbers))}")


# Shapes


class Layout(NamedTuple):
    """One dataset of a shard."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    chunks: tuple[int, ...]
    compression: Compression

    @property
    def filters(self) -> tuple[int, ...]:
        """Numbers of HDF5's filters, in the order in which they are applied to a chunk that is written."""
        return _FILTERS[self.compression]

    @property
    def num_chunks(self) -> int:
        """Chunks that hold it."""
        return prod(-(-length // chunk) for length, chunk in zip(self.shape, self.chunks, strict=True))

    def create(self, group: h5py.Group, name: str) -> h5py.Dataset:
        """The empty dataset."""
        how: dict[Compression, dict[str, int | str]] = {
            "none": {"rdcc_nbytes": 0},  # whole chunks need no cache on their way
            "lzf": {"compression": "lzf", "shuffle": True},
            "gzip": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
        }
        return group.create_dataset(
            name, self.shape, self.dtype, chunks=self.chunks, fletcher32=True, **how[self.compression]
        )


def site_shape(suffix: str, architecture: Architecture, num_tokens: int, heads_kept: int) -> tuple[int, ...]:
    """Shape of one sample at one step of a site."""
    size = {"T": num_tokens, "S": num_tokens, "D": architecture.width, "Q": heads_kept, "G": heads_kept,
            "C": architecture.head_width, "E": architecture.num_experts, "K": architecture.top_k,
            "W": architecture.vocab_size, "1": 1}  # fmt: skip
    return tuple(size[axis] for axis in SITES[suffix].axes[1:])


def is_attention(suffix: str) -> bool:
    """Whether the site is one matrix of queries by keys a head."""
    return "S" in SITES[suffix].axes


def site_layout(
    suffix: str, shape: tuple[int, ...], num_steps: int, num_samples: int, stored: Stored, compression: Compression
) -> Layout:
    """A site's dataset [step, sample, ...]; `shape` is that of one sample at one step. A chunk is one (step, sample,
    head) matrix of attention, else one (step, sample)."""
    compressed = is_attention(suffix) or SITES[suffix].integer
    return Layout(
        (num_steps, num_samples, *shape),
        STORED_TYPES[stored],
        (1, 1, *((1, *shape[1:]) if is_attention(suffix) else shape)),
        compression if compressed else "none",
    )


def row_layouts(num_samples: int, num_tokens: int) -> dict[str, Layout]:
    """The datasets with one entry a sample or token, by name in the file; where each token's text begins, and the last
    one's ends, among them."""
    rows = min(num_samples, ROWS_A_CHUNK)
    columns = {f"tokens/{name}": (dtype, name in TOKEN_COLUMNS) for name, dtype in TOKEN_TYPES.items()}
    columns |= {name: (dtype, True) for name, dtype in OUTPUT_TYPES.items()}
    layouts = {}
    for name, (dtype, has_tokens) in columns.items():
        width = (num_tokens,) if has_tokens else ()
        layouts[name] = Layout((num_samples, *width), dtype, (rows, *width), "none")
    offsets = num_samples * num_tokens + 1
    layouts[TEXT_OFFSETS] = Layout((offsets,), np.dtype(np.int64), (min(offsets, TEXT_CHUNK),), "none")
    return layouts


def text_layout(num_bytes: int) -> Layout:
    """The bytes of the tokens' text, end to end; at least one, since a chunk is not empty."""
    size = max(num_bytes, 1)
    return Layout((size,), np.dtype(np.uint8), (min(size, TEXT_CHUNK),), "none")


def sample_bytes(architecture: Architecture, sites: Mapping[str, Kept], num_tokens: int, precision: Precision) -> int:
    """Bytes that one sample takes before compression, its text left out."""
    columns = [*OUTPUT_TYPES.values(), *(TOKEN_TYPES[name] for name in TOKEN_COLUMNS)]
    a_sample: int = num_tokens * sum(column.itemsize for column in columns)
    for suffix, kept in sites.items():
        value_bytes = 4 if SITES[suffix].integer or precision == "float32" else 2
        shape = site_shape(suffix, architecture, num_tokens, len(kept.heads))
        a_sample += len(kept.steps) * prod(shape) * value_bytes
    return a_sample


# Numbers


def stored_as(suffix: str, precision: Precision, *, bfloat16: bool) -> Stored:
    """What the numbers of a site are stored as."""
    if SITES[suffix].integer:
        return "int32"
    return "bfloat16" if bfloat16 and not is_attention(suffix) else precision


def encode(values: Array, suffix: str, stored: Stored) -> NDArray[np.generic]:
    """The values in their storage type, converted where they are. Raises UserError for a value that does not fit
    float16, and for one that is not finite, unless it is the score -inf of a key that a query may not see."""
    if stored == "bfloat16":
        # It is the upper half of float32; a value that came from it has a lower half of zeros.
        half: NDArray[np.generic] = (host(values).view(np.uint32) >> 16).astype(np.uint16)
        exponents: np.unsignedinteger = np.uint16(0x7F80)
    else:
        kind = array_namespace(values)
        with np.errstate(over="ignore"):
            half = host(kind.astype(values, getattr(kind, stored)))
        if stored == "int32":
            return half
        exponents = np.uint16(0x7C00) if stored == "float16" else np.uint32(0x7F800000)
    # A number is finite unless all bits of its exponent are set: an integer's maximum is found several times faster
    # than `isfinite` of a half.
    bits = half.view(exponents.dtype)
    if bits.size and (bits & exponents).max() == exponents:
        _check_finite(host(values), half, suffix)
    return half


def _check_finite(values: NDArray[np.generic], stored: NDArray[np.generic], suffix: str) -> None:
    allowed = (values == -np.inf) & (suffix == SCORES)
    if (wrong := ~np.isfinite(values) & ~allowed).any():
        raise UserError(f"values of {suffix} must be finite; got {float(values[wrong][0])}")
    if stored.dtype == np.float16 and (lost := ~np.isfinite(stored) & ~allowed).any():
        raise UserError(
            f"values of {suffix} must fit float16, at most {np.finfo(np.float16).max:.0f} in size; "
            f"got {float(values[lost][0]):.6g}: record with --dtype float32"
        )


def host(values: Array) -> NDArray[np.generic]:
    """The values as a numpy array, row after row."""
    return np.ascontiguousarray(to_device(values, "cpu"))


def decode(stored: NDArray[np.generic]) -> NDArray[np.generic]:
    """Stored values as numbers to compute with: float32, or int32 for expert indices."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.int32 if stored.dtype.kind == "i" else np.float32, copy=False)
