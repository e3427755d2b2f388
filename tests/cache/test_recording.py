"""A recording survives whatever ends it: finished shards stay, going on gives the capture that nothing interrupted, and
no reader sees one that is not whole."""

import errno
import fcntl
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

from cache.batch import Batch
from cache.manifest import MANIFEST, REQUEST
from cache.recording import Recording
from cache.store import Capture
from cache.verify import verify
from smelt_interp.errors import UserError, run_command
from tests.support.forked import Child, killed_after
from tests.support.planted import split_batch
from tests.support.planted_captures import contents, planted_capture, random_batch, shard_paths
from tests.support.recordings import (
    NUM_SAMPLES,
    SHARD_SAMPLES,
    add,
    record,
    recording_of,
    scratch_files,
    shard_bytes,
)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(NUM_SAMPLES)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "a"
    record(out, batch)
    return out


def test_killed_at_random_moments_and_gone_on_with(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out, delays, kept = tmp_path / "a", [], 0
    for _ in range(12):
        delays.append(random.uniform(0, 0.25))
        code, errors = killed_after(delays[-1], lambda: record(out, batch, pause=0.01))
        assert code in (0, -signal.SIGKILL), (errors, delays)
        still = shard_bytes(out)
        assert len(still) >= kept, delays
        kept = len(still)
        if code == 0:
            break
    record(out, batch)
    assert contents(out) == contents(uninterrupted), delays
    assert verify(out).samples == NUM_SAMPLES
    assert sorted(os.listdir(out)) == sorted([MANIFEST, *shard_bytes(out)])


def test_no_reader_sees_a_capture_that_is_not_whole(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a"
    child = Child(lambda: record(out, batch, pause=0.01))
    seen: Counter[str] = Counter()
    while True:
        running = child.running()
        try:
            found = Capture(out)
        except UserError as error:
            seen[" ".join(str(error).split()[:5])] += 1
        else:
            assert len(found.samples) == NUM_SAMPLES
            verify(out)
            seen["whole"] += 1
        if not running:
            break
    assert child.wait() == (0, "")
    assert set(seen) <= {"a capture must be a", "a capture must be finished;", "whole"}, seen
    assert seen["a capture must be finished;"] > 3
    assert seen["whole"] >= 1


def limit_files_after(work: Callable[[], None], num_shards: int, size: int) -> None:
    """Do the work; once so many shards are written, no file of this process may grow beyond `size` bytes."""
    add_one, written = Recording.add, 0

    def counted(self: Recording, positions: range, batches: list[Batch]) -> None:
        nonlocal written
        if written == num_shards:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        add_one(self, positions, batches)
        written += 1

    Recording.add = counted
    work()


@pytest.mark.parametrize("size", [0, 10_000])
def test_a_size_limit_in_the_middle_names_the_shard_and_loses_no_finished_one(
    tmp_path: Path, batch: Batch, uninterrupted: Path, size: int
) -> None:
    out = tmp_path / "a"
    work = partial(limit_files_after, lambda: run_command(lambda: record(out, batch)), 5, size)
    assert Child(work).wait() == (1, f"error: File too large: {out / '000010-000011.h5'}\n")
    assert len(shard_bytes(out)) == 5
    assert not scratch_files(out)
    record(out, batch)
    assert contents(out) == contents(uninterrupted)


def test_the_remains_of_a_killed_writer_go_at_the_next_run(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a"
    link = os.link

    def stopped(source: Path, target: Path) -> None:
        if target.name.startswith("000004"):
            os.kill(os.getpid(), signal.SIGKILL)
        link(source, target)

    def work() -> None:
        os.link = stopped
        record(out, batch)

    assert Child(work).wait()[0] == -signal.SIGKILL
    assert len(scratch_files(out)) == 1
    assert len(shard_bytes(out)) == 2
    record(out, batch)
    assert not scratch_files(out)


def test_the_same_batches_give_the_same_bytes(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    time.sleep(1.1)  # a time stamp in a file would differ
    record(tmp_path / "a", batch)
    assert shard_bytes(tmp_path / "a") == shard_bytes(uninterrupted)
    assert (tmp_path / "a" / MANIFEST).read_bytes() == (uninterrupted / MANIFEST).read_bytes()


@pytest.mark.parametrize("shard_samples", [3, 26])
def test_numbers_do_not_depend_on_the_shards(
    tmp_path: Path, batch: Batch, uninterrupted: Path, shard_samples: int
) -> None:
    ours, theirs = planted_capture(tmp_path / "a", batch, batch_size=shard_samples), Capture(uninterrupted)
    assert len(shard_paths(ours.path)) == -(-NUM_SAMPLES // shard_samples)
    assert ours.samples.digest() == theirs.samples.digest() == ours.samples_digest == theirs.samples_digest
    for suffix, (steps, _) in ours.kept.items():
        assert all(np.array_equal(ours.read(suffix, step), theirs.read(suffix, step)) for step in steps)


def test_several_processes_record_other_shards_of_one_capture(
    tmp_path: Path, batch: Batch, uninterrupted: Path
) -> None:
    """One that was opened before the others wrote theirs finishes with the shards of all."""
    out = tmp_path / "a"
    recording = recording_of(out, batch)
    add(recording, batch, slice(0, None, 3))
    with pytest.raises(UserError, match=r"must have all its shards to be finished; missing 8 of .*/a$"):
        recording.finish()
    children = [
        Child(lambda start=start: add(recording_of(out, batch), batch, slice(start, None, 3))) for start in (1, 2)
    ]
    assert [child.wait() for child in children] == [(0, "")] * 2
    recording.finish()
    assert contents(out) == contents(uninterrupted)


def test_recorders_under_one_name(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    """Each finds every shard missing; of a shard that two have recorded the first one's stays."""
    for number in range(3):
        out = tmp_path / str(number)
        children = [Child(partial(record, out, batch, 0.01 * number)) for _ in range(3)]
        assert [child.wait() for child in children] == [(0, "")] * 3
        assert verify(out).samples == NUM_SAMPLES
        assert contents(out) == contents(uninterrupted)
        assert sorted(os.listdir(out)) == sorted([MANIFEST, *shard_bytes(out)])


def test_a_shard_that_is_there_stays(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a"
    first, second = recording_of(out, batch), recording_of(out, batch)
    add(first, batch, slice(1))
    written = shard_paths(out)[0].stat()

    def asked() -> object:
        raise AssertionError("a shard that is there was computed again")
        yield

    second.add(range(SHARD_SAMPLES), asked())
    link, other = os.link, next(split_batch(batch, SHARD_SAMPLES))
    shard_paths(out)[0].rename(tmp_path / "kept")
    os.link = lambda source, target: (os.rename(tmp_path / "kept", target), link(source, target))
    try:
        second.add(range(SHARD_SAMPLES), [other])
    finally:
        os.link = link
    assert shard_paths(out)[0].stat().st_ino == written.st_ino
    assert not scratch_files(out)


def test_a_drive_without_locks_and_hard_links(
    tmp_path: Path, batch: Batch, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for module, call in ((fcntl, "flock"), (fcntl, "lockf"), (fcntl, "fcntl"), (os, "link")):
        monkeypatch.setattr(module, call, refused)
    record(tmp_path / "a", batch)
    assert contents(tmp_path / "a") == contents(uninterrupted)


def test_a_damaged_shard_is_recorded_again(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out = tmp_path / "a"
    add(recording_of(out, batch), batch, slice(6))
    paths = shard_paths(out)
    with h5py.File(paths[1]) as file:
        chunk = file["attn.hook_pattern"].id.get_chunk_info(3)
    data = bytearray(paths[1].read_bytes())
    data[chunk.byte_offset + 5] ^= 4
    paths[1].write_bytes(data)
    os.truncate(paths[2], 3000)
    paths[3].write_bytes(b"something else")
    missing = recording_of(out, batch).missing()
    assert [positions.start for positions in missing] == [2, 4, 6, *range(12, NUM_SAMPLES, 2)]
    record(out, batch)
    assert contents(out) == contents(uninterrupted)


def test_a_shard_that_changes_while_recording_is_told(tmp_path: Path, batch: Batch) -> None:
    recording = recording_of(tmp_path / "a", batch)
    add(recording, batch)
    path = shard_paths(tmp_path / "a")[3]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"a shard must be a whole HDF5 file; got {re.escape(str(path))}"):
        recording.finish()
    assert not (tmp_path / "a" / MANIFEST).exists()


def test_a_finished_capture_is_left_as_it_is(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a"
    record(out, batch)
    before = {name: (out / name).stat() for name in os.listdir(out)}
    record(out, batch)
    assert {name: (out / name).stat() for name in os.listdir(out)} == before
    match = r"a capture must not replace another; .*/a holds one that differs in seed: rename it"
    with pytest.raises(UserError, match=match):
        recording_of(out, batch, seed=1)
    with pytest.raises(UserError, match="differs in samples: rename it"):
        recording_of(out, replace(batch, samples=batch.samples.rows(np.arange(NUM_SAMPLES)[::-1].copy())))
    (out / MANIFEST).write_bytes(b"something else")
    with pytest.raises(UserError, match=r"a capture's manifest must hold JSON; got .*manifest.json"):
        record(out, batch)


def test_a_damaged_finished_capture_is_told(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a"
    record(out, batch)
    path = shard_paths(out)[2]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"/a is damaged, remove it and record again: .*changed or replaced"):
        recording_of(out, batch)
    path.unlink()
    with pytest.raises(UserError, match=r"/a is damaged, remove it and record again: .*must have all its shards"):
        recording_of(out, batch)


def test_a_folder_without_any_shard_is_of_no_request(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out = tmp_path / "a"
    other = recording_of(out, batch, seed=1)
    ours = recording_of(out, batch)
    with pytest.raises(UserError, match=r"shards to go on with must be of the same request; .* differs in seed"):
        add(other, batch, slice(1))
    (out / REQUEST).unlink()  # by a recorder that gave up
    add(ours, batch)
    ours.finish()
    assert contents(out) == contents(uninterrupted)


MEMORY_SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from cache.layout import Contents
from cache.recording import Recording
from cache.selection import select
from tests.support.planted import LOOPED, planted_batch, random_sites, text_samples
num_batches, out = int(sys.argv[1]), Path(sys.argv[2])
samples = text_samples(8 * num_batches, 64)
eight = samples.rows(slice(8))
one = planted_batch(LOOPED, eight, random_sites(LOOPED, eight, ("attn.hook_pattern",)))
planned = Contents(architecture=LOOPED.architecture(), samples=samples, sample_ids=np.arange(len(samples)),
                   sites=select(LOOPED.architecture(), ["attn.hook_pattern"]), precision="float32",
                   compression="gzip", shard_samples=8, source={})
recording = Recording(out, planned)
for positions in recording.missing():
    rows = slice(positions.start, positions.stop)
    batch = replace(one, samples=samples.rows(rows), sample_ids=np.arange(len(samples))[rows])
    recording.add(positions, [batch])
capture = recording.finish()
total = sum(float(batch.sites[3, "attn.hook_pattern"].sum()) for batch in capture.batches(["attn.hook_pattern"]))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, sum(shard.num_bytes for shard in capture.manifest.shards))
"""


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    (few_peak, few_size), (many_peak, many_size) = (
        map(int, subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, str(num_batches), tmp_path / str(num_batches)],
                                capture_output=True, text=True, check=True).stdout.split())
        for num_batches in (2, 20)
    )  # fmt: skip
    assert many_size - few_size > 20e6
    assert many_peak - few_peak < 0.15 * (many_size - few_size)
