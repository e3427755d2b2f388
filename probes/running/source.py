"""Where a probe's batches come from: a checkpoint that runs, or a capture that was recorded.

The one file of `probes/` that opens a checkpoint; `model` and `cache.record` are imported when one is opened, since a
capture needs no torch.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cache.batch import Batch, take
from probes.running.contract import MOST_SAMPLES, Cell, check_number
from smelt_interp.config import ModelConfig
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.dyck import Pairing, Rendering
from smelt_interp.data.samples import Samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from model.network import LoopedMoE

UNTRAINED = "untrained"
MOST_THREADS = 1024
_DATA = DataOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Which network is measured, and which beside it."""

    ckpt: Path | None = None
    """Checkpoint folder; the network runs on the samples that the data options name."""
    capture: Path | None = None
    """Capture file; nothing runs, and the samples are those recorded."""
    against: tuple[Path, ...] = ()
    """Checkpoint folders, or captures of the same samples, to measure beside it, such as its Baseline."""
    untrained: bool = True
    """With --ckpt: measure the same network with random weights beside it."""
    batch_size: int = 8
    """Samples in memory at a time; the answer does not depend on it."""
    threads: int = 1
    """With --ckpt: threads of the network. Small networks gain nothing from more."""

    def __post_init__(self) -> None:
        if (self.ckpt is None) == (self.capture is None):
            given = "neither" if self.ckpt is None else "both"
            raise UserError(f"one of --ckpt DIR and --capture FILE must be given; got {given}")
        check_number("batch_size", self.batch_size, 1)
        check_number("threads", self.threads, 1, MOST_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Samples that are measured together."""

    name: str
    parts: tuple[Samples, ...]
    """Rows of one part have one length; sample ids count through all parts."""

    def digest(self) -> str:
        """SHA-256 over the parts' digests."""
        return hashlib.sha256("".join(part.digest() for part in self.parts).encode()).hexdigest()

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


class DataChoice(Protocol):
    """Options that name samples."""

    def data_sets(self, context: int) -> tuple[DataSet, ...]:
        """The samples for a network that reads `context` tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """With --ckpt: which samples. Each data set is measured by itself."""

    data: tuple[str, ...] = ("dyck", "code")
    """One or more of dyck, code, prose, math, backcopy, or paths of text files in UTF-8."""
    samples: int = _DATA.samples
    """Rows of each data set, of Dyck for each number of shots."""
    seed: int = _DATA.seed
    """Seed of the rows, and of the untrained network's weights."""
    length: int = _DATA.length
    """Tokens a row of text has, and a Dyck episode may have."""
    shots: tuple[int, ...] = _DATA.shots
    """Dyck: demonstrations before the query, one or more numbers."""
    rendering: Rendering = _DATA.rendering
    """Dyck: how a shot is written."""
    pairing: Pairing = _DATA.pairing
    """Dyck: episode permutes the closers for each episode."""
    num_types: int = _DATA.num_types
    """Dyck: bracket types, 1 to 4."""
    max_total: int = _DATA.max_total
    """Dyck: brackets of prefix and answer together, at most; even."""

    def __post_init__(self) -> None:
        check_number("samples", self.samples, 1, MOST_SAMPLES)
        check_number("seed", self.seed, 0)
        check_number("length", self.length, 2)

    def data_sets(self, context: int) -> tuple[DataSet, ...]:
        """One data set a name. Raises UserError as `load_samples` does, and for a name given twice or none."""
        if not self.data or len(set(self.data)) < len(self.data):
            raise UserError(f"data must be one or more different names; got {' '.join(self.data) or 'none'}")
        shared = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "data"}
        options = [DataOptions(data=(name,), **shared) for name in self.data]
        return tuple(DataSet(name=each.data[0], parts=(load_samples(each, context, BYTES),)) for each in options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One network that gives batches, running or recorded."""

    name: str
    config: ModelConfig
    described: dict[str, Cell]
    """What it was read from, with digests."""
    batches: Callable[[DataSet, tuple[str, ...]], Iterator[Batch]]
    """Batches of a data set with the named sites."""
    recorded: tuple[DataSet, ...] = ()
    """The data sets of a capture, one a domain; empty for a checkpoint."""
    untrained: bool = False
    """Random weights."""


def open_networks(source: Source, seed: int) -> tuple[Network, ...]:
    """The measured network, then those beside it, each under a name of its own.

    Raises UserError as reading them does, for two of one name, and for a folder given as a capture.
    """
    if source.capture is not None and source.capture.is_dir():
        raise UserError(f"a capture must be a file; got the folder {source.capture}: a checkpoint is opened by --ckpt")
    paths = [path for path in (source.ckpt, source.capture, *source.against) if path is not None]
    openers = [_checkpoint if path == source.ckpt or path.is_dir() else _captured for path in paths]
    networks = [opened(path, source) for opened, path in zip(openers, paths, strict=True)]
    if source.ckpt is not None and source.untrained:
        networks.append(_untrained(networks[0].config, seed, source))
    names = [network.name for network in networks]
    if len(set(names)) < len(names):
        networks = [
            replace(network, name=str(path)) if names.count(network.name) > 1 else network
            for network, path in zip(networks, [*paths, Path(UNTRAINED)], strict=False)
        ]
        if len({network.name for network in networks}) < len(networks):
            raise UserError(f"--against must name other networks, each once; got {' '.join(map(str, paths))}")
    return tuple(networks)


def data_sets(measured: Network, data: DataChoice) -> tuple[DataSet, ...]:
    """What is measured: the recorded data sets of a capture, or those that the options name.

    Raises UserError for data options beside a capture: its samples are fixed.
    """
    if not measured.recorded:
        return data.data_sets(measured.config.context)
    if data != type(data)():
        raise UserError("data options must be left out with --capture, whose samples are fixed; got other values")
    return measured.recorded


def _checkpoint(path: Path, source: Source) -> Network:
    """A checkpoint folder, loaded now, run when its batches are read. Raises UserError as `from_pretrained` does."""
    if not path.is_dir():  # said before torch is imported, which takes seconds
        raise UserError(f"a checkpoint must be a folder; got {path}, which is none: a capture is opened by --capture")
    from model.network import LoopedMoE

    return _running(path.resolve().name, LoopedMoE.from_pretrained(path), {"checkpoint": str(path)}, source)


def _untrained(config: ModelConfig, seed: int, source: Source) -> Network:
    """The network of this config with random weights."""
    from model.network import LoopedMoE

    network = LoopedMoE(config, seed=seed).eval()
    return _running(UNTRAINED, network, {UNTRAINED: True, "seed": seed}, source)


def _running(name: str, network: "LoopedMoE", described: dict[str, Cell], source: Source) -> Network:
    import torch

    from cache.record import run_batches, weights_digest

    def batches(data: DataSet, suffixes: tuple[str, ...]) -> Iterator[Batch]:
        torch.set_num_threads(source.threads)
        first = 0
        for part in data.parts:
            for batch in run_batches(network, part, suffixes, batch_size=source.batch_size):
                yield replace(batch, sample_ids=batch.sample_ids + first)
            first += len(part)

    return Network(
        name=name,
        config=network.config,
        described={**described, "weights": weights_digest(network)},
        batches=batches,
        untrained=name == UNTRAINED,
    )


def _captured(path: Path, source: Source) -> Network:
    """A capture; its rows of one domain are one data set. Raises UserError as `Capture` does."""
    from cache.store import Capture  # h5py is slow to import, and `--help` needs none

    capture = Capture(path)
    domain_N = capture.samples.domain_N
    rows = {name.decode(): np.flatnonzero(domain_N == name) for name in dict.fromkeys(domain_N.tolist())}
    recorded = tuple(DataSet(name=name, parts=(capture.samples.rows(which),)) for name, which in rows.items())

    def batches(data: DataSet, suffixes: tuple[str, ...]) -> Iterator[Batch]:
        if data.digest() not in [each.digest() for each in recorded if each.name == data.name]:
            have = ", ".join(f"{len(each)} of {each.name}" for each in recorded)
            raise UserError(
                f"networks to compare must have seen the same samples ({len(data)} of {data.name}); "
                f"got {path} with {have}: record it with the same data options"
            )
        for batch in capture.batches(suffixes, source.batch_size):
            which = np.flatnonzero(batch.samples.domain_N == data.name.encode())
            if len(which):
                yield batch if len(which) == len(batch.samples) else take(batch, which)

    untrained = "untrained_seed" in capture.request
    weights = str(capture.request.get("weights", ""))
    described: dict[str, Cell] = {
        "capture": str(path), "digest": capture.digest, UNTRAINED: untrained, "weights": weights
    }  # fmt: skip
    return Network(
        name=path.stem,
        config=capture.config,
        described=described,
        batches=batches,
        recorded=recorded,
        untrained=untrained,
    )
