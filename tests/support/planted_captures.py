"""What tests of captures share: planted captures, and the comparison of two dataset by dataset."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from cache.batch import Batch
from cache.manifest import MANIFEST, digest_of
from cache.recording import write_capture
from cache.shard import sha256_of
from cache.store import Capture
from tests.support.planted import LOOPED, planted_batch, random_sites, split_batch, text_samples

ARCHITECTURE = LOOPED.architecture()
SITES = ("hook_resid_post", "attn.hook_k", "attn.hook_pattern", "mlp.hook_expert_indices")


def random_batch(num_samples: int = 7, *, length: int = 12, suffixes: tuple[str, ...] = SITES, seed: int = 0) -> Batch:
    """Samples of random letters, some padded, with random numbers at every step."""
    samples = text_samples(num_samples, length, seed=seed, padding=2)
    generator = np.random.default_rng(seed)
    return planted_batch(
        LOOPED,
        samples,
        random_sites(LOOPED, samples, suffixes, seed=seed),
        logprob_BT=-generator.random(samples.ids_NT.shape, np.float32),
        argmax_BT=generator.integers(0, 256, samples.ids_NT.shape).astype(np.int32),
    )


def planted_capture(
    out: Path, batch: Batch, *, batch_size: int = 3, dtype: str = "float16", compression: str = "gzip"
) -> Capture:
    """The batch as a capture whose shards hold `batch_size` samples."""
    return write_capture(out, list(split_batch(batch, batch_size)), dtype=dtype, compression=compression)


def shard_paths(folder: Path) -> list[Path]:
    """The shards in a folder, in order."""
    return sorted(folder.glob("[0-9]*.h5"))


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """What the manifest says, the command left out, and every dataset and attribute by name: type, shape, bytes."""
    manifest = json.loads((folder / MANIFEST).read_text())
    found = {"manifest": tuple((key, str(manifest[key])) for key in manifest if key not in ("command", "digest"))}

    for path in shard_paths(folder):

        def visit(name: str, item: h5py.Group | h5py.Dataset, where: str = path.name) -> None:
            attributes = {key: np.asarray(value).tobytes() for key, value in item.attrs.items()}
            data = (str(item.dtype), item.shape, item[()].tobytes()) if isinstance(item, h5py.Dataset) else ()
            found[f"{where}/{name}"] = (attributes, *data)

        with h5py.File(path, "r") as file:
            file.visititems(visit)
            found[path.name] = tuple((key, bytes(np.asarray(file.attrs[key]))) for key in sorted(file.attrs))
    return found


def damage(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a shard as another program would."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)


def sign(folder: Path) -> None:
    """Give the manifest the digests of the shards as they are now, and its own, as whoever forges a capture would."""
    values = json.loads((folder / MANIFEST).read_text())
    for shard, path in zip(values["shards"], shard_paths(folder), strict=True):
        shard["num_bytes"], shard["sha256"] = sha256_of(path)
    write_manifest(folder, values)


def write_manifest(folder: Path, values: dict[str, object]) -> None:
    """A manifest of any values, with the digest that fits them."""
    values.pop("digest", None)
    values["digest"] = digest_of(values)
    (folder / MANIFEST).write_text(json.dumps(values))


def numbers(folder: Path) -> list[object]:
    """Everything that a reader is given."""
    return [
        (
            {key: values.tobytes() for key, values in batch.sites.items()},
            batch.logprob_BT.tobytes(),
            batch.argmax_BT.tobytes(),
            batch.sample_ids.tolist(),
            batch.samples.digest(),
        )
        for batch in Capture(folder).batches(SITES)
    ]
