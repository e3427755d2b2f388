"""Damaged captures, signed anew or not, are refused in one line or give every number as it was recorded."""

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np

from cache.manifest import MANIFEST
from cache.verify import verify
from tests.campaigns.campaign import Case, damaged_bytes, damaged_json, pick, tried
from tests.support.forked import Child
from tests.support.planted_captures import (
    SITES,
    damage,
    numbers,
    planted_capture,
    random_batch,
    shard_paths,
    sign,
    write_manifest,
)


def campaign(folder: Path) -> Case:
    """Two captures of other samples, of two shards each."""
    whole, other, spoilt = folder / "whole", folder / "other", folder / "spoilt"
    planted_capture(whole, random_batch(4), batch_size=2)
    planted_capture(other, random_batch(4, seed=1), batch_size=2)
    recorded = numbers(whole)

    def case(random: np.random.Generator) -> str:
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(whole, spoilt)
        kind = pick(random, ("shard", "signed shard", "dataset", "manifest", "JSON", "signed JSON", "file"))
        spoil(random, kind, spoilt, other)
        ends: list[str] = []

        def read() -> None:
            given = tried(lambda: numbers(spoilt))
            tried(lambda: verify(spoilt))
            assert given in (None, recorded), "other numbers than were recorded"
            ends.append("refused" if given is None else "read as recorded")

        if kind != "signed shard":
            read()
            return f"{kind}: {ends[0]}"
        # A library that reads damaged metadata might end the process.
        code, errors = Child(read).wait()
        assert code == 0, f"{code}: {errors[-300:]}"
        return f"{kind}: refused or read as recorded"

    return case


def spoil(random: np.random.Generator, kind: str, folder: Path, other: Path) -> None:
    """Damage of one kind."""
    shard, manifest = pick(random, shard_paths(folder)), folder / MANIFEST
    if kind in ("shard", "signed shard"):
        shard.write_bytes(damaged_bytes(random, shard.read_bytes()))
        if kind == "signed shard":
            sign(folder)
    elif kind == "dataset":
        damage(shard, lambda file: spoil_dataset(random, file))
        sign(folder)
    elif kind == "manifest":
        manifest.write_bytes(damaged_bytes(random, manifest.read_bytes()))
    elif kind == "JSON":
        manifest.write_text(json.dumps(damaged_json(random, json.loads(manifest.read_bytes()))))
    elif kind == "signed JSON":
        write_manifest(folder, damaged_json(random, json.loads(manifest.read_bytes())))
    else:
        spoil_file(random, pick(random, (shard, manifest)), other)


def spoil_dataset(random: np.random.Generator, file: h5py.File) -> None:
    """One dataset gone, renamed, a link, or laid out in another way."""
    name = pick(random, (*SITES, "logprob", "argmax", "tokens/ids", "tokens/domain", "tokens/text/offsets"))
    values = file[name][()]
    del file[name]
    match random.integers(5):
        case 0:
            file[name] = pick(random, (h5py.SoftLink("/tokens"), h5py.ExternalLink("/etc/passwd", "/"), values))
        case 1:
            file[f"{name}_"] = values
        case 2:
            file.create_dataset(name, data=values, chunks=True, compression="lzf", fletcher32=True)
        case 3:
            file.create_dataset(name, data=values[:-1], chunks=True, fletcher32=True)


def spoil_file(random: np.random.Generator, path: Path, other: Path) -> None:
    """One file gone, or another in its place; its time stamp is as it was."""
    stamp = path.stat().st_mtime_ns
    path.unlink()
    match random.integers(4):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(pick(random, ("nowhere", "/dev/zero", path.name, ".")))
        case 2 if path.suffix == ".h5":
            shutil.copyfile(other / path.name, path)
            os.utime(path, ns=(stamp, stamp))
