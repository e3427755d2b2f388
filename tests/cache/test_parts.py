"""A recording survives whatever ends it: finished parts stay, going on gives the capture that nothing interrupted, and
no reader sees a file that is not whole."""

import fcntl
import hashlib
import io
import json
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
from cache.layout import Contents
from cache.parts import LOCK_FILE, Recording, _Disk, write_capture
from cache.selection import select
from cache.store import Capture, parts_folder, sidecar
from cache.verify import verify
from smelt_interp.errors import UserError, run_command
from tests.support.forked import Child, killed_after
from tests.support.planted import split_batch
from tests.support.planted_captures import ARCHITECTURE, SITES, contents, planted_capture, random_batch

NUM_SAMPLES, BATCH_SIZE = 26, 2


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(NUM_SAMPLES)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "a.h5"
    record(out, batch)
    return out


def recording_of(out: Path, batch: Batch, **source: object) -> Recording:
    planned = Contents(
        architecture=ARCHITECTURE,
        samples=batch.samples,
        sample_ids=batch.sample_ids,
        sites=select(ARCHITECTURE, SITES),
        precision="float16",
        source=source,
    )
    return Recording(out, planned, "the command")


def record(out: Path, batch: Batch, pause: float = 0.0) -> None:
    """Record what is missing, as `cache.record` does, from batches at hand."""
    recording = recording_of(out, batch)
    if not recording.finished:
        batches = list(split_batch(batch, BATCH_SIZE))
        for block in recording.missing(BATCH_SIZE):
            time.sleep(pause)
            recording.add(batches[block.start // BATCH_SIZE])
    recording.finish()


def part_bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in parts_folder(out).glob("*-*.h5")}


def test_killed_at_random_moments_and_gone_on_with(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out, delays, kept = tmp_path / "a.h5", [], 0
    for _ in range(12):
        delays.append(random.uniform(0, 0.25))
        code, errors = killed_after(delays[-1], lambda: record(out, batch, pause=0.01))
        assert code in (0, -signal.SIGKILL), (errors, delays)
        still = part_bytes(out)
        assert len(still) >= kept or out.exists(), delays
        kept = len(still)
        if code == 0:
            break
    record(out, batch)
    assert contents(out) == contents(uninterrupted), delays
    assert verify(out).samples == NUM_SAMPLES
    assert os.listdir(tmp_path).count("a.parts") == 0


def test_killed_while_the_parts_are_joined(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out = tmp_path / "a.h5"
    recording = recording_of(out, batch)
    for each in split_batch(batch, BATCH_SIZE):
        recording.add(each)
    for _ in range(6):
        killed_after(random.uniform(0, 0.15), lambda: record(out, batch))
        if out.exists():
            verify(out)
        else:
            assert len(part_bytes(out)) == NUM_SAMPLES // BATCH_SIZE
    record(out, batch)
    assert contents(out) == contents(uninterrupted)


def test_no_reader_sees_a_file_that_is_not_whole(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a.h5"
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


def limit_files_after(work: Callable[[], None], num_parts: int, size: int) -> None:
    """Do the work; once so many parts are written, no file of this process may grow beyond `size` bytes."""
    add, written = Recording.add, 0

    def counted(self: Recording, batch: Batch) -> None:
        nonlocal written
        if written == num_parts:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        add(self, batch)
        written += 1

    Recording.add = counted
    work()


def record_under_limit(out: Path, batch: Batch, num_parts: int, size: int) -> None:
    limit_files_after(lambda: run_command(lambda: record(out, batch)), num_parts, size)


@pytest.mark.parametrize("size", [0, 10_000])
def test_a_size_limit_in_the_middle_loses_no_finished_part(
    tmp_path: Path, batch: Batch, uninterrupted: Path, size: int
) -> None:
    out = tmp_path / "a.h5"
    code, errors = Child(lambda: record_under_limit(out, batch, 5, size)).wait()
    assert (code, errors[:21]) == (1, "error: File too large"), errors
    kept = part_bytes(out)
    assert len(kept) == 5
    assert not [path for path in parts_folder(out).iterdir() if path.name.startswith(".")]
    record(out, batch)
    assert contents(out) == contents(uninterrupted)


def test_a_size_limit_on_the_joined_file_loses_no_part(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    size = uninterrupted.stat().st_size
    for limit in (0.3, 0.6, 0.99):
        out = tmp_path / f"{limit}.h5"
        code, errors = Child(partial(record_under_limit, out, batch, 0, int(size * limit))).wait()
        assert (code, errors[:21]) == (1, "error: File too large"), errors
        assert len(part_bytes(out)) == NUM_SAMPLES // BATCH_SIZE
        assert not out.exists()
        record(out, batch)
        assert contents(out) == contents(uninterrupted)


def test_hdf5_never_sees_a_write_fail() -> None:
    disk = _Disk("/dev/full", "r+")
    assert disk.write(b"data") == 4
    disk.truncate(0)
    assert disk.write(b"more") == 4
    with pytest.raises(OSError, match="No space left on device"):
        disk.check()
    disk.close()


def test_the_same_batches_give_the_same_bytes(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    time.sleep(1.1)  # a time stamp in the file would differ
    record(tmp_path / "a.h5", batch)
    assert (tmp_path / "a.h5").read_bytes() == uninterrupted.read_bytes()
    assert sidecar(tmp_path / "a.h5").read_bytes() == sidecar(uninterrupted).read_bytes()


@pytest.mark.parametrize("batch_size", [1, 3, 8, 26])
def test_datasets_do_not_depend_on_the_parts(
    tmp_path: Path, batch: Batch, uninterrupted: Path, batch_size: int
) -> None:
    capture = planted_capture(tmp_path / "a.h5", batch, batch_size=batch_size)
    ours, theirs = contents(capture.path), contents(uninterrupted)
    assert ours == theirs


def test_several_processes_record_other_batches_of_one_capture(
    tmp_path: Path, batch: Batch, uninterrupted: Path
) -> None:
    """One that was opened before the others wrote theirs joins the parts of all."""
    out, batches = tmp_path / "a.h5", list(split_batch(batch, BATCH_SIZE))
    recording = recording_of(out, batch)

    def record_every_third(start: int) -> None:
        other = recording_of(out, batch)
        for each in batches[start::3]:
            other.add(each)

    for each in batches[::3]:
        recording.add(each)
    with pytest.raises(UserError, match="a capture must have all its samples before it is joined; got 5 parts"):
        recording.finish()
    children = [Child(partial(record_every_third, start)) for start in (1, 2)]
    assert [child.wait() for child in children] == [(0, "")] * 2
    recording.finish()
    assert contents(out) == contents(uninterrupted)


def test_a_damaged_part_is_recorded_again(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out = tmp_path / "a.h5"
    recording = recording_of(out, batch)
    for each in list(split_batch(batch, BATCH_SIZE))[:6]:
        recording.add(each)
    for number, path in enumerate(sorted(parts_folder(out).glob("*-*.h5"))[1:4]):
        data = bytearray(path.read_bytes())
        if number == 2:
            del data[len(data) // 2 :]
        else:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)
    again = recording_of(out, batch)
    done = {0, 8, 10}
    assert {block.start for block in again.missing(BATCH_SIZE)} == set(range(0, NUM_SAMPLES, BATCH_SIZE)) - done
    record(out, batch)
    assert contents(out) == contents(uninterrupted)


def test_a_part_that_changes_while_recording_is_told(tmp_path: Path, batch: Batch) -> None:
    recording = recording_of(tmp_path / "a.h5", batch)
    for each in split_batch(batch, BATCH_SIZE):
        recording.add(each)
    path = next(parts_folder(tmp_path / "a.h5").glob("*-*.h5"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(UserError, match=r"a part must be as it was written; .* has changed: run the command again"):
        recording.finish()
    assert not (tmp_path / "a.h5").exists()


def test_a_finished_capture_is_left_as_it_is(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a.h5"
    record(out, batch)
    before = out.stat()
    parts_folder(out).mkdir()  # as a kill right after the last rename leaves it
    (parts_folder(out) / "request.json").write_text("{}")
    record(out, batch)
    assert out.stat() == before
    assert not parts_folder(out).exists()
    with pytest.raises(
        UserError, match=r"a capture must not replace another; .*a.h5 holds one that differs in seed: rename it"
    ):
        recording_of(out, batch, seed=1)
    with pytest.raises(UserError, match="a capture must not replace another"):
        recording_of(out, replace(batch, samples=batch.samples.rows(np.arange(NUM_SAMPLES)[::-1].copy())))
    out.write_bytes(b"something else")
    with pytest.raises(UserError, match=r"a.h5 is damaged, remove it and record again: a capture must be as it was"):
        record(out, batch)
    sidecar(out).unlink()
    with pytest.raises(UserError, match="a capture must be a whole HDF5 file"):
        record(out, batch)
    assert out.read_bytes() == b"something else"


@pytest.mark.parametrize("with_digest", [True, False])
def test_a_damaged_finished_capture_is_told(tmp_path: Path, batch: Batch, with_digest: bool) -> None:
    out = tmp_path / "a.h5"
    record(out, batch)
    with h5py.File(out) as file:
        block = file["hook_resid_post"].id.get_chunk_info(3)
    data = bytearray(out.read_bytes())
    data[block.byte_offset + 5] ^= 1
    out.write_bytes(data)
    if not with_digest:
        sidecar(out).unlink()
    with pytest.raises(UserError, match=r"a.h5 is damaged, remove it and record again: ") as raised:
        recording_of(out, batch)
    assert "\n" not in str(raised.value)
    out.unlink()
    record(out, batch)
    verify(out)


def test_two_recorders_under_one_name(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    """Each finds every batch missing; the one that comes second uses what the first has joined."""
    for number in range(3):
        out = tmp_path / f"{number}.h5"
        children = [Child(partial(record, out, batch, 0.01 * number)) for _ in range(3)]
        assert [child.wait() for child in children] == [(0, "")] * 3
        assert verify(out).samples == NUM_SAMPLES
        assert contents(out) == contents(uninterrupted)
        assert not parts_folder(out).exists()


def test_the_second_waits_while_the_first_joins(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a.h5"
    first = recording_of(out, batch)
    for each in split_batch(batch, BATCH_SIZE):
        first.add(each)
    second = recording_of(out, batch)
    with (parts_folder(out) / LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = Child(lambda: print(second.finish().path, file=sys.stderr))
        time.sleep(0.3)
        assert child.running()
        assert not out.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)  # the child holds a copy of the descriptor
    assert child.wait() == (0, f"{out}\n")
    written = out.stat()
    first.add(next(split_batch(batch, BATCH_SIZE)))
    assert first.finish().digest == Capture(out).digest
    assert out.stat() == written
    assert not parts_folder(out).exists()


def test_parts_without_any_part_are_of_no_request(tmp_path: Path, batch: Batch, uninterrupted: Path) -> None:
    out = tmp_path / "a.h5"
    other = recording_of(out, batch, seed=1)
    record(out, batch)
    assert contents(out) == contents(uninterrupted)
    out.unlink()
    ours = recording_of(out, batch)
    with pytest.raises(UserError, match=r"parts to go on with must be of the same request; .* differs in seed"):
        other.add(next(split_batch(batch, BATCH_SIZE)))
    ours.add(next(split_batch(batch, BATCH_SIZE)))
    (parts_folder(out) / "request.json").unlink()
    with pytest.raises(UserError, match=r"got no request.json"):
        ours.finish()


@pytest.mark.parametrize("text", ["[]", "null", "3", "{", '{"digest":"x","request":3}', "[" * 100_000, "{}"])
def test_a_request_that_is_none(tmp_path: Path, batch: Batch, text: str) -> None:
    out = tmp_path / "a.h5"
    recording_of(out, batch).add(next(split_batch(batch, BATCH_SIZE)))
    (parts_folder(out) / "request.json").write_text(text)
    with pytest.raises(UserError, match=r"^\S*request.json must hold the request of a recording; got .*: remove \S*$"):
        recording_of(out, batch)
    with pytest.raises(UserError, match=r"a capture must be finished; got .*: run the command that records it again$"):
        Capture(out)


def test_a_command_in_a_request_that_is_no_line(tmp_path: Path, batch: Batch) -> None:
    recording_of(tmp_path / "a.h5", batch)
    for command in (3, "two\nlines", None):
        (parts_folder(tmp_path / "a.h5") / "request.json").write_text(json.dumps({"command": command}))
        with pytest.raises(UserError, match=r"0 finished parts: run the command that records it again$"):
            Capture(tmp_path / "a.h5")


def named(folder: Path, first: int, data: bytes) -> Path:
    """A file with the name that a part of these bytes has."""
    path = folder / f"{first:08d}-{hashlib.sha256(data).hexdigest()}.h5"
    path.write_bytes(data)
    return path


def test_files_that_are_no_parts(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a.h5"
    recording = recording_of(out, batch)
    recording.add(next(split_batch(batch, BATCH_SIZE)))
    folder = parts_folder(out)
    ((name, data),) = part_bytes(out).items()
    with h5py.File(io.BytesIO(data)) as file, h5py.File(tmp_path / "less.h5", "w") as less:
        file.copy("logprob", less)
    with h5py.File(tmp_path / "linked.h5", "w") as linked:
        linked["logprob"] = h5py.ExternalLink("/etc/passwd", "/")
    strangers = [
        (folder / f"abc-{name[9:]}", data, r"a part must be named FIRST-SHA256.h5; got {}: remove it"),
        (folder / f"{'9' * 30}-{name[9:]}", data, r"a part must be named FIRST-SHA256.h5; got {}: remove it"),
        (folder / "more.h5", data, r"a part must be named FIRST-SHA256.h5; got {}: remove it"),
        (named(folder, 4, b"junk"), b"junk", r"{} must be a part of this recording; .*: remove it"),
        (named(folder, NUM_SAMPLES - 1, data), data, r"{} .*its samples must be of the 26 recorded; got 2 from 25"),
    ]
    for file_name, match in (
        ("less.h5", r"{} .*the datasets of its request; got argmax, attn.hook_k,"),
        ("linked.h5", r"{} .*must hold no links to elsewhere; got ExternalLink 'logprob'"),
    ):
        image = (tmp_path / file_name).read_bytes()
        strangers.append((named(folder, 4, image), image, match))
    for path, _, _ in strangers:
        path.unlink(missing_ok=True)
    for path, image, match in strangers:
        path.write_bytes(image)
        for look in (lambda: recording_of(out, batch), recording.finish):
            with pytest.raises(UserError, match=match.format(re.escape(str(path)))) as raised:
                look()
            assert "\n" not in str(raised.value)
        path.unlink()
    assert part_bytes(out) == {name: data}


def test_parts_of_another_request_are_refused(tmp_path: Path, batch: Batch) -> None:
    out = tmp_path / "a.h5"
    recording_of(out, batch, seed=0, threads=1).add(next(split_batch(batch, 2)))
    before = part_bytes(out)
    match = r"parts to go on with must be of the same request; .*a.parts differs in seed: remove it or choose another"
    with pytest.raises(UserError, match=match):
        recording_of(out, batch, seed=1, threads=1)
    (parts_folder(out) / "request.json").unlink()
    with pytest.raises(UserError, match=r"must hold the parts of one recording; got no request.json in it"):
        recording_of(out, batch, seed=0, threads=1)
    assert part_bytes(out) == before


def test_names_that_cannot_be_written(tmp_path: Path, batch: Batch) -> None:
    with pytest.raises(UserError, match=r"a capture's name must end in .h5; got .*a.hdf"):
        record(tmp_path / "a.hdf", batch)
    with pytest.raises(UserError, match=r"a capture's name must have at most 230 bytes; got 231: "):
        record(tmp_path / f"{'ä' * 114}.h5", batch)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the output folder must be writable; got .*file: File exists"):
        record(tmp_path / "file" / "a.h5", batch)
    with pytest.raises(UserError, match=r"the output folder must be writable; got /proc/none: No such file"):
        record(Path("/proc/none/a.h5"), batch)
    assert os.listdir(tmp_path) == ["file"]


def test_batches_that_do_not_belong(tmp_path: Path, batch: Batch) -> None:
    recording = recording_of(tmp_path / "a.h5", batch)
    first, second = list(split_batch(batch, BATCH_SIZE))[:2]
    with pytest.raises(UserError, match=r"a batch must hold consecutive samples of its capture; got \[2, 0\]"):
        recording.add(replace(first, sample_ids=np.array([2, 0])))
    with pytest.raises(UserError, match="a batch must hold consecutive samples of its capture"):
        recording.add(replace(first, sample_ids=second.sample_ids))
    some = {key: values for key, values in first.sites.items() if key != (3, "attn.hook_k")}
    with pytest.raises(UserError, match=r"a batch must hold every site of its capture; missing attn.hook_k of step 3"):
        recording.add(replace(first, sites=some))
    with pytest.raises(UserError, match=r"attn.hook_k must have shape \(2, 12, 2, 6\) for heads \[0, 1\]; got"):
        recording.add(replace(first, heads={**first.heads, "attn.hook_k": (0,)}))
    with pytest.raises(UserError, match="a capture must have all its samples before it is joined; got 0 parts"):
        recording.finish()
    assert part_bytes(tmp_path / "a.h5") == {}


def test_batches_of_different_types(tmp_path: Path, batch: Batch) -> None:
    first, *rest = split_batch(batch, BATCH_SIZE)
    with pytest.raises(UserError, match="hook_resid_post must be of one type in every batch; got uint16 and float16"):
        write_capture(tmp_path / "a.h5", [replace(first, bfloat16=frozenset({"hook_resid_post"})), *rest])


MEMORY_SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = ["tests"]
import numpy as np
from cache.layout import Contents
from cache.parts import Recording
from cache.selection import select
from tests.support.planted import LOOPED, planted_batch, random_sites, text_samples
ARCHITECTURE = LOOPED.architecture()
num_batches, out = int(sys.argv[1]), Path(sys.argv[2])
samples = text_samples(8 * num_batches, 64)
eight = samples.rows(slice(8))
one = planted_batch(LOOPED, eight, random_sites(LOOPED, eight, ("attn.hook_pattern",)))
planned = Contents(architecture=ARCHITECTURE, samples=samples, sample_ids=np.arange(len(samples)),
                   sites=select(ARCHITECTURE, ["attn.hook_pattern"]), precision="float32", source={})
recording = Recording(out, planned)
for first in range(0, len(samples), 8):
    rows = slice(first, first + 8)
    recording.add(replace(one, samples=samples.rows(rows), sample_ids=np.arange(len(samples))[rows]))
capture = recording.finish()
total = sum(float(batch.sites[3, "attn.hook_pattern"].sum()) for batch in capture.batches(["attn.hook_pattern"]))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, capture.path.stat().st_size)
"""


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    (few_peak, few_size), (many_peak, many_size) = (
        map(int, subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, str(num_batches), tmp_path / f"{num_batches}.h5"],
                                capture_output=True, text=True, check=True).stdout.split())
        for num_batches in (2, 20)
    )  # fmt: skip
    assert many_size - few_size > 20e6
    assert many_peak - few_peak < 0.15 * (many_size - few_size)
