"""A capture that breaks its schema is refused in one line, before anything large is read."""

import json
import os
import tracemalloc
import zlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import h5py
import numpy as np
import pytest

from cache import shard
from cache.batch import Batch
from cache.manifest import MANIFEST
from cache.store import Capture
from smelt_interp.errors import UserError
from tests.support.planted_captures import (
    SITES,
    damage,
    planted_capture,
    shard_paths,
    sign,
    write_manifest,
)


@pytest.mark.parametrize("content", [b"", b"not an HDF5 file at all" * 100])
def test_another_kind_of_file_for_a_shard(path: Path, content: bytes) -> None:
    target = shard_paths(path)[0]
    target.write_bytes(content)
    with pytest.raises(UserError, match="a shard must be as it was written"):
        Capture(path).read("attn.hook_k", 0)
    if content:
        sign(path)
        with pytest.raises(UserError, match=r"a shard must be a whole HDF5 file; got .*h5: .*copy or record it again"):
            Capture(path).read("attn.hook_k", 0)
    target.unlink()
    with pytest.raises(UserError, match=rf"a capture must have all its shards; got no {target}: copy"):
        Capture(path).read("attn.hook_k", 0)
    os.mkfifo(target)
    with pytest.raises(UserError, match=rf"a shard must be a plain file; got {target}"):
        Capture(path).read("attn.hook_k", 0)


def manifest_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / MANIFEST).read_text())


ENTRY = {"first": 0, "samples": 7, "num_bytes": 9, "sha256": "0" * 64}
KEYS = {"steps": [0], "heads": [0], "stored": "float16"}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"version": 3}, r"must have the version 2; got 3: read it with the release that wrote it"),
        ({"schema": "other"}, r"must have the schema smelt.capture; got 'other'"),
        ({"architecture": {}}, r"an architecture must give every required field"),
        ({"architecture": 3}, r"a capture's manifest must hold what one holds; got"),
        ({"shards": []}, r"shards must follow each other from sample 0; got 0 that do not"),
        ({"shards": [3]}, r"a capture's manifest must hold what one holds; got"),
        ({"shards": [ENTRY | {"first": 1}]}, r"shards must follow each other"),
        ({"shards": [ENTRY | {"samples": 10**18}]}, r"samples must be at most 1000000000; got 10{18}$"),
        ({"sites": {"hook_q": KEYS}}, r"a site must be one of the hook suffixes"),
        ({"sites": {"attn.hook_k": KEYS | {"steps": [9]}}}, r"steps of attn.hook_k must be ascending"),
        ({"sites": {"attn.hook_k": KEYS | {"steps": 3}}}, r"must hold what one holds; got"),
        ({"sites": {"attn.hook_k": KEYS | {"stored": "int32"}}}, r"must be stored as its numbers are"),
        ({"num_tokens": 65}, r"num_tokens must be at most the context of 64; got 65"),
        ({"num_tokens": None}, r"num_tokens must be a whole number; got None"),
        ({"compression": "zip"}, r"compression must be 'none', 'lzf' or 'gzip'; got 'zip'"),
        ({"extra": 1}, r"only fields of Manifest may be given; got extra"),
    ],
)  # fmt: skip
def test_manifests_that_break_the_schema(path: Path, changed: dict[str, object], match: str) -> None:
    write_manifest(path, manifest_of(path) | changed)
    with pytest.raises(UserError, match=match) as raised:
        Capture(path)
    assert str(path) in str(raised.value)


def test_a_manifest_that_was_edited_is_told(path: Path) -> None:
    values = manifest_of(path)
    for changed in ({"command": "another"}, {"digest": "0" * 64}, {"digest": None}):
        (path / MANIFEST).write_text(json.dumps(values | changed))
        with pytest.raises(UserError, match=r"manifest.json: a manifest must be as it was written; its digest"):
            Capture(path)
    (path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(UserError, match="a capture's manifest must hold JSON"):
        Capture(path)
    os.remove(path / MANIFEST)
    os.mkfifo(path / MANIFEST)
    with pytest.raises(UserError, match="a capture's manifest must be a plain file"):
        Capture(path)


def virtual(file: h5py.File) -> None:
    del file["hook_resid_post"]
    layout = h5py.VirtualLayout(shape=(6, 3, 12, 8), dtype="f4")
    layout[0] = h5py.VirtualSource("elsewhere.h5", "data", shape=(3, 12, 8))
    file.create_virtual_dataset("hook_resid_post", layout)


def stored_elsewhere(file: h5py.File) -> None:
    del file["hook_resid_post"]
    file.create_dataset("hook_resid_post", (6, 3, 12, 8), "f4", external=[("/etc/passwd", 0, 6 * 3 * 12 * 8 * 4)])


def linked(link: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file["hook_resid_post"]
        file["hook_resid_post"] = link

    return change


def without(name: str) -> Callable[[h5py.File], None]:
    return lambda file: file.__delitem__(name)


def stored_as(name: str = "hook_resid_post", shape: tuple[int, ...] = (6, 3, 12, 8), dtype: str = "f4",
              **options: object) -> Callable[[h5py.File], None]:  # fmt: skip
    """The dataset laid out otherwise."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=np.ones(shape, dtype), **options)

    return change


SITE = {"chunks": (1, 1, 12, 8), "fletcher32": True}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda file: file.attrs.pop("schema"), r"a shard must have the schema of its capture; got None"),
        (lambda file: file.attrs.update(version=1), r"a shard must have the version of its capture; got "),
        (lambda file: file.attrs.update(request=np.bytes_("0" * 64)), r"a shard must have the request of its capture"),
        (lambda file: file.attrs.update(schema="of variable length"), r"a shard must have the schema of its capture"),
        (linked(h5py.ExternalLink("elsewhere.h5", "/data")), r"must hold no links to elsewhere; got ExternalLink"),
        (linked(h5py.SoftLink("/logprob")), r"must hold no links to elsewhere; got SoftLink"),
        (virtual, r"hook_resid_post must lie in chunks in its own file; got another layout, virtual or external"),
        (stored_elsewhere, r"hook_resid_post must lie in chunks in its own file"),
        (stored_as(), r"hook_resid_post must lie in chunks in its own file"),
        (stored_as(chunks=(1, 1, 12, 8)), r"hook_resid_post must have the filters \(3,\); got \(\)"),
        (stored_as(**SITE, compression="lzf"), r"hook_resid_post must have the filters \(3,\); got \(32000, 3\)"),
        (stored_as(chunks=(1, 1, 12, 8), scaleoffset=3), r"hook_resid_post must have the filters \(3,\); got \(6,\)"),
        (stored_as(chunks=(6, 3, 12, 8), fletcher32=True), r"must have the chunks \(1, 1, 12, 8\); got \(6,"),
        (stored_as(shape=(6, 3, 12, 9), chunks=True), r"hook_resid_post must have the shape \(6, 3, 12, 8\); got"),
        (stored_as(dtype="f8", **SITE), r"hook_resid_post must have the type float32; got float64"),
        (stored_as("tokens/role", (3, 11), "u1", chunks=True), r"tokens/role must have the shape \(3, 12\); got"),
        (stored_as("argmax", (3, 12), "f4", chunks=(3, 12)), r"argmax must have the type int32; got float32"),
        (without("hook_resid_post"), r"the datasets of its capture; 'hook_resid_post' is missing or too much"),
        (without("logprob"), r"'logprob' is missing or too much"),
        (without("tokens/role"), r"'tokens/role' is missing or too much"),
        (without("tokens/text"), r"'tokens/text/bytes' is missing or too much"),
        (without("tokens"), r"'tokens/document' is missing or too much"),
        (lambda file: file.create_dataset("extra", data=[1]), r"'extra' is missing or too much"),
        (lambda file: file.create_group("tokens/more"), r"datasets of its capture alone; got '/tokens/more'"),
        (lambda file: file["tokens/text/offsets"].__setitem__(5, -3), r"offsets of token text must rise from 0"),
        (lambda file: file["tokens/text/offsets"].__setitem__(-1, 10**12), r"offsets of token text must rise from 0"),
    ],
)  # fmt: skip
def test_shards_that_break_the_schema(path: Path, change: Callable[[h5py.File], None], match: str) -> None:
    damage(shard_paths(path)[0], change)
    sign(path)
    with pytest.raises(UserError, match=match) as raised:
        list(Capture(path).batches(SITES))
    assert str(shard_paths(path)[0]) in str(raised.value)


def test_a_missing_chunk_is_told(path: Path) -> None:
    def change(file: h5py.File) -> None:
        del file["hook_resid_post"]
        file.create_dataset("hook_resid_post", (6, 3, 12, 8), "f4", **SITE)[0] = 1

    damage(shard_paths(path)[0], change)
    sign(path)
    with pytest.raises(UserError, match=r"hook_resid_post must be complete, every chunk filtered; 3 of 18 chunks"):
        Capture(path).read("attn.hook_k", 0)


def test_a_chunk_that_would_unpack_to_more_than_its_room_is_not_unpacked(path: Path) -> None:
    """A small file that asks for much memory: 20 MB of zeros in the place of one matrix of 12 by 12."""
    bomb = zlib.compress(bytes(20_000_000), 9)

    def change(file: h5py.File) -> None:
        file["attn.hook_pattern"].id.write_direct_chunk((0,) * 5, bomb + bytes(4))

    damage(shard_paths(path)[0], change)
    sign(path)
    capture = Capture(path)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"chunks of attn.hook_pattern must take 0 to 645 bytes; got \d+ to 19457"):
        capture.read("attn.hook_pattern", 0)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_chunks_that_share_their_bytes_are_told(path: Path) -> None:
    """Else a few kilobytes could claim millions of samples."""

    def change(file: h5py.File) -> None:
        del file["tokens/text/bytes"]
        file.create_dataset("tokens/text/bytes", (2**30,), "u1", chunks=(2**16,), fletcher32=True)

    damage(shard_paths(path)[0], change)
    sign(path)
    with pytest.raises(UserError, match=r"tokens/text/bytes must be complete, every chunk filtered; 0 of 16384 chunks"):
        Capture(path).samples  # noqa: B018  # reading them is what is tested


@pytest.mark.parametrize("compression", ["none", "lzf", "gzip"])
def test_a_damaged_chunk_is_told_by_its_checksum(tmp_path: Path, batch: Batch, compression: str) -> None:
    """Of plain and of compressed sites: with a manifest that fits, nothing but the checksum can tell."""
    path = planted_capture(tmp_path / "a", batch, compression=compression).path
    target = shard_paths(path)[0]
    with h5py.File(target) as file:
        chunks = {name: file[name].id.get_chunk_info(10) for name in (*SITES, "logprob") if name != "logprob"}
        assert all(file[name].fletcher32 for name in (*SITES, "logprob", "argmax", "tokens/ids", "tokens/text/offsets"))
    whole = target.read_bytes()
    for name, chunk in chunks.items():
        data = bytearray(whole)
        data[chunk.byte_offset + chunk.size - 5] ^= 1  # the last byte before the checksum
        target.write_bytes(data)
        sign(path)
        with pytest.raises(UserError, match=rf"a shard must be a whole HDF5 file; got {target}: .*copy or record"):
            list(Capture(path).batches([name]))


def test_ctrl_c_while_a_shard_is_read_is_not_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(FileIO):
        def readinto(self, buffer: bytearray) -> int:
            if self.tell() > 3000:
                raise KeyboardInterrupt
            return super().readinto(buffer)

    capture = Capture(path)
    capture.read("attn.hook_k", 0)
    monkeypatch.setattr(shard, "FileIO", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(capture.batches(SITES))
