"""The layout of a capture file: names, shapes, storage types and chunks of its datasets, and what one will hold."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal, get_args

import h5py
import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from cache.selection import Kept, num_heads
from smelt_interp.architecture import Architecture
from smelt_interp.data.samples import EPISODE, Samples
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES

SCORES = "attn.hook_attn_scores"
"""The site whose numbers may be -inf: the score of a key that a query may not see."""
SCHEMA = "smelt.capture"
VERSION = 1
LIBRARY_FORMAT = ("v110", "v110")
"""The HDF5 1.10 file format, whatever library writes: its metadata carries checksums."""

Precision = Literal["float16", "float32"]
"""How float sites are stored. Whatever it is, values that the network holds in bfloat16 keep their bits (as uint16
with the attribute `torch_dtype`), attention excepted, and expert indices are int32."""

TOKEN_TYPES: dict[str, np.dtype[np.generic]] = {
    "ids": np.dtype(np.int32),
    "role": np.dtype(np.uint8),
    "segment_start": np.dtype(np.int32),
    "length": np.dtype(np.int32),
    "domain": np.dtype("S16"),
    "episode": EPISODE,
    "sample_id": np.dtype(np.int64),
}
"""Datasets of `/tokens`, one entry a sample: the first three have T columns, the others none."""
TOKEN_COLUMNS = ("ids", "role", "segment_start")
OUTPUT_TYPES: dict[str, np.dtype[np.generic]] = {"logprob": np.dtype(np.float32), "argmax": np.dtype(np.int32)}
"""Datasets (N, T) of what the network answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a capture will hold, fixed before its first batch is recorded."""

    architecture: Architecture
    samples: Samples
    sample_ids: NDArray[np.int64]
    """Number of each row in the whole data set."""
    sites: Mapping[str, Kept]
    precision: Precision
    source: Mapping[str, object]
    """Where it comes from, as JSON values: checkpoint, data, threads, versions."""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise UserError(f"dtype must be one of {', '.join(get_args(Precision))}; got {self.precision}")
        if not len(self.samples):
            raise UserError("a capture must hold at least one sample; got 0")
        if self.sample_ids.shape != (len(self.samples),) or (np.diff(self.sample_ids) <= 0).any():
            raise UserError(f"sample ids must ascend, one a sample; got {self.sample_ids.tolist()}")
        if (longest := max(self.samples.domain_N.tolist(), key=len)) != longest[: TOKEN_TYPES["domain"].itemsize]:
            raise UserError(f"a domain must have at most {TOKEN_TYPES['domain'].itemsize} letters; got {longest!r}")
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
                "digest": self.samples.digest(),
                "ids_digest": hashlib.sha256(self.sample_ids.tobytes()).hexdigest(),
            },
            "sites": {suffix: {"steps": kept.steps, "heads": kept.heads} for suffix, kept in self.sites.items()},
            "dtype": self.precision,
        }

    def request_json(self) -> str:
        """The request as JSON text: equal texts, equal requests."""
        return json.dumps(self.request(), sort_keys=True)

    def architecture_json(self) -> str:
        """The architecture as JSON text."""
        return json.dumps(self.architecture.to_json(), sort_keys=True)

    def digest(self) -> str:
        """SHA-256 of architecture and request: parts with the same one belong together."""
        return contents_digest(self.architecture_json(), self.request_json())

    def num_bytes(self) -> int:
        """Bytes that sites, outputs and token columns take before compression."""
        num_tokens = self.samples.ids_NT.shape[1]
        columns = [*OUTPUT_TYPES.values(), *(TOKEN_TYPES[name] for name in TOKEN_COLUMNS)]
        a_sample: int = num_tokens * sum(column.itemsize for column in columns)
        for suffix, kept in self.sites.items():
            value_bytes = 4 if SITES[suffix].integer or self.precision == "float32" else 2
            shape = site_shape(suffix, self.architecture, num_tokens, len(kept.heads))
            a_sample += len(kept.steps) * prod(shape) * value_bytes
        return len(self.samples) * a_sample


def contents_digest(architecture_json: str, request_json: str) -> str:
    """SHA-256 of the two texts, as a capture holds them."""
    return hashlib.sha256(f"{architecture_json}\n{request_json}".encode()).hexdigest()


def check_kept(suffix: str, kept: Kept, architecture: Architecture) -> None:
    """Raise UserError unless steps and heads are ascending numbers that this network has."""
    counts = {"steps": len(architecture.steps), "heads": num_heads(suffix, architecture)}
    for (what, count), numbers in zip(counts.items(), kept, strict=True):
        ascending = all(low < high for low, high in pairwise(numbers))
        if not ascending or any(not 0 <= number < count for number in numbers) or (count and not numbers):
            raise UserError(f"{what} of {suffix} must be ascending numbers below {count}; got {list(numbers)}")


def site_shape(suffix: str, architecture: Architecture, num_tokens: int, heads_kept: int) -> tuple[int, ...]:
    """Shape of one sample at one step of a site."""
    size = {"T": num_tokens, "S": num_tokens, "D": architecture.width, "Q": heads_kept, "G": heads_kept,
            "C": architecture.head_width, "E": architecture.num_experts, "K": architecture.top_k, "1": 1,
            "W": architecture.vocab_size}  # fmt: skip
    return tuple(size[axis] for axis in SITES[suffix].axes[1:])


def is_attention(suffix: str) -> bool:
    """Whether the site is one matrix of queries by keys a head."""
    return "S" in SITES[suffix].axes


def encode(values: NDArray[np.generic], suffix: str, *, precision: Precision, bfloat16: bool) -> NDArray[np.generic]:
    """The values in their storage type. Raises UserError for a value that does not fit float16."""
    if SITES[suffix].integer:
        return values.astype(np.int32)
    if bfloat16 and not is_attention(suffix):
        # bfloat16 is the upper half of float32; a value that came from it has a lower half of zeros.
        return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if precision == "float32":
        return values.astype(np.float32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    lost = np.isfinite(values) & ~np.isfinite(half)
    if lost.any():
        raise UserError(
            f"values of {suffix} must fit float16, at most {np.finfo(np.float16).max:.0f} in size; "
            f"got {float(values[lost][0]):.6g}: record with --dtype float32"
        )
    return half


def decode(stored: NDArray[np.generic]) -> NDArray[np.generic]:
    """Stored values as numbers to compute with: float32, or int32 for expert indices."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.int32 if stored.dtype.kind == "i" else np.float32, copy=False)


def site_chunk(suffix: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One (step, sample, head) matrix of attention, else one (step, sample)."""
    return (1, 1, *((1, *shape[1:]) if is_attention(suffix) else shape))


def part_image(contents: Contents, batch: Batch) -> bytes:
    """The bytes of an HDF5 file, built in memory, with the sites and outputs of one batch in their final storage."""
    num_samples, num_tokens = batch.samples.ids_NT.shape
    with h5py.File("part", "w", driver="core", backing_store=False, libver=LIBRARY_FORMAT) as file:
        for name, values in (("logprob", batch.logprob_BT), ("argmax", batch.argmax_BT)):
            data: NDArray[np.generic] = np.asarray(values, OUTPUT_TYPES[name])
            file.create_dataset(name, data=data, chunks=(1, num_tokens), fletcher32=True)
        for suffix, kept in contents.sites.items():
            shape = site_shape(suffix, contents.architecture, num_tokens, len(kept.heads))
            bfloat16 = suffix in batch.bfloat16 and not is_attention(suffix)
            encoded = [
                encode(
                    _recorded(batch, step, suffix, (num_samples, *shape), kept),
                    suffix,
                    precision=contents.precision,
                    bfloat16=bfloat16,
                )
                for step in kept.steps
            ]
            dataset = create_site(file, suffix, (len(kept.steps), num_samples, *shape), encoded[0].dtype)
            dataset.attrs["steps"] = np.array(kept.steps, np.int64)
            dataset.attrs["heads"] = np.array(kept.heads, np.int64)
            if bfloat16:
                dataset.attrs["torch_dtype"] = np.bytes_("bfloat16")
            for index, stored in enumerate(encoded):
                dataset[index] = stored
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def create_site(file: h5py.File, suffix: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> h5py.Dataset:
    """The dataset [step, sample, ...] of a site. Attention and expert indices compress well, so they are."""
    chunk = site_chunk(suffix, shape[2:])
    if is_attention(suffix) or SITES[suffix].integer:
        return file.create_dataset(
            suffix, shape, dtype, chunks=chunk, compression="gzip", compression_opts=1, shuffle=True, fletcher32=True
        )
    return file.create_dataset(suffix, shape, dtype, chunks=chunk, fletcher32=True)


def _recorded(batch: Batch, step: int, suffix: str, shape: tuple[int, ...], kept: Kept) -> NDArray[np.generic]:
    if (step, suffix) not in batch.sites:
        raise UserError(f"a batch must hold every site of its capture; missing {suffix} of step {step}")
    values = np.asarray(batch.sites[step, suffix])
    if values.shape != shape or batch.heads.get(suffix, ()) != kept.heads:
        raise UserError(
            f"{suffix} must have shape {shape} for heads {list(kept.heads)}; got {values.shape} "
            f"for heads {list(batch.heads.get(suffix, ()))}"
        )
    return values
