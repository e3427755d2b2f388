"""What tests of captures share: planted captures, and the comparison of two files dataset by dataset."""

from pathlib import Path

import h5py
import numpy as np

from cache.batch import Batch
from cache.parts import write_capture
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


def planted_capture(out: Path, batch: Batch, *, batch_size: int = 3, dtype: str = "float16") -> Capture:
    """The batch as a capture whose parts held `batch_size` samples."""
    return write_capture(out, list(split_batch(batch, batch_size)), dtype=dtype)


def contents(path: Path) -> dict[str, tuple[object, ...]]:
    """Every dataset and attribute of a file by name: type, shape, attributes, bytes. The command is left out."""
    found: dict[str, tuple[object, ...]] = {}

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        attributes = {key: np.asarray(value).tobytes() for key, value in item.attrs.items()}
        data = (str(item.dtype), item.shape, item[()].tobytes()) if isinstance(item, h5py.Dataset) else ()
        found[name] = (attributes, *data)

    with h5py.File(path, "r") as file:
        file.visititems(visit)
        found["/"] = tuple((key, bytes(np.asarray(file.attrs[key]))) for key in sorted(file.attrs) if key != "command")
    return found
