"""Opens a checkpoint of any kind as a network with hooks by visit: ours, or one that transformers loads.

A folder is ours when its config names no `model_type`. transformers takes seconds to import, and is imported when a
network of another family is opened.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from errno import EIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from model.checkpoint import CONFIG, checkpoint_folder
from model.families.network import FamilyNetwork
from model.families.older_code import adapt
from model.families.table import FAMILIES
from model.hooks.looped_model import LoopedModel
from model.network import LoopedMoE
from model.tokenizers import read_tokenizer
from smelt_interp.architecture import MOST_STEPS
from smelt_interp.config import MOST_BYTES, ModelConfig
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError, one_line, shown
from smelt_interp.input_files import read_input
from smelt_interp.looped_span import LoopedSpan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a checkpoint is opened."""

    loop: LoopedSpan | None = None
    """Layers to run again, in a network that runs each of them once."""
    trust_remote_code: bool = False
    """Run Python code that a folder brings."""
    allow_download: bool = False
    """Take a hub id that is no folder here."""


PLAIN = Opening()
REMOTE = ("ouro", "huginn_raven", "open_mythos")
"""Families whose code lies in the folder of the checkpoint, not in transformers."""
PICKLES = (".bin", ".pt", ".pth")


def open_network(checkpoint: str | Path, opening: Opening = PLAIN) -> LoopedModel:
    """The network of a folder, in float32 and evaluation mode.

    Raises `UserError` for what `LoopedMoE.from_pretrained` refuses, for a family that is not known, for weights that
    are missing, left over or pickled, and for a looped span that the network cannot run.
    """
    folder = checkpoint_folder(checkpoint, allow_download=opening.allow_download)
    if _model_type(folder) is not None:
        config = _read_config(folder, opening)
        return _hooked(_load(folder, config, opening), read_tokenizer(folder), opening)
    network = LoopedMoE.from_pretrained(folder)
    return network if opening.loop is None else network.sharing_weights(looped_config(network.config, opening.loop))


def untrained_network(checkpoint: str | Path, seed: int, opening: Opening = PLAIN) -> LoopedModel:
    """A network of the same config and tokenizer with random weights from `seed`. Raises as `open_network` does."""
    folder = checkpoint_folder(checkpoint, allow_download=opening.allow_download)
    if _model_type(folder) is None:
        trained = LoopedMoE.from_pretrained(folder)
        config = trained.config if opening.loop is None else looped_config(trained.config, opening.loop)
        network = LoopedMoE(config, seed=seed, tokenizer=trained.tokenizer)
        network.eval()
        return network
    config = _read_config(folder, opening)
    rule = f"{folder / CONFIG} must be one that a network is made of"
    with torch.random.fork_rng(), _theirs(config.model_type, rule):
        torch.manual_seed(seed)
        model = _model_class(config, folder).from_config(config, trust_remote_code=opening.trust_remote_code)
    return _hooked(model.float(), read_tokenizer(folder), opening)


def _hooked(model: "PreTrainedModel", tokenizer: Tokenizer, opening: Opening) -> FamilyNetwork:
    network = FamilyNetwork(model, FAMILIES[model.config.model_type], tokenizer, opening.loop)
    network.eval()
    network.tokenizer  # noqa: B018  # raises when it is not the network's
    if (family := network.architecture.family) in REMOTE:  # it must run too, and not just load
        with torch.no_grad(), _theirs(family, "code of a checkpoint must run"):
            network(torch.zeros(1, 2, dtype=torch.int64))
    return network


def looped_config(config: ModelConfig, loop: LoopedSpan) -> ModelConfig:
    """The config of a Baseline with a looped span. Raises `UserError` for one with a loop, and for other layers."""
    if config.num_visits > 1:
        raise UserError("--loop must be of a network that runs each layer once; got one with a loop of its own")
    loop.plan(config.num_layers)  # raises for a span outside the layers
    return replace(
        config,
        loop_start=loop.layers.start,
        loop_stop=loop.layers.stop,
        num_visits=loop.visits,
        loop_scale=loop.factor,
    )


def _model_type(folder: Path) -> str | None:
    """The family that a folder's config names, for transformers; None is a config of ours, or none."""
    try:
        values = json.loads(read_input(folder / CONFIG, "a config file", MOST_BYTES))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / CONFIG} must hold JSON; {error}") from None
    named = values.get("model_type") if isinstance(values, dict) else None
    return None if named is None else str(named)


def _read_config(folder: Path, opening: Opening) -> "PretrainedConfig":
    """The config of a family that is known. Raises `UserError` for any other, naming those that are."""
    named = _model_type(folder)
    if named not in FAMILIES:
        raise UserError(
            f"model_type must be one of {', '.join(FAMILIES)}; got {shown(named)} in {folder.name}; "
            "docs/adding_a_family.md adds a row to model/families/table.py"
        )
    if named in REMOTE and not opening.trust_remote_code:
        raise UserError(
            f"{named} brings its own code, which must be trusted: add --trust-remote-code; got {folder} without"
        )
    from transformers import AutoConfig

    with _theirs(named, f"{folder / CONFIG} must be a config that transformers reads"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=opening.trust_remote_code)
    if (layers := getattr(config, "num_hidden_layers", 0)) > MOST_STEPS:  # making them would take hours
        raise UserError(f"{folder / CONFIG} must be of at most {MOST_STEPS} layers; got {layers}")
    return config


def _model_class(config: "PretrainedConfig", folder: Path) -> "type[PreTrainedModel]":
    import transformers

    if config.model_type in REMOTE:
        adapt(config, folder, FAMILIES[config.model_type])
    masked = FAMILIES[config.model_type].masked
    found: type[PreTrainedModel] = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    return found


def _load(folder: Path, config: "PretrainedConfig", opening: Opening) -> "PreTrainedModel":
    """Its weights in float32, every one of them and no others."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled and not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} must hold safetensors, as pickles are never loaded; got {pickled[0]}: load it where "
                        "it is trusted, and write it by save_pretrained(FOLDER, safe_serialization=True)")  # fmt: skip
    with _theirs(config.model_type, f"{folder} must hold safetensors weights of its config"):
        model, found = _model_class(config, folder).from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=opening.trust_remote_code,
            local_files_only=True,
        )
    for rule, names in (
        ("hold every weight; missing", "missing_keys"),
        ("hold no other weights; got", "unexpected_keys"),
    ):
        if wrong := sorted(found[names]):
            raise UserError(f"{folder} must {rule} {', '.join(wrong[:3])}")
    if others := sorted(found["mismatched_keys"]):
        name, held, wanted = others[0]
        raise UserError(f"{folder} must hold weights of its config's shapes; got {name} of {tuple(held)} where "
                        f"{tuple(wanted)} is due")  # fmt: skip
    return model


@contextlib.contextmanager
def _theirs(family: str, rule: str) -> Iterator[None]:
    """What transformers, or code of a checkpoint, stumbles over, in one line; what that code prints is no answer of a
    command."""
    try:
        with quiet(), contextlib.redirect_stdout(sys.stderr):
            yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # they raise whatever they like
        if family in REMOTE and isinstance(error, (ImportError, AttributeError, TypeError)):
            import transformers

            # It was written for some version of everything.
            version = transformers.__version__
            rule = f"code of a checkpoint must run with transformers {version}; that of {family} does not"
        raise UserError(f"{rule}; {one_line(f'{type(error).__name__}: {error}', 150)}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and advice on the error stream."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def save(model: "PreTrainedModel", folder: Path) -> None:
    """Write config and weights as transformers does. Raises `OSError` when the disk is full."""
    try:
        with quiet():
            model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(EIO, one_line(str(error), 150), str(folder)) from None
