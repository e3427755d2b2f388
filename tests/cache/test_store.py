"""A capture gives back what was recorded and reads no more than it is asked for."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from cache import shard
from cache.batch import Batch
from cache.layout import Contents
from cache.recording import Recording
from cache.selection import select
from cache.store import Capture
from cache.verify import verify
from smelt_interp.data.token_text import TokenText
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES as ALL_SITES
from tests.support.planted import LOOPED, planted_batch, random_sites, split_batch, text_samples
from tests.support.planted_captures import (
    ARCHITECTURE,
    SITES,
    damage,
    planted_capture,
    random_batch,
    shard_paths,
    sign,
)


def joined(batches: list[Batch], key: tuple[int, str]) -> np.ndarray:
    return np.concatenate([each.sites[key] for each in batches])


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_batches_are_what_was_planted(path: Path, batch: Batch, batch_size: int) -> None:
    capture = Capture(path)
    batches = list(capture.batches(SITES, batch_size))
    assert [len(each.samples) for each in batches] == {1: [1] * 7, 2: [2, 1, 2, 1, 1], 3: [3, 3, 1], 8: [3, 3, 1]}[
        batch_size
    ]
    for key, values in batch.sites.items():
        assert np.array_equal(joined(batches, key), values)
    for name in ("logprob_BT", "argmax_BT", "sample_ids"):
        assert np.array_equal(np.concatenate([getattr(each, name) for each in batches]), getattr(batch, name))
    assert (capture.architecture, capture.samples.digest()) == (ARCHITECTURE, batch.samples.digest())
    assert batches[0].heads == batch.heads


def test_float16_is_within_its_rounding(tmp_path: Path, batch: Batch) -> None:
    capture = planted_capture(tmp_path / "a", batch)
    for step in range(6):
        values = capture.read("attn.hook_pattern", step)
        assert values.dtype == np.float32
        assert np.abs(values - batch.sites[step, "attn.hook_pattern"]).max() < 5e-4


def test_one_head_and_some_samples_of_each_site(tmp_path: Path) -> None:
    batch = random_batch(4, suffixes=tuple(ALL_SITES))
    capture = planted_capture(tmp_path / "a", batch, dtype="float32")
    assert capture.sites == tuple(ALL_SITES)
    for suffix, site in ALL_SITES.items():
        expected = batch.sites[3, suffix]
        assert np.array_equal(capture.read(suffix, 3), expected)
        assert np.array_equal(capture.read(suffix, 3, rows=slice(1, 3)), expected[1:3])
        if suffix in batch.heads:
            axis = 1 if "S" in site.axes else 2
            assert np.array_equal(capture.read(suffix, 3, head=1), expected.take(1, axis))


def test_heads_are_addressed_by_their_number_in_the_network(tmp_path: Path) -> None:
    whole = random_batch(4, suffixes=("attn.hook_pattern",))
    some = {key: values[:, [1, 3]] for key, values in whole.sites.items() if key[0] in (2, 4)}
    batch = Batch(
        architecture=ARCHITECTURE,
        samples=whole.samples,
        sample_ids=np.array([4, 5, 9, 30]),
        logprob_BT=whole.logprob_BT,
        argmax_BT=whole.argmax_BT,
        sites=some,
        heads={"attn.hook_pattern": (1, 3)},
    )
    capture = planted_capture(tmp_path / "a", batch, dtype="float32")
    assert np.array_equal(capture.read("attn.hook_pattern", 4, head=3), whole.sites[4, "attn.hook_pattern"][:, 3])
    assert [each.sample_ids.tolist() for each in capture.batches(())] == [[4, 5, 9], [30]]
    assert [sorted(each.sites) for each in capture.batches(["attn.hook_pattern"])] == [sorted(some)] * 2
    with pytest.raises(UserError, match=r"a head of attn.hook_pattern must be one of those recorded, \[1, 3\]; got 2"):
        capture.read("attn.hook_pattern", 4, head=2)
    with pytest.raises(UserError, match=r"a step of attn.hook_pattern must be one of those recorded, \[2, 4\]; got 0"):
        capture.read("attn.hook_pattern", 0)


def test_a_capture_without_sites_holds_what_the_network_answered(tmp_path: Path) -> None:
    batch = random_batch(4, suffixes=())
    capture = planted_capture(tmp_path / "a", batch)
    assert capture.sites == ()
    assert np.array_equal(np.concatenate([each.logprob_BT for each in capture.batches((), 3)]), batch.logprob_BT)


def test_text_is_that_of_the_tokens(path: Path, batch: Batch) -> None:
    capture = Capture(path)
    for row in range(7):
        assert capture.text(row) == BYTES.decode(batch.samples.ids_NT[row, : batch.samples.length_N[row]])


def test_text_that_is_no_utf8_and_samples_that_are_not_there(tmp_path: Path) -> None:
    batch = random_batch(2, suffixes=())
    text = TokenText.of([b""] * 12 + [b"", b"\xc3", b"("] + [b""] * 9)
    capture = planted_capture(tmp_path / "a", replace(batch, samples=replace(batch.samples, text=text)))
    assert capture.text(0) == ""
    assert "\ufffd(" in capture.text(1)
    for sample in (-1, 2):
        with pytest.raises(UserError, match=f"a sample must be 0 to 1; got {sample}"):
            capture.text(sample)


def bytes_read_by(work: Callable[[], object]) -> int:
    """Bytes that this process has the kernel read for `work`, as the kernel counts them."""

    def counted() -> int:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    own = -counted() + counted()
    before = counted()
    work()
    return counted() - before - own


def test_one_matrix_is_read_without_the_rest(tmp_path: Path) -> None:
    """The first time, its shard is read for the digest; the other shard never is."""
    samples = text_samples(30, 64)
    whole = planted_batch(LOOPED, samples, random_sites(LOOPED, samples, ("attn.hook_pattern",)))
    capture = planted_capture(tmp_path / "a", whole, batch_size=15, dtype="float32")
    matrix = 64 * 64 * 4
    size = capture.manifest.shards[0].num_bytes
    assert size > 6 * 15 * 4 * matrix / 3
    with unread_files():
        first = bytes_read_by(lambda: capture.read("attn.hook_pattern", 3, rows=slice(7, 8), head=2))
        assert size < first < 1.3 * size
        again = bytes_read_by(lambda: capture.read("attn.hook_pattern", 3, rows=slice(8, 9), head=2))
        assert again < size / 8
        everything = bytes_read_by(lambda: list(capture.batches(["attn.hook_pattern"])))
        assert everything > 2 * size


@contextmanager
def unread_files() -> Iterator[None]:
    """As in a process that has read no shard yet."""
    kept = dict(shard._verified)
    shard._verified.clear()
    yield
    shard._verified.update(kept)


def test_no_handle_stays_open(path: Path) -> None:
    capture = Capture(path)
    batches = capture.batches(SITES, 2)
    next(batches)
    capture.read("hook_resid_post", 0)
    paths = {each.resolve() for each in shard_paths(path)}
    assert not paths & {link.resolve() for link in Path("/proc/self/fd").iterdir()}
    with shard_paths(path)[0].open():
        assert paths & {link.resolve() for link in Path("/proc/self/fd").iterdir()}


def test_a_capture_is_read_without_torch(path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformer_lens', 'nnsight', 'transformers', 'model'): sys.modules[name] = None\n"
        "from cache.store import Capture\n"
        f"capture = Capture({str(path)!r})\n"
        "print(sum(batch.sites[2, 'hook_resid_post'].shape[0] for batch in capture.batches(['hook_resid_post'], 2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


def test_the_digest_stands_for_every_byte(path: Path) -> None:
    capture = Capture(path)
    for entry, file in zip(capture.manifest.shards, shard_paths(path), strict=True):
        done = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == entry.sha256
    before = capture.digest
    damage(shard_paths(path)[1], lambda file: file["logprob"].__setitem__((0, 0), -1.0))
    sign(path)
    assert Capture(path).digest != before


def test_a_file_that_this_process_has_open_is_read_all_the_same(path: Path) -> None:
    expected = next(Capture(path).batches(SITES)).sites[2, "attn.hook_k"]
    for options in ({}, {"locking": True}, {"locking": False}, {"libver": "latest"}):
        with h5py.File(shard_paths(path)[0], **options):
            assert np.array_equal(Capture(path).read("attn.hook_k", 2, slice(0, 3)), expected)


def test_a_capture_in_a_folder_that_cannot_be_written(path: Path) -> None:
    for each in (*path.iterdir(), path):
        each.chmod(0o555 if each.is_dir() else 0o444)
    try:
        assert len(list(Capture(path).batches(SITES))) == 3
        assert verify(path).samples == 7
    finally:
        path.chmod(0o755)


def test_rows_across_shards_and_rows_that_are_none(path: Path, batch: Batch) -> None:
    capture = Capture(path)
    expected = batch.sites[3, "attn.hook_k"]
    assert len(capture) == 7
    for rows in (slice(2, 7), slice(None), slice(-2, None), slice(6, 9)):
        assert np.array_equal(capture.read("attn.hook_k", 3, rows), expected[rows])
    for rows in (slice(7, 9), slice(3, 3), slice(0, 7, 2)):
        with pytest.raises(UserError, match=r"rows must be some of the samples 0 to 6, in order; got slice"):
            capture.read("attn.hook_k", 3, rows)


def test_an_index_that_the_network_does_not_have_is_told_where_it_is_read(path: Path) -> None:
    name = "mlp.hook_expert_indices"
    for value in (8, -1):
        damage(shard_paths(path)[1], lambda file, value=value: file[name].__setitem__((0, 0, 0, 0), value))
        sign(path)
        with pytest.raises(UserError, match=rf"numbers of {name} must be 0 to 7; got {value}: copy or record"):
            list(Capture(path).batches([name]))


@pytest.mark.parametrize("head", [0, "all"])
def test_a_shard_that_was_replaced_is_told_whatever_its_time_stamp(path: Path, batch: Batch, head: int | str) -> None:
    """The old table is not shown for the new file: what a probe cites is what it read."""
    capture, target = Capture(path), shard_paths(path)[1]
    capture.read("attn.hook_k", 2, slice(3, 6), head)
    other = planted_capture(path.parent / "b", random_batch(seed=1), dtype="float32").path
    times = target.stat()
    shutil.copyfile(shard_paths(other)[1], target)
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    for look in (capture, Capture(path)):
        with pytest.raises(UserError, match=rf"{target}: a shard must be as it was written; this one was changed"):
            look.read("attn.hook_k", 2, slice(3, 6), head)
    assert np.array_equal(capture.read("attn.hook_k", 2, slice(0, 3)), batch.sites[2, "attn.hook_k"][:3])


def test_two_chunks_that_change_places_are_told(path: Path) -> None:
    target = shard_paths(path)[0]
    with h5py.File(target) as file:
        chunks = [file["hook_resid_post"].id.get_chunk_info(index) for index in (3, 9)]
    data = bytearray(target.read_bytes())
    (a, b), size = (chunk.byte_offset for chunk in chunks), chunks[0].size
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    target.write_bytes(data)
    with pytest.raises(UserError, match="this one was changed or replaced"):
        Capture(path).read("attn.hook_k", 0)


def test_a_site_that_was_not_recorded(path: Path) -> None:
    with pytest.raises(UserError, match=r"must hold the site attn.hook_q; .* record it again with that site"):
        Capture(path).batches(["attn.hook_q"])
    with pytest.raises(UserError, match=r"got 'attn.hook_kk'; nearest: attn.hook_k"):
        Capture(path).read("attn.hook_kk", 0)
    with pytest.raises(UserError, match="batch_size must be at least 1; got 0"):
        Capture(path).batches(SITES, 0)


# Folders that are not a capture


def test_no_folder(tmp_path: Path, path: Path) -> None:
    for name in ("none", "", ".", "a\0b", "x" * 300, "a/000000-000002.h5/more"):
        with pytest.raises(UserError, match=r"a capture must be a folder (with a manifest.json|that can be read);"):
            Capture(tmp_path / name if name else "")
    with pytest.raises(UserError, match=r"got the file .*000002.h5: version 1, one .h5 file, is read by "):
        Capture(shard_paths(path)[0])


def test_a_file_of_version_1_gets_one_line(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file.attrs.update(schema=np.bytes_("smelt.capture"), version=1)
    for module in ("cache.info", "cache.verify"):
        done = subprocess.run(
            [sys.executable, "-m", module, tmp_path / "old.h5"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"error: a capture must be a folder of shards; got the file {tmp_path / 'old.h5'}: version 1, one .h5 "
            "file, is read by the release that wrote it: record it again\n"
        )


def test_an_unfinished_capture_names_the_command_to_go_on(tmp_path: Path, batch: Batch) -> None:
    contents = Contents(
        architecture=ARCHITECTURE,
        samples=batch.samples,
        sample_ids=batch.sample_ids,
        sites=select(ARCHITECTURE, SITES),
        precision="float16",
        compression="gzip",
        shard_samples=3,
        source={},
    )
    recording = Recording(tmp_path / "a", contents, "python -m cache.record --out a")
    recording.add(range(3), [next(split_batch(batch, 3))])
    match = r"must be finished; got .*a with 1 finished shards: go on with: python -m cache.record --out a$"
    with pytest.raises(UserError, match=match):
        Capture(tmp_path / "a")
