"""The networks of a run while it trained: its kept states, each as the network it was; or a checkpoint, as it ended."""

from dataclasses import dataclass
from pathlib import Path

from model.checkpoint import WEIGHTS, read_config
from model.network import LoopedMoE
from model.tokenizers import read_tokenizer
from model.training.run_folder import CHECKPOINT, RUN, read_run
from model.training.state import load_state, states
from smelt_interp.config import ModelConfig
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError, shown

END = 0
"""The step of a checkpoint folder, which does not say after how many it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptNetworks:
    """What is there of a run."""

    folder: Path
    networks: dict[int, Path]
    """A state's folder by its step, in order; a checkpoint's at END."""


def kept(folder: Path) -> KeptNetworks:
    """The states of a run's folder, or the checkpoint that a folder is. Raises `UserError` for one that is neither."""
    found = states(folder)
    if not found and (folder / WEIGHTS).is_file():
        found = {END: folder}
    if not found:
        raise UserError(f"a run must be a folder with states of a training, or a checkpoint; got {folder}")
    return KeptNetworks(folder=folder, networks=found)


def training_of(folder: Path) -> Path:
    """The folder of the training that a run, or the checkpoint within one, comes from."""
    place = folder.resolve()
    return place.parent if place.name == CHECKPOINT and (place.parent / RUN).is_file() else place


def config_of(run: KeptNetworks) -> ModelConfig:
    """What network all of them are. Raises `UserError` as `network_at` does."""
    return read_config(run.folder) if END in run.networks else _said(run)[0]


def _said(run: KeptNetworks) -> tuple[ModelConfig, str]:
    """The config and the name of the tokenizer, as `run.json` has them."""
    said = read_run(run.folder / RUN)
    config, options = said.get("config"), said.get("options")
    if not isinstance(config, dict) or not isinstance(options, dict) or not isinstance(options.get("tokenizer"), str):
        raise UserError(f"{run.folder / RUN} must say the config and the options of the run; got {shown(said)}")
    return ModelConfig.from_json(config), options["tokenizer"]


def network_at(run: KeptNetworks, step: int) -> LoopedMoE:
    """The network after a step, in evaluation mode. Raises `UserError` for a state or `run.json` that is not whole."""
    if step == END:
        return LoopedMoE.from_pretrained(run.networks[step])
    config, name = _said(run)
    tokenizer = BYTES if name == "bytes" else read_tokenizer(Path(name))
    network = LoopedMoE(config, seed=0, tokenizer=tokenizer)
    # Weights alone: what the optimisers remember stays on the disk.
    load_state(run.networks[step], {f"weight/{name}": weight.detach() for name, weight in network.named_parameters()})
    network.eval()
    return network
