"""A capture while it is recorded: a folder of finished parts, resumed after any end, joined into one file at the last.

`NAME.parts/` holds `request.json` and one small HDF5 file a batch, `FIRST-SHA256.h5`: the position of its first sample
and the digest of its bytes. A part is built in memory, written with one plain write, flushed to the disk, and only
then given its name, so what has a name is whole. The parts of one request make the same capture whichever process
wrote them, one after the other or several at once, each other batches. At the end their chunks are copied, still
compressed, into one file inside the folder, which is read back, digested, and moved to `NAME.h5`.
"""

import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from cache.batch import Batch
from cache.layout import (
    LIBRARY_FORMAT,
    OUTPUT_TYPES,
    SCHEMA,
    TOKEN_COLUMNS,
    TOKEN_TYPES,
    VERSION,
    Contents,
    Precision,
    create_site,
    part_image,
    site_chunk,
    site_shape,
)
from cache.selection import Kept
from cache.store import DAMAGE, REQUEST_FILE, Capture, check_links, parts_folder, sidecar
from cache.verify import verify_contents, verify_digest
from smelt_interp.data.samples import concatenate
from smelt_interp.data.tokenizer import PAD
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES
from smelt_interp.terminal.output_files import make_folder, write_whole

LOCK_FILE = "lock"
LONGEST_NAME = 230
"""Bytes of a capture's name: a file system takes 255, and the names of files beside it are longer."""
_PART_NAME = re.compile(r"([0-9]{8,18})-([0-9a-f]{64})\.h5")


class Part(NamedTuple):
    """A finished part."""

    first: int
    """Position of its first sample in the capture."""
    num_samples: int
    """Samples that it holds."""
    path: Path


class Recording:
    """A capture that is being recorded, or was before and is gone on with.

    Raises UserError for a name that does not end in .h5 or is too long, a folder that cannot be written, a damaged
    file, and a file or parts of another request under the same name. `finished` says that the very capture is already
    there, whole. A folder without any part belongs to no request.
    """

    def __init__(self, out: Path, contents: Contents, command: str = "") -> None:
        if out.suffix != ".h5":
            raise UserError(f"a capture's name must end in .h5; got {out}")
        if (num_bytes := len(os.fsencode(out.name))) > LONGEST_NAME:
            raise UserError(f"a capture's name must have at most {LONGEST_NAME} bytes; got {num_bytes}: {out}")
        self._out = out
        self._contents = contents
        self._command = command
        self._folder = parts_folder(out)
        self._digest = contents.digest()
        self._parts: dict[int, Part] = {}
        self.finished = self._is_there()
        if self.finished:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        make_folder(out.parent)
        make_folder(self._folder)
        with self._locked(fcntl.LOCK_EX) as finished:
            self.finished = finished
            if not finished:
                self._open_folder()
                self._look()

    def missing(self, batch_size: int) -> list[range]:
        """The batches of `batch_size` positions that no finished part holds, in order.

        Processes that record together share out what was missing before the first of them added a part.
        """
        num_samples = len(self._contents.samples)
        blocks = [range(i, min(i + batch_size, num_samples)) for i in range(0, num_samples, batch_size)]
        return [block for block in blocks if block.start not in self._parts]

    def add(self, batch: Batch) -> None:
        """Write the batch as a finished part. Its samples must be the next ones after its first in the capture."""
        contents, count = self._contents, len(batch.samples)
        first = int(np.searchsorted(contents.sample_ids, batch.sample_ids[0]))
        expected = slice(first, first + count)
        if not np.array_equal(contents.sample_ids[expected], batch.sample_ids) or not np.array_equal(
            contents.samples.ids_NT[expected], batch.samples.ids_NT
        ):
            raise UserError(f"a batch must hold consecutive samples of its capture; got {batch.sample_ids.tolist()}")
        image = part_image(contents, batch)
        path = self._folder / f"{first:08d}-{hashlib.sha256(image).hexdigest()}.h5"
        with self._locked(fcntl.LOCK_SH) as finished:
            self.finished = finished
            if not finished:
                self._check_request()
                write_whole(path, image)
        self._parts[first] = Part(first, count, path)

    def finish(self) -> Capture:
        """Join the parts into the capture, verify it, move it to its name, remove the parts.

        Parts that other processes have written are joined too; where another process is joining them, it is waited
        for. Raises UserError while samples are missing.
        """
        if not self.finished:
            with self._locked(fcntl.LOCK_EX) as finished:
                if not finished:
                    self._check_request()
                    self._look()
                    self._publish()
                    shutil.rmtree(self._folder)
            self.finished = True
        return Capture(self._out)

    def _publish(self) -> None:
        """Join the parts in hand and give the whole file its name."""
        whole = self._folder / "whole.partial"
        self._join(whole)
        verify_contents(whole)
        with whole.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        write_whole(sidecar(self._out), f"{digest}  {self._out.name}\n".encode())
        os.replace(whole, self._out)
        _sync_folder(self._out.parent)

    def _is_there(self) -> bool:
        """Whether the finished capture is. Raises UserError for another file, or a damaged one, in its place."""
        if not self._out.exists():
            return False
        has_digest = sidecar(self._out).is_file() and self._out.is_file()
        if has_digest:  # before HDF5 reads the file
            self._check_whole(verify_digest)
        capture = Capture(self._out)
        if capture.contents_digest != self._digest:
            differing = ", ".join(_differing(capture, self._contents))
            raise UserError(
                f"a capture must not replace another; {self._out} holds one that differs in {differing}: "
                "rename it or choose another name"
            )
        if not has_digest:
            self._check_whole(verify_contents)
        return True

    def _check_whole(self, check: Callable[[Path], object]) -> None:
        try:
            check(self._out)
        except UserError as error:
            raise UserError(f"{self._out} is damaged, remove it and record again: {error}") from None

    @contextmanager
    def _locked(self, operation: int) -> Iterator[bool]:
        """Hold the lock of the folder, shared (LOCK_SH) to add a part, alone (LOCK_EX) to open the folder or to join;
        gives whether the capture is finished, in which case the folder may be gone."""
        try:
            descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if not self._is_there():
                raise
            yield True
            return
        try:
            fcntl.flock(descriptor, operation)
            yield self._is_there()
        finally:
            os.close(descriptor)

    def _open_folder(self) -> None:
        if any(self._folder.glob("*.h5")):
            self._check_request()
            return
        document = {"digest": self._digest, "request": self._contents.request(), "command": self._command}
        write_whole(self._folder / REQUEST_FILE, json.dumps(document, indent=1).encode())

    def _check_request(self) -> None:
        request = self._folder / REQUEST_FILE
        if not request.exists():
            raise UserError(f"{self._folder} must hold the parts of one recording; got no {REQUEST_FILE} in it")
        try:
            stored = json.loads(request.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            stored = None
        theirs = stored.get("request") if isinstance(stored, dict) else None
        if not isinstance(theirs, dict):
            raise UserError(
                f"{request} must hold the request of a recording; got something else: remove {self._folder}"
            )
        if stored.get("digest") != self._digest:
            ours = json.loads(self._contents.request_json())
            differ = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)] or ["architecture"]
            raise UserError(
                f"parts to go on with must be of the same request; {self._folder} differs in {', '.join(differ)}: "
                "remove it or choose another name"
            )

    def _look(self) -> None:
        """Take up the parts in the folder whose bytes are what their name says; others are removed."""
        for path in sorted(self._folder.glob("*.h5")):
            name = _PART_NAME.fullmatch(path.name)
            if name is None:
                raise UserError(f"a part must be named FIRST-SHA256.h5; got {path}: remove it")
            first = int(name[1])
            if first in self._parts:
                continue
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != name[2]:
                path.unlink()
                continue
            with _part_file(path, data) as file:
                self._parts[first] = Part(first, _num_samples(file, first, self._contents), path)

    def _join(self, whole: Path) -> None:
        parts = [self._parts[first] for first in sorted(self._parts)]
        ends = [0, *(part.first + part.num_samples for part in parts)]
        if [part.first for part in parts] != ends[:-1] or ends[-1] != len(self._contents.samples):
            raise UserError(f"a capture must have all its samples before it is joined; got {len(parts)} parts")
        disk = _Disk(whole, "w+")
        try:
            with h5py.File(disk, "w", libver=LIBRARY_FORMAT) as file:
                _write_head(file, self._contents, self._command)
                for part in parts:
                    _copy(part, file, len(self._contents.samples))
                    disk.check()
        finally:
            disk.close()
            disk.check()


def write_capture(
    out: Path,
    batches: Sequence[Batch],
    *,
    dtype: Precision = "float16",
    source: dict[str, object] | None = None,
    command: str = "",
) -> Capture:
    """Write batches that are at hand as a capture, the way `cache.record` does.

    Sites, steps and heads are those of the first batch; all must have the same. The batches are in the order of their
    sample ids. Raises UserError as `Recording` does.
    """
    if not batches:
        raise UserError("batches to write must be at least one; got 0")
    batch = batches[0]
    suffixes = [suffix for suffix in SITES if any(suffix == recorded for _, recorded in batch.sites)]
    contents = Contents(
        architecture=batch.architecture,
        samples=concatenate([each.samples for each in batches], PAD),
        sample_ids=np.concatenate([each.sample_ids for each in batches]),
        sites={
            suffix: Kept(
                tuple(sorted(step for step, recorded in batch.sites if recorded == suffix)),
                batch.heads.get(suffix, ()),
            )
            for suffix in suffixes
        },
        precision=dtype,
        source=source or {},
    )
    recording = Recording(out, contents, command)
    if not recording.finished:
        for each in batches:
            recording.add(each)
    return recording.finish()


@contextmanager
def _part_file(path: Path, data: bytes) -> Iterator[h5py.File]:
    """The HDF5 file of a part; what is wrong with it is a UserError that names it."""
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            yield file
    except DAMAGE as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} must be a part of this recording; {detail}: remove it") from None


def _num_samples(file: h5py.File, first: int, contents: Contents) -> int:
    """How many samples a part holds, after a check that its datasets are those of its recording."""
    check_links(file)
    num_tokens = contents.samples.ids_NT.shape[1]
    count = len(file["logprob"])
    if not 0 < count <= len(contents.samples) - first:
        raise UserError(f"its samples must be of the {len(contents.samples)} recorded; got {count} from {first}")
    expected: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    expected = dict.fromkeys(OUTPUT_TYPES, ((count, num_tokens), (1, num_tokens)))
    for suffix, kept in contents.sites.items():
        shape = site_shape(suffix, contents.architecture, num_tokens, len(kept.heads))
        expected[suffix] = (len(kept.steps), count, *shape), site_chunk(suffix, shape)
    found = {name: (dataset.shape, dataset.chunks) for name, dataset in file.items()}
    if wrong := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
        raise UserError(f"it must hold the datasets of its request; got {', '.join(wrong)} otherwise")
    return count


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Disk(io.FileIO):
    """The file that HDF5 writes to. It never sees a write fail, because a failed write inside the library can end the
    process: the first failure, or Ctrl-C, is kept for `check`, and later writes are dropped."""

    failure: OSError | KeyboardInterrupt | None = None

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]  # narrower than any buffer
        view = memoryview(data).cast("B")
        length = len(view)
        try:
            while self.failure is None and view:
                view = view[super().write(view) :]
        except (OSError, KeyboardInterrupt) as failure:
            self.failure = failure
        return length

    def truncate(self, size: int | None = None) -> int:
        """Set the length of the file, unless something has failed."""
        try:
            return self.tell() if self.failure else super().truncate(size)
        except (OSError, KeyboardInterrupt) as failure:
            self.failure = failure
            return self.tell()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure is not None:
            raise self.failure


def _write_head(file: h5py.File, contents: Contents, command: str) -> None:
    """Attributes, tokens and steps."""
    samples = contents.samples
    file.attrs["schema"] = np.bytes_(SCHEMA)
    file.attrs["version"] = np.int64(VERSION)
    for name, text in (
        ("architecture", contents.architecture_json()),
        ("request", contents.request_json()),
        ("command", command),
    ):
        file.attrs[name] = np.bytes_(text.encode())
    tokens = file.create_group("tokens")
    arrays = {
        "ids": samples.ids_NT,
        "role": samples.role_NT,
        "segment_start": samples.segment_start_NT,
        "length": samples.length_N,
        "domain": samples.domain_N,
        "episode": samples.episode_N,
        "sample_id": contents.sample_ids,
    }
    for name, array in arrays.items():
        data = np.asarray(array, TOKEN_TYPES[name])
        rows = min(len(data), 64 if name in TOKEN_COLUMNS else 4096)
        tokens.create_dataset(name, data=data, chunks=(rows, *data.shape[1:]), fletcher32=True)
    texts = [b"".join(samples.row_text(row)) for row in range(len(samples))]
    text = tokens.create_group("text")
    text.create_dataset("offsets", data=np.cumsum([0, *map(len, texts)]), fletcher32=True)
    joined = np.frombuffer(b"".join(texts), np.uint8)
    text.create_dataset("bytes", data=joined, fletcher32=joined.size > 0)


def _copy(part: Part, file: h5py.File, num_samples: int) -> None:
    """Copy a part's chunks as they are, each to its place along the axis of samples."""
    data = part.path.read_bytes()
    if hashlib.sha256(data).hexdigest() not in part.path.name:
        raise UserError(f"a part must be as it was written; {part.path} has changed: run the command again")
    with _part_file(part.path, data) as source:
        for name, dataset in source.items():
            is_site = name in SITES
            axis = 1 if is_site else 0
            if name not in file:
                shape = (*dataset.shape[:axis], num_samples, *dataset.shape[axis + 1 :])
                if is_site:
                    target = create_site(file, name, shape, dataset.dtype)
                else:
                    target = file.create_dataset(name, shape, dataset.dtype, chunks=dataset.chunks, fletcher32=True)
                for key, value in dataset.attrs.items():
                    target.attrs[key] = value
            target = file[name]
            if dataset.dtype != target.dtype:
                raise UserError(f"{name} must be of one type in every batch; got {target.dtype} and {dataset.dtype}")
            for offset in itertools.product(*map(range, (0,) * dataset.ndim, dataset.shape, dataset.chunks)):
                filters, chunk = dataset.id.read_direct_chunk(offset)
                place = (*offset[:axis], part.first + offset[axis], *offset[axis + 1 :])
                target.id.write_direct_chunk(place, chunk, filters)


def _differing(capture: Capture, contents: Contents) -> list[str]:
    """What two requests differ in, e.g. `threads`; `architecture` for the network's."""
    asked = json.loads(contents.request_json())
    names = [name for name in sorted({*asked, *capture.request}) if asked.get(name) != capture.request.get(name)]
    return names if capture.architecture == contents.architecture else ["architecture", *names]
