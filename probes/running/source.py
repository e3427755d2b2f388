"""Where a probe's batches come from: a checkpoint that runs, or a capture that was recorded.

The one file of `probes/` that opens a checkpoint; `model` and `cache.record` are imported when one is opened, since a
capture needs no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from cache.batch import Batch, take
from probes.running.ranks import own_rows
from probes.statistics.grid import Cell
from smelt_interp.architecture import Architecture
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples
from smelt_interp.data.tokenizer import BYTES, Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.looped_span import OpeningOptions, looped_span, unlooped
from smelt_interp.validation import Threads, validated

if TYPE_CHECKING:
    from model.families.opening import Opening
    from model.hooks.looped_model import LoopedModel

UNTRAINED = "untrained"
START, FIRST_TOKEN = "start", "the first token of each document"
"""What a running network's rows begin with."""


@validated
class Source(OpeningOptions):
    """Which network is measured, and which beside it."""

    ckpt: Path | None = None
    """Folder of a checkpoint, ours or one of another family that transformers loads; the network runs on the samples
    that the data options name."""
    capture: Path | None = None
    """Capture; nothing runs, and the samples are those recorded."""
    against: tuple[Path, ...] = ()
    """Checkpoint folders, or captures of the same samples, to measure beside it, such as its Baseline."""
    untrained: bool = True
    """With --ckpt: measure the same network with random weights beside it."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Samples in memory at a time; the answer does not depend on it."""
    threads: Threads = 1
    """With --ckpt: threads of the network. Small networks gain nothing from more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Samples that are measured together."""

    name: str
    samples: Samples
    corrupted: Samples | None = None
    """For patching: row n is what row n of `samples` is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One network that gives batches, running or recorded."""

    name: str
    architecture: Architecture
    described: dict[str, Cell]
    """What it was read from, with digests."""
    batches: Callable[[SampleSet, Sequence[str]], Iterator[Batch]]
    """Batches of a set of samples with the named sites."""
    network: "LoopedModel | None" = None
    """What runs, for probes that run it again; none in a capture."""
    recorded: tuple[SampleSet, ...] = ()
    """What a capture holds, a set a domain; empty for a checkpoint."""
    untrained: bool = False
    """Random weights."""
    tokenizer: Tokenizer = BYTES
    """What reads the text of data options; of no use to a capture."""


def is_capture(path: Path) -> bool:
    """Whether a path is a capture, or meant to be one, and no folder of a checkpoint."""
    return path.is_file() or (path / "manifest.json").is_file()


def open_subjects(
    source: Source, seed: int, check: Callable[[Architecture], None] = lambda architecture: None
) -> tuple[Subject, ...]:
    """The measured network, then those beside it, each under a name of its own; `check` may refuse the first before
    others are opened.

    Raises UserError as reading them does, without a checkpoint or a capture or with both, and for two of one name.
    """
    if source.loop and source.ckpt is None:
        raise UserError(f"--loop must come with --ckpt, whose network it loops; got {source.loop} without")
    if (source.ckpt is None) == (source.capture is None):
        given = "neither" if source.ckpt is None else "both"
        raise UserError(f"one of --ckpt DIR and --capture DIR must be given; got {given}")
    if source.capture is not None and source.capture.is_dir() and not is_capture(source.capture):
        raise UserError(f"a capture must hold a manifest; got the folder {source.capture}: --ckpt opens a checkpoint")
    paths = [path for path in (source.ckpt, source.capture, *source.against) if path is not None]
    openers = [
        _captured if path == source.capture or (path != source.ckpt and is_capture(path)) else _checkpoint
        for path in paths
    ]
    # What is looped is the measured network; those beside it, which may be the same one, are opened as they are.
    asked = [source, *(unlooped(source) for _ in source.against)]
    subjects: list[Subject] = []
    for opened, path, each in zip(openers, paths, asked, strict=True):
        subjects.append(opened(path, each))
        if len(subjects) == 1:
            check(subjects[0].architecture)
    if source.ckpt is not None and source.untrained:
        subjects.append(_untrained(source.ckpt, seed, source))
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        subjects = [
            replace(subject, name=str(path)) if names.count(subject.name) > 1 else subject
            for subject, path in zip(subjects, [*paths, Path(UNTRAINED)], strict=False)
        ]
        if len({subject.name for subject in subjects}) < len(subjects):
            raise UserError(f"--against must name other networks, each once; got {' '.join(map(str, paths))}")
    return tuple(subjects)


def sample_sets(measured: Subject, data: DataOptions) -> tuple[SampleSet, ...]:
    """What a capture holds, or each name of the data options by itself. Raises UserError as `load_samples` does."""
    if measured.recorded:
        return measured.recorded
    each = [replace(data, data=(name,)) for name in data.data]
    context = measured.architecture.context
    return tuple(SampleSet(name=one.data[0], samples=load_samples(one, context, measured.tokenizer)) for one in each)


def _checkpoint(path: Path, source: Source) -> Subject:
    """A checkpoint folder, loaded now, run when its batches are read. Raises UserError as `from_pretrained` does."""
    if not (path.is_dir() or source.allow_download):  # said before torch is imported, which takes seconds
        raise UserError(f"a checkpoint must be a folder; got {path}, which is none: a capture is opened by "
                        "--capture, a hub id with --allow-download")  # fmt: skip
    from model.families.opening import open_network

    name = path.resolve().name
    described: dict[str, Cell] = {"checkpoint": str(path)}
    if source.loop:
        name = f"{name}, layers {source.loop} run {source.visits} times"
        described |= {"loop": str(source.loop), "visits": source.visits, "loop_scale": source.loop_scale}
    return running_subject(name, open_network(path, _opening(source)), described, source)


def _opening(source: Source) -> "Opening":
    from model.families.opening import Opening

    loop = looped_span(source)
    return Opening(loop=loop, trust_remote_code=source.trust_remote_code, allow_download=source.allow_download)


def _untrained(ckpt: Path, seed: int, source: Source) -> Subject:
    """The network of a checkpoint's config with random weights."""
    from model.families.opening import untrained_network

    network = untrained_network(ckpt, seed, _opening(source))
    return running_subject(UNTRAINED, network, {UNTRAINED: True, "seed": seed}, source)


def running_subject(name: str, network: "LoopedModel", described: dict[str, Cell], source: Source) -> Subject:
    """A network that runs when its batches are read."""
    import torch

    from cache.record import run_batches, weights_digest

    def batches(data: SampleSet, suffixes: Sequence[str]) -> Iterator[Batch]:
        torch.set_num_threads(source.threads)
        rows = own_rows(len(data.samples)).tolist()
        if not rows:
            return iter(())
        return run_batches(network, data.samples, suffixes, batch_size=source.batch_size, rows=rows)

    bos = network.tokenizer.bos_id
    start = FIRST_TOKEN if bos is None else f"token {bos}"
    return Subject(
        name=name,
        architecture=network.architecture,
        described={**described, START: start, "weights": weights_digest(network)},
        batches=batches,
        network=network,
        untrained=name == UNTRAINED,
        tokenizer=network.tokenizer,
    )


def _captured(path: Path, source: Source) -> Subject:
    """A capture; its rows of one domain are one set. Raises UserError as `Capture` does."""
    from cache.store import Capture  # h5py is slow to import, and `--help` needs none

    capture = Capture(path)
    domain_N = capture.samples.domain_N
    rows = {name.decode(): np.flatnonzero(domain_N == name) for name in dict.fromkeys(domain_N.tolist())}
    recorded = tuple(SampleSet(name=name, samples=capture.samples.rows(which)) for name, which in rows.items())
    digests = {each.name: each.samples.digest() for each in recorded}

    def batches(data: SampleSet, suffixes: Sequence[str]) -> Iterator[Batch]:
        if digests.get(data.name) != data.samples.digest():
            have = ", ".join(f"{len(each.samples)} of {each.name}" for each in recorded)
            raise UserError(
                f"networks to compare must have seen the same samples ({len(data.samples)} of {data.name}); "
                f"got {path} with {have}: record it with the same data options"
            )
        own = rows[data.name][own_rows(len(data.samples))]
        if not len(own):
            return
        first = own[0]
        for batch in capture.batches(suffixes, source.batch_size, slice(first, own[-1] + 1)):
            which = np.flatnonzero(np.isin(np.arange(first, first + len(batch.samples)), own))
            if len(which):
                yield batch if len(which) == len(batch.samples) else take(batch, which)
            first += len(batch.samples)

    untrained = "untrained_seed" in capture.request
    weights = str(capture.request.get("weights", ""))
    return Subject(
        name=path.resolve().name.removesuffix(".h5"),
        architecture=capture.architecture,
        described={"capture": str(path), "digest": capture.digest, UNTRAINED: untrained, "weights": weights},
        batches=batches,
        recorded=recorded,
        untrained=untrained,
    )
