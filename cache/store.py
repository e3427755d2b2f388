"""Reads captures: opens a folder, and gives slices of what was recorded, by visit.

A capture opens with numpy and h5py alone. No handle is kept: a shard is opened, sliced and closed at each use, and the
first time that this process reads one, its digest is compared with the manifest's. What is damaged is told when it is
read; `cache.verify` reads everything.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch, SiteKey
from cache.layout import decode
from cache.manifest import MANIFEST, MOST_SAMPLES, REQUEST, Manifest, Shard, read_json
from cache.selection import Kept, check_batch_size, head_axis
from cache.shard import check_tokens, open_shard, read_tokens
from smelt_interp.architecture import Architecture
from smelt_interp.arrays import Array
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, check_suffix


class Capture:
    """A finished capture. Raises UserError when the folder is none, or its manifest is not as it was written."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder)
        _check_finished(self.path)
        self.manifest = Manifest.read(self.path)
        self._last: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        """Samples."""
        return self.manifest.num_samples

    @property
    def architecture(self) -> Architecture:
        """That of the network."""
        return self.manifest.architecture

    @property
    def digest(self) -> str:
        """SHA-256 over everything that the manifest says, the shards' digests among it."""
        return self.manifest.digest

    @property
    def request(self) -> Mapping[str, object]:
        """Everything that fixed the recorded numbers, as JSON values."""
        return self.manifest.request

    @property
    def samples_digest(self) -> str:
        """What `samples.digest()` gives, without reading them: captures with the same one can be compared."""
        recorded = self.request.get("samples")
        return str(recorded["digest"]) if isinstance(recorded, dict) and "digest" in recorded else ""

    @property
    def sites(self) -> tuple[str, ...]:
        """Suffixes of the recorded sites, in the order of `smelt_interp.sites.SITES`."""
        return tuple(self.kept)

    @property
    def kept(self) -> dict[str, Kept]:
        """The recorded sites, each with its steps and heads, in the order of `smelt_interp.sites.SITES`."""
        sites = self.manifest.sites
        return {suffix: sites[suffix].kept for suffix in SITES if suffix in sites}

    @cached_property
    def samples(self) -> Samples:
        """Every sample; each shard is read for it."""
        parts = [self._tokens(shard, slice(0, shard.samples))[0] for shard in self.manifest.shards]
        return concatenate(parts, 0)

    def read(
        self, suffix: str, step: int, rows: slice = slice(None), head: int | Literal["all"] = "all"
    ) -> NDArray[np.generic]:
        """What one site held at one step, float32 or int32, with the axes of `smelt_interp.sites.SITES`, B first.

        `rows` are positions of samples. Of attention, one (step, sample, head) matrix is read without the others.
        `head` is a number of the network; with one, the head axis is gone. Raises UserError for a site, step or head
        that was not recorded, and for rows that hold no sample.
        """
        kept = self._kept(suffix)
        if step not in kept.steps:
            raise UserError(f"a step of {suffix} must be one of those recorded, {list(kept.steps)}; got {step}")
        chosen: list[int | slice] = []
        if head != "all":
            if head not in kept.heads:
                raise UserError(f"a head of {suffix} must be one of those recorded, {list(kept.heads)}; got {head}")
            chosen += [slice(None)] * (head_axis(suffix) - 1)
            chosen.append(kept.heads.index(head))
        parts = []
        for shard, some in self._shards(rows):
            with self._file(shard) as file:
                parts.append(self._site(file, suffix, (kept.steps.index(step), some, *chosen)))
        return np.concatenate(parts)

    def batches(self, suffixes: Sequence[str], batch_size: int = 8, rows: slice = slice(None)) -> Iterator[Batch]:
        """All samples in order, or those at these positions, at most `batch_size` at a time, with every recorded step
        of the chosen sites.

        No batch holds samples of two shards. Raises UserError for a site that was not recorded, and for rows that hold
        no sample.
        """
        kept = {suffix: self._kept(suffix) for suffix in suffixes}
        check_batch_size(batch_size)
        return (
            self._batch(kept, shard, slice(first, min(first + batch_size, some.stop)))
            for shard, some in self._shards(rows)
            for first in range(some.start, some.stop, batch_size)
        )

    def sample(self, row: int) -> Batch:
        """The sample at a position without any site: its tokens and what the network answered; its shard alone is read.

        Raises UserError for a sample that was not recorded.
        """
        if not 0 <= row < len(self):
            raise UserError(f"a sample must be 0 to {len(self) - 1}; got {row}")
        last = self._last  # once, as another thread may put its own there
        if last is None or last[0] != row:  # a page asks for the same one several times
            ((shard, some),) = self._shards(slice(row, row + 1))
            self._last = last = row, self._batch({}, shard, some)
        return last[1]

    def text(self, row: int) -> str:
        """The text of the sample at a position; bytes that are no UTF-8 become U+FFFD. Raises UserError for a sample
        that was not recorded."""
        return self.sample(row).samples.text.data.tobytes().decode(errors="replace")

    def check_shards(self) -> None:
        """Raise UserError for a shard that was changed, replaced or lost; the digest of each is taken once a process
        and file."""
        for shard in self.manifest.shards:
            with self._file(shard):
                pass

    @contextmanager
    def _file(self, shard: Shard) -> Iterator[h5py.File]:
        with open_shard(self.path, shard, self.manifest) as file:
            yield file

    def _shards(self, rows: slice) -> list[tuple[Shard, slice]]:
        """The shards of the rows, each with its own positions of them."""
        first, last, stride = rows.indices(len(self))
        if stride != 1 or first >= last:
            raise UserError(f"rows must be some of the samples 0 to {len(self) - 1}, in order; got {rows}")
        found = []
        for shard in self.manifest.shards:
            start, stop = max(first, shard.first), min(last, shard.stop)
            if start < stop:
                found.append((shard, slice(start - shard.first, stop - shard.first)))
        return found

    def _tokens(self, shard: Shard, rows: slice) -> tuple[Samples, NDArray[np.int64]]:
        with self._file(shard) as file:
            return self._read_tokens(file, rows)

    def _read_tokens(self, file: h5py.File, rows: slice) -> tuple[Samples, NDArray[np.int64]]:
        samples, sample_ids = read_tokens(file, rows, self.manifest.num_tokens)
        check_tokens(samples, sample_ids, self.architecture.vocab_size)
        return samples, sample_ids

    def _site(self, file: h5py.File, suffix: str, chosen: tuple[int | slice, ...]) -> NDArray[np.generic]:
        """Some numbers of a site. An expert that the network lacks would be an index beyond a probe's counts."""
        values = decode(file[suffix][chosen])
        count = self.architecture.num_experts
        if SITES[suffix].integer and values.size and not 0 <= values.min() <= values.max() < count:
            worst = values.min() if values.min() < 0 else values.max()
            raise UserError(f"numbers of {suffix} must be 0 to {count - 1}; got {worst}")
        return values

    def _batch(self, kept: dict[str, Kept], shard: Shard, rows: slice) -> Batch:
        sites: dict[SiteKey, Array] = {}
        with self._file(shard) as file:
            for suffix, (steps, _) in kept.items():
                for index, step in enumerate(steps):
                    sites[step, suffix] = self._site(file, suffix, (index, rows))
            logprob_BT, argmax_BT = file["logprob"][rows], file["argmax"][rows]
            samples, sample_ids = self._read_tokens(file, rows)
        return Batch(
            architecture=self.architecture,
            samples=samples,
            sample_ids=sample_ids,
            logprob_BT=logprob_BT,
            argmax_BT=argmax_BT,
            sites=sites,
            heads={suffix: heads for suffix, (_, heads) in kept.items() if heads},
            bfloat16=frozenset(suffix for suffix in kept if self.manifest.sites[suffix].stored == "bfloat16"),
        )

    def _kept(self, suffix: str) -> Kept:
        if check_suffix(suffix) not in self.kept:
            raise UserError(
                f"a capture must hold the site {suffix}; {self.path} holds {', '.join(self.kept) or 'none'}: "
                "record it again with that site"
            )
        return self.kept[suffix]


def is_capture(folder: Path) -> bool:
    """Whether a folder has the manifest of a finished capture."""
    return (folder / MANIFEST).is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether a recording was begun there and is not finished."""
    return (folder / REQUEST).is_file() and not is_capture(folder)


class Unfinished(NamedTuple):
    """A recording that was begun: what it has, of how much, and how to go on."""

    samples: int
    """Those of its finished shards."""
    num_samples: int
    """All that were asked for; 0 where the request does not say."""
    command: str
    """What goes on with it; empty where the request does not say."""

    @property
    def share(self) -> float:
        """Of all samples."""
        return min(self.samples / self.num_samples, 1.0) if self.num_samples else 0.0


def unfinished(folder: Path) -> Unfinished:
    """How far a recording is. Raises UserError when its request cannot be read."""
    values = read_json(folder / REQUEST, "a request")
    command, request = values.get("command"), values.get("request")
    asked = request.get("samples") if isinstance(request, dict) else None
    number = asked.get("number") if isinstance(asked, dict) else None
    ends = [path.stem.split("-") for path in folder.glob("[0-9]*-[0-9]*.h5")]
    done = sum(int(last) - int(first) + 1 for first, last in ends if first.isdigit() and last.isdigit())
    return Unfinished(
        samples=done,
        num_samples=number if isinstance(number, int) and 0 < number <= MOST_SAMPLES else 0,
        command=command if isinstance(command, str) and command.isprintable() else "",
    )


def _check_finished(folder: Path) -> None:
    """Raise UserError that says what a folder without a manifest is, and how to go on."""
    try:
        if (folder / MANIFEST).exists():
            return
        if folder.is_file():
            raise UserError(
                f"a capture must be a folder of shards; got the file {folder}: version 1, one .h5 file, is read by "
                "the release that wrote it: record it again"
            )
        begun = is_unfinished(folder)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # a name that no file can have
        raise UserError(f"a capture must be a folder that can be read; got {folder}: {error}") from None
    if not begun:
        raise UserError(f"a capture must be a folder with a {MANIFEST}; got {folder}")
    try:
        found = unfinished(folder)
    except UserError:
        found = Unfinished(0, 0, "")
    num_shards = len(list(folder.glob("[0-9]*.h5")))
    way_out = f"go on with: {found.command}" if found.command else "run the command that records it again"
    raise UserError(f"a capture must be finished; got {folder} with {num_shards} finished shards: {way_out}")
