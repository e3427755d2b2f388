"""What one training run is: every number that decides its weights, and those that only decide what is kept and seen."""

import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from model.losses import OverSteps
from model.tokenizers import read_tokenizer
from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import PAIRS
from smelt_interp.data.mixture import MixtureOptions
from smelt_interp.data.tokenizer import BYTES, Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.sites import nearest
from smelt_interp.validation import Seed, Share, Threads, different, validated

PRESETS: dict[str, ModelConfig] = {
    f"{name}-{kind}": getattr(pair, kind) for name, pair in PAIRS.items() for kind in ("smelt", "baseline")
}
"""Both networks of every matched pair, by name."""
KINDS = ("dyck_episode", "dyck_standard", "code", "prose", "math", "backcopy")
"""The rows of a mixture that need no folder of the user's."""
FREE = frozenset(
    {"out", "threads", "device", "expert_parallel", "save_every", "keep_every", "evaluate_every", "horizons"}
)
"""What may change when a run goes on: it decides no weight but by rounding."""
TRAIN = "model.training.train"

Steps = Annotated[int, Field(ge=1, le=10**9)]
Weight = Annotated[float, Field(ge=0, le=1e6)]


@validated
class Recipe:
    """How a network is trained, whichever it is."""

    tokenizer: str = "bytes"
    """bytes, or a folder with a tokenizer.json."""
    text: tuple[str, ...] = ()
    """Files or folders of text to train on, in equal parts and nothing else, in place of the mixture's rows."""
    rows: Annotated[int, Field(ge=1, le=10**6)] = 12
    """Rows a step of them together; a mixture has its own numbers of rows."""
    mixture: MixtureOptions = MixtureOptions()
    steps: Steps = 6400
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: on the matrices of attention and experts, each expert's apart; AdamW on the rest."""
    learning_rate: Annotated[float, Field(gt=0, le=1e30)] = 6e-3
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 100
    """Steps of linear warm-up."""
    decay: Share = 0.2
    """Share of the steps, at the end, over which the learning rate falls to 0 along a cosine."""
    weight_decay: Weight = 0.1
    """On matrices alone."""
    clip: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    """Largest norm of the gradient."""
    balance: Annotated[float, Field(ge=0, le=1e38)] = 0.01
    """Weight of the load-balancing loss."""
    router_z: Weight = 0.0
    """Weight of the router z-loss."""
    over_steps: OverSteps = "mean"
    """How these two become one number over the executed steps of the network."""
    accumulate: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Parts in which the rows of a step are read, one after the other; losses and gradients are those of all rows."""
    device: Annotated[str, Field(min_length=1, max_length=20)] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products in it, where the device has it; weights, norms, routing and losses stay float32."""
    threads: Threads = 1
    expert_parallel: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Under torchrun: over how many ranks the experts are divided."""
    save_every: Steps = 100
    """Steps between states; the last two are kept."""
    keep_every: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Keep the states of every so many steps too, for branches; 0 keeps none."""
    evaluate_every: Steps = 200

    def __post_init__(self) -> None:
        if self.text and self.rows % len(self.text):
            raise UserError(f"rows must be a multiple of the {len(self.text)} texts; got {self.rows}")
        if self.accumulate > self.rows_a_step:
            raise UserError(f"accumulate must be at most the {self.rows_a_step} rows of a step; got {self.accumulate}")

    @property
    def read(self) -> MixtureOptions:
        """What a step reads: the mixture, or the user's texts alone."""
        if not self.text:
            return self.mixture
        return replace(
            self.mixture, dyck_episode=0, dyck_standard=0, code=0, prose=0, math=0, backcopy=0,
            text=self.text, text_rows=self.rows // len(self.text),
        )  # fmt: skip

    @property
    def rows_a_step(self) -> int:
        """Rows of all kinds."""
        read = self.read
        return sum(int(getattr(read, kind)) for kind in KINDS) + read.text_rows * len(read.text)

    @property
    def tokens_a_step(self) -> int:
        """Every row is full."""
        return self.rows_a_step * self.mixture.context

    def run(self, config: Path, out: Path, seed: int) -> "TrainOptions":
        """The run that trains a network so."""
        how = {field.name: getattr(self, field.name) for field in fields(Recipe)}
        return TrainOptions(config=str(config), out=out, seed=seed, **how)


@validated
class TrainOptions(Recipe):
    """One training run."""

    out: Path
    """Folder of the run. An interrupted run in it goes on."""
    preset: str = ""
    """Which network: demo-smelt, demo-baseline, 200M-smelt and so on; this or a config."""
    config: str = ""
    """A config file (JSON), in place of a preset."""
    seed: Seed = 0
    """Of the weights; the mixture has its own."""
    branch_from: str = ""
    """Folder of a run with the same options, but for steps and decay, from whose states decay branches start."""
    horizons: Annotated[tuple[Steps, ...], Field(max_length=100)] = ()
    """With it: total steps of each branch, which becomes a run in a folder of `out` with that number as its name."""

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        if bool(self.preset) == bool(self.config):
            got = f"both {self.preset} and {self.config}" if self.preset else "neither"
            raise UserError(f"one of --preset and --config must be given; got {got}")
        if self.preset and self.preset not in PRESETS:
            names = ", ".join(PRESETS)
            raise UserError(f"preset must be one of {names}; got {self.preset!r:.40}{nearest(self.preset, PRESETS)}")
        if self.horizons:
            different("horizons", self.horizons)
        if self.horizons and not self.branch_from:
            raise UserError("horizons must come with --branch-from, the run whose states they start from; got none")

    @property
    def name(self) -> str:
        """What the checkpoint is called: its preset, or its config's file."""
        return self.preset or Path(self.config).stem

    def network(self) -> tuple[ModelConfig, Tokenizer]:
        """Config and tokenizer. Raises `UserError` for files that are neither, and for rows or a vocabulary that do
        not fit the network."""
        config = PRESETS[self.preset] if self.preset else ModelConfig.load(Path(self.config))
        tokenizer = BYTES if self.tokenizer == "bytes" else read_tokenizer(Path(self.tokenizer))
        if self.mixture.context > config.context:
            raise UserError(
                f"mixture.context must be at most the network's context of {config.context} tokens; got "
                f"{self.mixture.context}"
            )
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"the tokenizer must have at most the network's {config.vocab_size} tokens; got "
                f"{tokenizer.vocab_size} in {self.tokenizer}: set the config's vocab_size"
            )
        return config, tokenizer

    def deciding(self) -> dict[str, object]:
        """The options that decide the weights, by the flag that sets each."""
        flags = {name: value for name, value in _by_flag(self).items() if name not in FREE}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}

    def command(self) -> str:
        """The command line that makes the run."""
        return shlex.join(["python", "-m", TRAIN, *self.arguments(Path("runs", self.name))])

    def arguments(self, out: Path) -> list[str]:
        """Those of the command: the network, the folder, and every option that is not the default."""
        usual = _by_flag(TrainOptions(out=self.out, preset=self.preset, config=self.config))
        named = ["--preset", self.preset] if self.preset else ["--config", self.config]
        changed = [(name, value) for name, value in _by_flag(self).items() if value != usual[name]]
        return [*named, "--out", str(out), *(word for name, value in changed for word in _flag(name, value))]


def _by_flag(options: TrainOptions) -> dict[str, object]:
    flags: dict[str, object] = {field.name: getattr(options, field.name) for field in fields(options)}
    flags |= {f"mixture.{name}": value for name, value in asdict(options.mixture).items()}
    del flags["mixture"]
    return flags


def _flag(name: str, value: object) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{name.replace('_', '-')}", *map(str, values)]
