"""Captures in a folder: what one takes and holds, how two differ, and which are kept or deleted."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cache.layout import Precision, sample_bytes
from cache.manifest import MANIFEST, Manifest
from cache.selection import select
from cache.store import Capture
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES
from smelt_interp.terminal.tables import Cell

PINNED, RESULTS = "pinned", "results"
"""In a capture's folder: an empty file, and the folder of what probes measured."""


def recorded_bytes(
    architecture: Architecture, sites: Sequence[str], samples: int, num_tokens: int, precision: Precision = "float16"
) -> int:
    """What samples take before compression, with those of the sites that the network computes at every step."""
    kept = select(architecture, [site for site in sites if site in architecture.sites])
    return samples * sample_bytes(architecture, kept, num_tokens, precision)


def described_sites(manifest: Manifest) -> list[list[Cell]]:
    """One row a site, from the manifest alone: suffix, axes lengths by sample, storage type, steps, heads."""
    layouts = manifest.layouts(manifest.shards[0])
    return [
        [
            suffix,
            " x ".join(map(str, layouts[suffix].shape[2:])),
            site.stored + ("" if layouts[suffix].compression == "none" else f", {layouts[suffix].compression}"),
            f"{len(site.kept.steps)} of {len(manifest.architecture.steps)}",
            ", ".join(str(head + 1) for head in site.kept.heads) or "-",
        ]
        for suffix, site in ((suffix, manifest.sites[suffix]) for suffix in SITES if suffix in manifest.sites)
    ]


def differences(one: Capture, other: Capture) -> list[tuple[str, str, str]]:
    """Everything in which two captures differ, as `(what, in one, in the other)`: network, request and sites."""
    facts = [dict(_facts(each)) for each in (one, other)]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = [(name, *(each.get(name, "-") for each in facts)) for name in names]
    return [(name, left, right) for name, left, right in rows if left != right]


def _facts(capture: Capture) -> Iterator[tuple[str, str]]:
    layers = [step.layer + 1 for step in capture.architecture.steps]
    yield from _flat("", {**capture.architecture.to_json(), "steps": layers})
    yield from _flat("", {name: value for name, value in capture.request.items() if name != "sites"})
    for suffix, kept in capture.kept.items():
        yield suffix, f"{len(kept.steps)} steps" + (f", {len(kept.heads)} heads" if kept.heads else "")


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """`data.samples`, `64`: every value under the names that lead to it; steps as their layers, from 1."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def is_pinned(folder: Path) -> bool:
    """Whether a capture is kept from being deleted."""
    return (folder / PINNED).exists()


def pin(folder: Path, pinned: bool) -> None:
    """Keep a capture from being deleted, or no longer. Raises UserError where its folder cannot be written."""
    try:
        if pinned:
            (folder / PINNED).touch()
        else:
            (folder / PINNED).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"a capture to pin must be writable; got {folder}: {error.strerror}") from None


def delete(folder: Path) -> None:
    """Delete a capture and its results. Raises UserError for one that is pinned, for a link, for a folder that holds
    anything else, and where it cannot be deleted."""
    capture = Capture(folder)
    if folder.is_symlink():
        raise UserError(f"a capture to delete must be a folder of its own; got {folder}, a link: remove the link")
    if is_pinned(folder):
        raise UserError(f"a capture to delete must not be pinned; got {folder}: unpin it first")
    own = {MANIFEST, RESULTS, *(shard.name for shard in capture.manifest.shards)}
    if others := sorted(set(os.listdir(folder)) - own):
        raise UserError(f"a capture to delete must hold nothing else; got {folder} with {others[0]}: move that first")
    try:
        (folder / MANIFEST).unlink()  # from here on it is no capture, whatever interrupts this
        shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"a capture to delete must be writable; got {folder}: {error.strerror}") from None
