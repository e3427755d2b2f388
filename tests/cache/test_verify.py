"""Verification finds every flipped bit, before HDF5 reads the file, and what a digest alone cannot tell."""

import hashlib
import json
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

from cache.store import Capture, sidecar
from cache.verify import verify, verify_contents
from smelt_interp.errors import UserError
from tests.support.forked import Child
from tests.support.planted_captures import planted_capture, random_batch


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_capture(tmp_path_factory.mktemp("written") / "a.h5", random_batch(4), batch_size=2).path


@pytest.fixture
def path(tmp_path: Path, written: Path) -> Path:
    shutil.copy(sidecar(written), tmp_path)
    return Path(shutil.copy(written, tmp_path))


def sign(path: Path) -> None:
    """Give the file a digest that fits its present bytes."""
    sidecar(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def test_a_whole_capture(path: Path) -> None:
    with h5py.File(path) as file:
        attention = file["attn.hook_pattern"].id.get_num_chunks()
    assert attention == 6 * 4 * 4
    verified = verify(path)
    assert verified[:2] == (4, 4)
    assert verified.chunks > attention + 3 * 6 * 4
    assert verify_contents(path) == verified


def test_a_thousand_of_a_thousand_flipped_bits_are_found(path: Path) -> None:
    size, found = path.stat().st_size, 0
    with path.open("r+b", buffering=0) as file:
        for _ in range(1000):
            place, bit = random.randrange(size), 1 << random.randrange(8)
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ bit]), place)
            try:
                verify(path)
            except UserError as error:
                found += "a capture must be as it was written" in str(error)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert found == 1000
    verify(path)


def test_flipped_bits_in_the_data_are_found_by_their_checksums_too(path: Path) -> None:
    blocks = []
    with h5py.File(path) as file:
        for name in ("hook_resid_post", "attn.hook_pattern", "tokens/ids", "logprob"):
            chunks = file[name].id
            blocks += [chunks.get_chunk_info(index) for index in range(chunks.get_num_chunks())]
    data = path.read_bytes()
    for block in random.sample(blocks, 60):
        damaged = bytearray(data)
        damaged[block.byte_offset + random.randrange(block.size)] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        sign(path)
        with pytest.raises(UserError, match="a capture must be a whole HDF5 file to"):
            verify(path)


def test_flipped_bits_elsewhere_are_found_by_the_checksums_of_the_format(path: Path) -> None:
    """In a child, since a library that reads damaged metadata might crash."""
    in_data = np.zeros(path.stat().st_size, bool)
    with h5py.File(path) as file:
        for dataset in (each for each in every_dataset(file) if each.chunks):
            for index in range(dataset.id.get_num_chunks()):
                block = dataset.id.get_chunk_info(index)
                in_data[block.byte_offset : block.byte_offset + block.size] = True
    elsewhere = np.flatnonzero(~in_data).tolist()
    data = path.read_bytes()

    def look() -> None:
        for place in random.choices(elsewhere, k=150):
            damaged = bytearray(data)
            damaged[place] ^= 1 << random.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(UserError):
                verify_contents(path)

    assert Child(look).wait() == (0, "")


def every_dataset(group: h5py.Group) -> Iterator[h5py.Dataset]:
    for item in group.values():
        yield from every_dataset(item) if isinstance(item, h5py.Group) else [item]


def test_the_digest_is_compared_before_hdf5_reads_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes()[:-1])

    def parsed(*arguments: object, **options: object) -> None:
        raise AssertionError("HDF5 was asked to read a file whose digest is wrong")

    monkeypatch.setattr(h5py, "File", parsed)
    with pytest.raises(UserError, match=r"a capture must be as it was written; .*a.h5 has changed: copy or record"):
        verify(path)


def test_a_missing_or_strange_digest(path: Path) -> None:
    sidecar(path).write_text("0123  a.h5\n")
    with pytest.raises(UserError, match=r"a.h5.sha256 must begin with a SHA-256 digest; got b'0123'"):
        verify(path)
    sidecar(path).unlink()
    with pytest.raises(UserError, match=r"a capture must have its digest beside it; got no .*a.h5.sha256: copy it too"):
        verify(path)
    path.unlink()
    with pytest.raises(UserError, match=r"a capture must be a file; got .*a.h5"):
        verify(path)


def test_a_missing_block_is_found(path: Path) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        attributes = dict(file["hook_resid_post"].attrs)
        del file["hook_resid_post"]
        empty = file.create_dataset("hook_resid_post", (6, 4, 12, 8), "f2", chunks=(1, 1, 12, 8), fletcher32=True)
        empty.attrs.update(attributes)
        empty[0] = 1
    sign(path)
    Capture(path)
    with pytest.raises(UserError, match=r"/hook_resid_post must be complete; 4 of 24 blocks"):
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
        ("domain", "c\u00f6de".encode(), r"tokens/domain must be ASCII; 1 are not"),
        ("sample_id", -1, r"tokens/sample_id must be 0 or above and ascend; 1 are not"),
        ("episode", (-2, 0, 0, False, False), r"tokens/episode must have shots from -1 and counts from 0; 1 are not"),
    ],
)
def test_tokens_outside_their_ranges(path: Path, name: str, value: object, match: str) -> None:
    """Told when a capture is opened, so before any probe computes with them."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        dataset = file[f"tokens/{name}"]
        dataset[(1, 2)[: dataset.ndim]] = np.array(value, dataset.dtype)
    sign(path)
    for look in (Capture, verify):
        with pytest.raises(UserError, match=match) as raised:
            look(path)
        assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("context", 11, r"tokens/ids must have rows of at most the context of 11; got 12"),
        ("steps", [[0, 0]] * 10_001, r"steps must be 1 to 10000; got 10001"),
        ("loop_factors", [1.0], r"loop_factors must be one a step; got 1"),
    ],
)
def test_an_architecture_that_the_capture_cannot_have(path: Path, field: str, value: object, match: str) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        architecture = json.loads(bytes(file.attrs["architecture"])) | {field: value}
        file.attrs["architecture"] = np.bytes_(json.dumps(architecture).encode())
    sign(path)
    for look in (Capture, verify):
        with pytest.raises(UserError, match=match):
            look(path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("hook_resid_post", np.nan, r"numbers of hook_resid_post must be finite; got nan"),
        ("attn.hook_pattern", -np.inf, r"numbers of attn.hook_pattern must be finite; got -inf"),
        ("logprob", np.inf, r"numbers of logprob must be finite; got inf"),
        ("mlp.hook_expert_indices", 8, r"numbers of mlp.hook_expert_indices must be 0 to 7; got 8: record it again"),
        ("mlp.hook_expert_indices", -1, r"numbers of mlp.hook_expert_indices must be 0 to 7; got -1"),
        ("argmax", 259, r"numbers of argmax must be 0 to 258; got 259"),
    ],
)
def test_numbers_that_cannot_be(path: Path, name: str, value: float, match: str) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file[name][(0,) * file[name].ndim] = value
    sign(path)
    with pytest.raises(UserError, match=match):
        verify(path)


def run(module: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, path], capture_output=True, text=True, check=False)


def test_the_commands(path: Path) -> None:
    done = run("cache.verify", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path} is whole: 4 samples, 4 sites, ")
    info = run("cache.info", path)
    assert (info.returncode, info.stderr) == (0, "")
    for words in ("4 samples of 12 tokens (4 code)", "attn.hook_pattern", "4 x 12 x 12", Capture(path).digest):
        assert words in info.stdout
    path.write_bytes(path.read_bytes()[:1000])
    for module in ("cache.verify", "cache.info"):
        done = run(module, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: a capture must be ")
        assert done.stderr.count("\n") == 1
