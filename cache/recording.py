"""A capture while it is recorded: a folder of finished shards, gone on with after any end.

A shard is built in memory, written whole, flushed to the disk, and only then given its name, so what has a name is
final. The shards of one request make the same capture whichever process wrote them, one after the other or several at
once; which are missing is seen from the names. Of two processes that record the same shard the first one's stays, so
nothing is locked. The manifest is written when no shard is missing, and then the capture is finished.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from cache.batch import Batch
from cache.layout import Compression, Contents, Precision, request_digest
from cache.manifest import MANIFEST, REQUEST, Manifest, Shard, StoredSite, read_json, shard_name
from cache.selection import Kept
from cache.shard import ShardWriter, request_of, sha256_of, stored_sites
from cache.store import Capture
from cache.verify import verify, verify_shard
from smelt_interp.data.samples import concatenate
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES
from smelt_interp.terminal.output_files import make_folder, write_once, write_whole

OTHER_NAMES = (REQUEST, "results")
"""What a capture's folder may hold beside its shards before it is finished."""


class Recording:
    """A capture that is being recorded, or was before and is gone on with.

    Raises UserError for a folder that cannot be written or holds something else, a damaged capture, and a capture or
    shards of another request under the same name. `finished` says that the very capture is already there, whole.
    Shards that are not whole are recorded again. A folder without any shard belongs to no request.
    """

    def __init__(self, out: Path, contents: Contents, command: str = "") -> None:
        self._out, self._contents, self._command = out, contents, command
        # As they are read back: JSON knows no tuples.
        self._request: dict[str, object] = json.loads(json.dumps(contents.request()))
        self._digest = request_digest(contents.architecture, self._request)
        self._whole: set[int] = set()
        """First positions of the shards that this process has written, or read and found whole."""
        self._damaged: set[int] = set()
        """First positions of those that are not whole; they stay until they are recorded again."""
        self.finished = (out / MANIFEST).exists()
        if self.finished:
            self._check_finished()
            return
        make_folder(out)
        self._open_folder()

    def missing(self) -> list[range]:
        """The positions of every shard that is not there, whole, in order."""
        return [positions for positions in self._contents.shards() if not self._has(positions)]

    def add(self, positions: range, batches: Iterable[Batch]) -> None:
        """Write a shard from batches that hold its samples in order. One that is there by now stays, and the batches
        are not asked for. Raises UserError for other samples, missing sites and numbers that cannot be stored."""
        if self._has(positions):
            return
        with ShardWriter(self._contents, self._digest, positions) as writer:
            for batch in batches:
                writer.add(batch)
            image = writer.image()
        self._check_request()
        if (self._out / MANIFEST).exists():  # another process has recorded it all
            (self._out / REQUEST).unlink(missing_ok=True)
            return
        if positions.start in self._damaged:
            self._path(positions).unlink(missing_ok=True)
            self._damaged.remove(positions.start)
        write_once(self._path(positions), image)
        self._whole.add(positions.start)

    def finish(self, written: Iterable[range] = ()) -> Capture:
        """Write the manifest of the shards, which other processes may have written: those in `written` whole, as this
        one's are. Raises UserError while some are missing or are not whole."""
        self._whole |= {positions.start for positions in written}
        if (self._out / MANIFEST).exists():
            return Capture(self._out)
        if missing := self.missing():
            raise UserError(f"a capture must have all its shards to be finished; missing {len(missing)} of {self._out}")
        shards = tuple(map(self._shard, self._contents.shards()))
        manifest = self._manifest(shards)
        for shard in shards:
            verify_shard(self._out, shard, manifest, values=shard.first not in self._whole)
        write_whole(self._out / MANIFEST, (json.dumps(manifest.to_json(), indent=1) + "\n").encode())
        _sync_folder(self._out)
        (self._out / REQUEST).unlink(missing_ok=True)
        return Capture(self._out)

    def _has(self, positions: range) -> bool:
        return positions.start not in self._damaged and self._path(positions).exists()

    def _path(self, positions: range) -> Path:
        return self._out / shard_name(positions)

    def _shard(self, positions: range) -> Shard:
        num_bytes, sha256 = sha256_of(self._path(positions))
        return Shard(first=positions.start, samples=len(positions), num_bytes=num_bytes, sha256=sha256)

    def _manifest(self, shards: tuple[Shard, ...]) -> Manifest:
        """The manifest of these shards, whose first one says how sites are stored."""
        contents = self._contents
        stored = stored_sites(self._out / shards[0].name, list(contents.sites))
        return Manifest(
            architecture=contents.architecture,
            request=self._request,
            command=self._command,
            num_tokens=contents.samples.ids_NT.shape[1],
            compression=contents.compression,
            sites={
                suffix: StoredSite(**contents.sites[suffix]._asdict(), stored=stored[suffix])
                for suffix in SITES
                if suffix in stored
            },
            shards=shards,
        )

    def _check_finished(self) -> None:
        capture = Capture(self._out)
        if capture.manifest.request_digest != self._digest:
            theirs = {"architecture": capture.architecture.to_json(), **capture.manifest.request}
            raise UserError(
                f"a capture must not replace another; {self._out} holds one that differs in "
                f"{self._differing(theirs)}: rename it or choose another name"
            )
        try:
            verify(self._out)
        except UserError as error:
            raise UserError(f"{self._out} is damaged, remove it and record again: {error}") from None

    def _open_folder(self) -> None:
        """Take up the shards in the folder."""
        expected = {shard_name(positions) for positions in self._contents.shards()}
        names = {name for name in os.listdir(self._out) if not name.startswith(".")}
        shards = {name for name in names if name[0].isdigit() and name.endswith(".h5")}
        if others := sorted(names - shards - set(OTHER_NAMES)):
            raise UserError(f"a capture must have a folder of its own; got {self._out}, which holds {others[0]}")
        if shards and REQUEST not in names:
            raise UserError(f"{self._out} must hold the shards of one recording; got no {REQUEST} in it: remove it")
        self._check_request(free=not shards)
        if strangers := sorted(shards - expected):
            raise UserError(f"a shard must be one of its request; got {self._out / strangers[0]}: remove it")
        for positions in self._contents.shards():
            if self._has(positions):
                self._look_at(positions)

    def _look_at(self, positions: range) -> None:
        """Find out whether a shard is whole. Raises UserError for one that cannot be read, or is of another request."""
        path, shard = self._path(positions), self._shard(positions)
        try:
            is_ours = request_of(path) == self._digest
            if is_ours:
                verify_shard(self._out, shard, self._manifest((shard,)), values=True)
        except UserError:
            self._damaged.add(positions.start)
            return
        if not is_ours:
            raise UserError(f"shards to go on with must be of the same request; got {path}: remove it")
        self._whole.add(positions.start)

    def _check_request(self, *, free: bool = False) -> None:
        """Raise UserError unless the folder is of this request, which it becomes when it is of none, or `free`."""
        path, stored = self._out / REQUEST, None
        while stored is None:
            if not path.exists():
                make_folder(self._out)
                write_once(path, self._document())
            try:
                stored = read_json(path, "a recording's request")
            except UserError:
                if path.exists():
                    raise  # else a recorder has finished, or given up, between the lines above
        theirs = stored.get("request")
        if not isinstance(theirs, dict):
            raise UserError(f"{path} must hold the request of a recording; got something else: remove {self._out}")
        if stored.get("digest") != self._digest:
            if free:
                write_whole(path, self._document())
                return
            differing = self._differing({"architecture": stored.get("architecture"), **theirs})
            raise UserError(
                f"shards to go on with must be of the same request; {self._out} differs in {differing}: remove it or "
                "choose another name"
            )

    def _document(self) -> bytes:
        """What `request.json` says."""
        values = {
            "digest": self._digest,
            "request": self._request,
            "architecture": self._contents.architecture.to_json(),
            "command": self._command,
        }
        return json.dumps(values, indent=1).encode()

    def _differing(self, theirs: dict[str, object]) -> str:
        """What two requests differ in, e.g. `threads`."""
        ours = {"architecture": self._contents.architecture.to_json(), **self._request}
        return ", ".join(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))


def abandon(out: Path) -> None:
    """Leave no folder behind in which no shard was finished."""
    try:
        if not any(out.glob("[0-9]*.h5")) and not (out / MANIFEST).exists():
            (out / REQUEST).unlink(missing_ok=True)
            out.rmdir()
    except (OSError, ValueError):  # it holds something, or is none
        return


def write_capture(
    out: Path,
    batches: Sequence[Batch],
    *,
    dtype: Precision = "float16",
    compression: Compression = "gzip",
    source: dict[str, object] | None = None,
    command: str = "",
) -> Capture:
    """Write batches that are at hand as a capture, a shard each, the way `cache.record` does.

    Sites, steps and heads are those of the first batch; all must have the same, and all but the last as many samples.
    The batches are in the order of their sample ids. Raises UserError as `Recording` does.
    """
    if not batches:
        raise UserError("batches to write must be at least one; got 0")
    # The first batch says what all hold.
    batch = batches[0]
    contents = Contents(
        architecture=batch.architecture,
        samples=concatenate([each.samples for each in batches], 0),
        sample_ids=np.concatenate([each.sample_ids for each in batches]),
        sites={
            suffix: Kept(
                tuple(sorted(step for step, recorded in batch.sites if recorded == suffix)),
                batch.heads.get(suffix, ()),
            )
            for suffix in SITES
            if any(suffix == recorded for _, recorded in batch.sites)
        },
        precision=dtype,
        compression=compression,
        shard_samples=len(batch.samples),
        source=source or {},
    )
    # A shard a batch, unless they are there.
    recording = Recording(out, contents, command)
    if not recording.finished:
        for positions, each in zip(contents.shards(), batches, strict=True):
            recording.add(positions, [each])
    return recording.finish()


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
