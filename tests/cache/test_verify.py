"""Verification finds every flipped bit, before HDF5 reads the file, and what a digest alone cannot tell."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from cache import info as info_module
from cache import verify as verify_module
from cache.manifest import MANIFEST
from cache.store import Capture
from cache.verify import verify
from smelt_interp.errors import UserError, run_command
from tests.support.forked import Child
from tests.support.planted_captures import damage, numbers, planted_capture, random_batch, shard_paths, sign


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_capture(tmp_path_factory.mktemp("written") / "a", random_batch(4), batch_size=2).path


@pytest.fixture
def path(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "a"))


def test_a_whole_capture(path: Path) -> None:
    attention = 0
    for shard in shard_paths(path):
        with h5py.File(shard) as file:
            attention += file["attn.hook_pattern"].id.get_num_chunks()
    assert attention == 6 * 4 * 4
    verified = verify(path)
    assert verified[:3] == (4, 2, 4)
    assert verified.chunks > attention + 3 * 6 * 4


def test_every_flipped_bit_of_a_shard_is_found(path: Path) -> None:
    found, shards = 0, shard_paths(path)
    for _ in range(200):
        shard = random.choice(shards)
        with shard.open("r+b", buffering=0) as file:
            place, bit = random.randrange(shard.stat().st_size), 1 << random.randrange(8)
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ bit]), place)
            try:
                verify(path)
            except UserError as error:
                found += "a shard must be as it was written" in str(error)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert found == 200
    verify(path)


def test_every_flipped_bit_of_the_manifest_is_found(path: Path) -> None:
    manifest = path / MANIFEST
    whole = manifest.read_bytes()
    for place in random.sample(range(len(whole)), 300):
        data = bytearray(whole)
        data[place] ^= 1 << random.randrange(8)
        manifest.write_bytes(data)
        try:
            assert Capture(path).digest == Capture(path).manifest.digest
        except UserError:
            continue
        assert data.split() == whole.split()  # white space became other white space


def test_flipped_bits_in_the_data_are_found_by_their_checksums_too(path: Path) -> None:
    chunks = []
    shard = shard_paths(path)[0]
    with h5py.File(shard) as file:
        for name in ("hook_resid_post", "attn.hook_pattern", "tokens/ids", "logprob"):
            dataset = file[name].id
            chunks += [dataset.get_chunk_info(index) for index in range(dataset.get_num_chunks())]
    data = shard.read_bytes()
    for chunk in random.sample(chunks, 25):
        damaged = bytearray(data)
        damaged[chunk.byte_offset + random.randrange(chunk.size)] ^= 1 << random.randrange(8)
        shard.write_bytes(damaged)
        sign(path)
        with pytest.raises(UserError, match="a shard must be a whole HDF5 file; got "):
            verify(path)


def test_flipped_bits_elsewhere_are_found_by_the_checksums_of_the_format(path: Path) -> None:
    """Or lie in room that nothing takes. In a child, since a library that reads damaged metadata might crash."""
    shard = shard_paths(path)[0]
    in_data = np.zeros(shard.stat().st_size, bool)
    with h5py.File(shard) as file:
        for dataset in every_dataset(file):
            for index in range(dataset.id.get_num_chunks()):
                chunk = dataset.id.get_chunk_info(index)
                in_data[chunk.byte_offset : chunk.byte_offset + chunk.size] = True
    elsewhere = np.flatnonzero(~in_data).tolist()
    data, whole = shard.read_bytes(), numbers(path)

    def look() -> None:
        told = 0
        for place in random.choices(elsewhere, k=60):
            damaged = bytearray(data)
            damaged[place] ^= 1 << random.randrange(8)
            shard.write_bytes(damaged)
            sign(path)
            try:
                verify(path)
            except UserError:
                told += 1
            else:
                assert numbers(path) == whole
        assert told > 30

    assert Child(look).wait() == (0, "")


def every_dataset(group: h5py.Group) -> Iterator[h5py.Dataset]:
    for item in group.values():
        yield from every_dataset(item) if isinstance(item, h5py.Group) else [item]


def test_the_digest_is_compared_before_hdf5_reads_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_paths(path)[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")

    def parsed(raw: object, *arguments: object, **options: object) -> h5py.File:
        assert getattr(raw, "name", None) != shard, "HDF5 was asked to read a file whose digest is wrong"
        return whole(raw, *arguments, **options)

    whole = h5py.File
    monkeypatch.setattr(h5py, "File", parsed)
    with pytest.raises(UserError, match=rf"{shard}: a shard must be as it was written; this one was changed"):
        verify(path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("ids", 259, r"tokens/ids must be in the vocabulary; 1 are not"),
        ("ids", -1, r"tokens/ids must be in the vocabulary; 1 are not"),
        ("length", 13, r"tokens/length must be 1 to the length of a row; 1 are not"),
        ("length", 0, r"tokens/length must be 1 to the length of a row; 1 are not"),
        ("segment_start", 5, r"tokens/segment_start must not lie ahead; 1 are not"),
        ("segment_start", -1, r"tokens/segment_start must not lie ahead; 1 are not"),
        ("role", 8, r"tokens/role must be one of the roles; 1 are not"),
        ("domain", "c\u00f6de".encode(), r"a domain must be printable ASCII; got b'c"),
        ("domain", b"co\0de", r"a domain must be printable ASCII; got b'c"),
        ("domain", b"co\x1bde", r"a domain must be printable ASCII; got b'c"),
        ("sample_id", -1, r"tokens/sample_id must be 0 or above and ascend; 1 are not"),
        ("episode", (-2, 0, 0, False, False), r"tokens/episode must have shots from -1 and counts from 0; 1 are not"),
    ],
)
def test_tokens_outside_their_ranges(path: Path, name: str, value: object, match: str) -> None:
    """Told when they are read, so before any probe computes with them."""
    shard = shard_paths(path)[0]
    place = (1, 2) if name in ("ids", "segment_start", "role") else (1,)
    damage(shard, lambda file: file[f"tokens/{name}"].__setitem__(place, np.array(value, file[f"tokens/{name}"].dtype)))
    sign(path)
    for look in (verify, lambda folder: Capture(folder).samples, lambda folder: list(Capture(folder).batches(()))):
        with pytest.raises(UserError, match=match) as raised:
            look(path)
        assert str(raised.value).startswith(f"{shard}: ")


def test_samples_of_another_request(path: Path) -> None:
    damage(shard_paths(path)[0], lambda file: file["tokens/document"].__setitem__(0, 77))
    sign(path)
    with pytest.raises(UserError, match=r"a capture must hold the samples of its request; .*/a holds others: record"):
        verify(path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("hook_resid_post", np.nan, r"numbers of hook_resid_post must be finite; got nan"),
        ("attn.hook_pattern", -np.inf, r"numbers of attn.hook_pattern must be finite; got -inf"),
        ("logprob", np.inf, r"numbers of logprob must be finite; got inf"),
        ("mlp.hook_expert_indices", 8, r"numbers of mlp.hook_expert_indices must be 0 to 7; got 8: copy or"),
        ("mlp.hook_expert_indices", -1, r"numbers of mlp.hook_expert_indices must be 0 to 7; got -1"),
        ("argmax", 259, r"numbers of argmax must be 0 to 258; got 259"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(path: Path, name: str, value: float, match: str) -> None:
    damage(shard_paths(path)[1], lambda file: file[name].__setitem__((0,) * file[name].ndim, value))
    sign(path)
    with pytest.raises(UserError, match=match):
        verify(path)


def run(module: str, path: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, path], capture_output=True, text=True, check=False)


def test_the_commands(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = run("cache.verify", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path} is whole: 4 samples in 2 shards, 4 sites, ")
    verify_module.command(planted_capture(path.parent / "one", random_batch(2)).path)
    assert "2 samples in 1 shard, " in capsys.readouterr().out
    info = run("cache.info", path)
    assert (info.returncode, info.stderr) == (0, "")
    for words in ("4 samples of 12 tokens (4 code)", "attn.hook_pattern", "4 x 12 x 12", Capture(path).digest):
        assert words in info.stdout
    os.truncate(shard_paths(path)[0], 1000)
    for module, folder in ((verify_module, path), (info_module, path), (info_module, ""), (verify_module, "\udc80")):
        monkeypatch.setattr(sys, "argv", ["command", str(folder)])
        with pytest.raises(SystemExit, match="2"):
            run_command(module.main)
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("error: ")
        assert told.err.count("\n") == 1
        assert len(told.err) < 300
