"""Checkpoint folders: config.json, model.safetensors, the tokenizer and README.md, read strictly, written whole."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from model.tokenizers import TOKENIZER, TOKENIZER_CONFIG, tokenizer_files
from smelt_interp.config import ModelConfig
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError, one_line
from smelt_interp.terminal.output_files import make_folder, write_whole

CONFIG, WEIGHTS, README = "config.json", "model.safetensors", "README.md"
STORED_DTYPES = ("F32", "BF16", "F16")
"""Types of stored weights, as safetensors names them."""
WRITTEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checkpoint_folder(checkpoint: str | Path, *, allow_download: bool = False) -> Path:
    """The folder itself, or with `allow_download` the local copy of a hub id that is no folder here."""
    folder = Path(checkpoint)
    if folder.is_dir():
        return folder
    if not allow_download:
        raise UserError(f"a checkpoint must be a folder with {CONFIG} and {WEIGHTS}; got {str(checkpoint)!r}, which is "
                        "none: a hub id is fetched with --allow-download")  # fmt: skip
    import huggingface_hub  # slow, and needed for downloads alone
    from huggingface_hub.errors import HFValidationError

    patterns = [CONFIG, "model*.safetensors", "*.safetensors.index.json", "*.py", TOKENIZER, TOKENIZER_CONFIG]
    try:
        return Path(huggingface_hub.snapshot_download(str(checkpoint), allow_patterns=patterns))
    except (HFValidationError, OSError) as error:  # every failed request or lookup is an OSError
        reason = one_line(str(error).partition("\n")[0], 150)
        raise UserError(f"a checkpoint must be a folder or a hub id; got {str(checkpoint)!r}; {reason}") from None


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder."""
    return ModelConfig.load(folder / CONFIG)


def check_layers(folder: Path, config: ModelConfig) -> None:
    """Raise `UserError` when fewer weights are stored than the config has layers: no network is built to learn that."""
    with _open_weights(folder) as file:
        stored = len(file.keys())
    if stored < config.num_layers:
        raise UserError(
            f"{folder / WEIGHTS} must hold every weight of {config.num_layers} layers; got {stored} weights in all"
        )


@contextmanager
def _open_weights(folder: Path) -> Iterator[safe_open]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(each.name for each in folder.iterdir() if each.suffix in (".bin", ".pt", ".pth", ".pkl"))
        found = f"; {pickles[0]} is a pickle, which is never loaded: convert it to safetensors" if pickles else ""
        raise UserError(f"a checkpoint must hold {WEIGHTS}; got {folder}{found}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} must be a whole safetensors file; {error}") from None


def read_weights(folder: Path, expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights in float32, exactly those of `expected` with its shapes.

    Raises `UserError` for missing, extra or wrongly shaped weights, a damaged file, weights that are not finite, and
    pickled weights.
    """
    path = folder / WEIGHTS
    with _open_weights(folder) as file:
        _check_names(path, set(expected), set(file.keys()))
        for name, shape in expected.items():
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise UserError(f"{path}: {name} must have shape {shape}; got {tuple(stored.get_shape())}")
            if stored.get_dtype() not in STORED_DTYPES:
                raise UserError(f"{path}: {name} must be one of {STORED_DTYPES}; got {stored.get_dtype()}")
        # A copy: what safetensors gives is the file itself, in memory as long as it is left alone on the disk.
        weights = {name: file.get_tensor(name).to(torch.float32, copy=True) for name in expected}
    _check_finite(str(path), weights)
    return weights


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    tokenizer: Tokenizer,
    readme: str,
    dtype: torch.dtype,
) -> None:
    """Write the files to a new folder that appears under its name only when it is whole.

    Raises `UserError` when the folder exists already or cannot be made, for a `dtype` that is not of WRITTEN_DTYPES,
    and when a weight is not finite as `dtype`; `OSError` when the disk is full.
    """
    if dtype not in WRITTEN_DTYPES:
        raise UserError(f"the dtype of a checkpoint must be one of {WRITTEN_DTYPES}; got {dtype}")
    if folder.exists():
        raise UserError(f"a checkpoint must be written to a new folder; {folder} exists")
    stored = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    _check_finite(f"weights as {str(dtype).removeprefix('torch.')}", stored)
    make_folder(folder.parent)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    scratch.mkdir(exist_ok=True)
    try:
        write_whole(scratch / CONFIG, (json.dumps(config.to_json(), indent=1) + "\n").encode())
        for name, text in tokenizer_files(tokenizer).items():
            write_whole(scratch / name, text.encode())
        write_whole(scratch / README, readme.encode())
        write_whole(scratch / WEIGHTS, save(stored))  # not `save_file`, whose error on a full disk is no OSError
        os.replace(scratch, folder)
    except BaseException:  # whatever ends it, Ctrl-C too, leaves no half-written folder
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _check_finite(what: str, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise UserError(f"{what} must be finite; {name} holds NaN or infinite values")


def _check_names(path: Path, expected: set[str], found: set[str]) -> None:
    if missing := sorted(expected - found):
        raise UserError(f"{path} must hold every weight; missing {_few(missing)}")
    if extra := sorted(found - expected):
        raise UserError(f"{path} must hold no other weights; got {_few(extra)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
