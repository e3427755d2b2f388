"""The manifest of a capture: what it holds and the digest of every shard, written last, so that what has one is whole.

    NAME/manifest.json               schema, version, architecture, request, command, sites, shards, digest
    NAME/000000-000063.h5            a shard: the samples of these positions
    NAME/request.json                instead of the manifest, while shards are missing

`digest` is over everything else in the file, so it stands for the whole capture: a probe cites it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self, cast

from pydantic import Field

from cache.layout import (
    SCHEMA,
    VERSION,
    Compression,
    Layout,
    Stored,
    check_kept,
    request_digest,
    row_layouts,
    site_layout,
    site_shape,
)
from cache.selection import Kept
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError, shown
from smelt_interp.input_files import read_input
from smelt_interp.sites import SITES, check_suffix
from smelt_interp.validation import validated

MANIFEST = "manifest.json"
REQUEST = "request.json"
MOST_BYTES = 64 * 2**20
"""Of a manifest: some 300,000 shards."""
MOST_SAMPLES = 10**9


@validated
class StoredSite:
    """A recorded site."""

    steps: tuple[int, ...]
    heads: tuple[int, ...]
    stored: Stored

    @property
    def kept(self) -> Kept:
        """Its steps and heads."""
        return Kept(self.steps, self.heads)


@validated
class Shard:
    """One file of a capture."""

    first: Annotated[int, Field(ge=0, le=MOST_SAMPLES)]
    """Position of its first sample in the capture."""
    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    """How many it holds."""
    num_bytes: Annotated[int, Field(ge=1, le=2**62)]
    sha256: Annotated[str, Field(min_length=64, max_length=64)]

    @property
    def stop(self) -> int:
        """Position after its last sample."""
        return self.first + self.samples

    @property
    def name(self) -> str:
        """Its file name."""
        return shard_name(range(self.first, self.stop))


def shard_name(positions: range) -> str:
    """The file name of a shard: its first and last position."""
    return f"{positions.start:06d}-{positions.stop - 1:06d}.h5"


@validated
class Manifest:
    """Everything that `manifest.json` says."""

    architecture: Architecture
    request: dict[str, object]
    """Everything that fixed the recorded numbers, as JSON values."""
    command: str
    """What recorded it, as it was typed."""
    num_tokens: Annotated[int, Field(ge=1, le=10**9)]
    """Of every sample, padding included."""
    compression: Compression
    sites: dict[str, StoredSite]
    """By suffix."""
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.num_tokens > self.architecture.context:
            raise UserError(
                f"num_tokens must be at most the context of {self.architecture.context}; got {self.num_tokens}"
            )
        for suffix, site in self.sites.items():
            check_kept(check_suffix(suffix), site.kept, self.architecture)
            if (site.stored == "int32") != SITES[suffix].integer:
                raise UserError(f"{suffix} must be stored as its numbers are; got {site.stored}")

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return self.shards[-1].stop

    @property
    def request_digest(self) -> str:
        """What its shards belong to."""
        return request_digest(self.architecture, self.request)

    @property
    def digest(self) -> str:
        """SHA-256 over everything else."""
        return digest_of(self._values())

    def layouts(self, shard: Shard) -> dict[str, Layout]:
        """The datasets of a shard by name, all but the bytes of its text."""
        layouts = row_layouts(shard.samples, self.num_tokens)
        for suffix, site in self.sites.items():
            shape = site_shape(suffix, self.architecture, self.num_tokens, len(site.heads))
            layouts[suffix] = site_layout(suffix, shape, len(site.steps), shard.samples, site.stored, self.compression)
        return layouts

    def to_json(self) -> dict[str, object]:
        """Plain values, with the digest of all others."""
        values = self._values()
        return values | {"digest": digest_of(values)}

    def _values(self) -> dict[str, object]:
        values = {**asdict(self), "architecture": self.architecture.to_json()}
        return {"schema": SCHEMA, "version": VERSION, **values}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder. Raises UserError for one that is not as it was written."""
        path = folder / MANIFEST
        values = read_json(path, "a capture's manifest")
        try:
            return cls._from_json(values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except (TypeError, KeyError, AttributeError) as error:  # lists and objects where others belong
            raise UserError(f"a capture's manifest must hold what one holds; got {path}: {error}") from None

    @classmethod
    def _from_json(cls, values: dict[str, object]) -> Self:
        for name, expected in (("schema", SCHEMA), ("version", VERSION)):
            if (found := values.pop(name, None)) != expected:
                rule = f"a capture must have the {name} {expected}; got {shown(found)}"
                raise UserError(f"{rule}: read it with the release that wrote it")
        digest = values.pop("digest", None)
        if digest != digest_of({"schema": SCHEMA, "version": VERSION, **values}):
            raise UserError(
                "a manifest must be as it was written; its digest is of something else: copy or record again"
            )
        sites = cast("dict[str, dict[str, list[int]]]", values.pop("sites"))
        shards = cast("list[dict[str, object]]", values.pop("shards"))
        manifest = cls(
            architecture=Architecture.from_json(cast("dict[str, object]", values.pop("architecture"))),
            sites={
                suffix: StoredSite(steps=tuple(site.pop("steps")), heads=tuple(site.pop("heads")), **site)  # type: ignore[arg-type]  # checked by `validated`
                for suffix, site in sites.items()
            },
            shards=tuple(Shard(**shard) for shard in shards),  # type: ignore[arg-type]  # checked by `validated`
            **values,  # type: ignore[arg-type]  # as well
        )
        ends = [0, *(shard.stop for shard in manifest.shards)]
        if len(ends) == 1 or [shard.first for shard in manifest.shards] != ends[:-1]:
            raise UserError(f"shards must follow each other from sample 0; got {len(ends) - 1} that do not")
        return manifest


def read_json(path: Path, what: str) -> dict[str, object]:
    """A file that holds one JSON object. Raises UserError for any other."""
    data = read_input(path, what, MOST_BYTES)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} must hold JSON; got {path}: {error}: copy or record it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{what} must hold a JSON object; got {path}: copy or record it again")
    return values


def digest_of(values: Mapping[str, object]) -> str:
    """SHA-256 of everything that a manifest says beside its digest."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
