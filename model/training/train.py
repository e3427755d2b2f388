"""Train one network on the mixture: resumable to the bit, with a metrics file, ending in a checkpoint folder.

Everything a run needs to go on is one file, `state.safetensors`, replaced whole; the batch of a step is a function of
seed and step alone, so a resumed run reads the same tokens as one that was never stopped.
"""

import json
import math
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from model.network import LoopedMoE
from model.training.evaluate import Evaluation, evaluate
from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import DEMO_BASELINE, DEMO_SMELT
from smelt_interp.data.mixture import EMPTY_DIGEST, MixtureOptions, TrainingMixture, extend
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.output_files import make_folder, write_whole

PRESETS: dict[str, ModelConfig] = {"demo-smelt": DEMO_SMELT, "demo-baseline": DEMO_BASELINE}
STATE, METRICS, RUN, CHECKPOINT = "state.safetensors", "metrics.jsonl", "run.json", "checkpoint"
START_ANEW = "remove the run to start anew, or choose another --out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One training run."""

    preset: Literal["demo-smelt", "demo-baseline"]
    """Which network of the demo pair."""
    out: Path
    """Folder of the run. An interrupted run in it goes on."""
    steps: int = 6400
    learning_rate: float = 6e-3
    warmup: int = 100
    """Steps of linear warm-up."""
    decay: float = 0.2
    """Share of the steps, at the end, over which the learning rate falls linearly to 0."""
    weight_decay: float = 0.1
    """On matrices alone."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    balance: float = 0.01
    """Weight of the load-balancing loss."""
    seed: int = 0
    """Of the weights; the mixture has its own."""
    threads: int = 1
    save_every: int = 100
    evaluate_every: int = 200
    mixture: MixtureOptions = field(default_factory=MixtureOptions)

    def __post_init__(self) -> None:
        for name in ("steps", "threads", "save_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0 and finite; got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "balance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 or above and finite; got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2^63 - 1; got {self.seed}")
        if not 0 <= self.decay <= 1:
            raise UserError(f"decay must be a share from 0 to 1; got {self.decay}")

    def rate(self, step: int) -> float:
        """Learning rate of a step: warm-up, stable, linear decay to zero."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup), left)


@dataclass(slots=True)
class State:
    """Where a run stands."""

    step: int = 0
    digest: str = EMPTY_DIGEST
    seconds: float = 0.0


def train(options: TrainOptions, config: ModelConfig) -> Path:
    """Run, or go on with, the training of a network of this config. -> the checkpoint folder.

    Raises `UserError` when the folder cannot be written or holds a run that is finished or another, and when the
    gradient is no longer finite.
    """
    checkpoint = options.out / CHECKPOINT
    if checkpoint.exists():
        raise UserError(f"a run must not be finished already; {checkpoint} exists; choose another --out")
    torch.set_num_threads(options.threads)
    mixture = TrainingMixture(options.mixture)
    make_folder(options.out)
    _write_or_compare_run(options, config, mixture)
    network = LoopedMoE(config, seed=options.seed)
    optimizer = _optimizer(network, options)
    state = _load_state(options.out / STATE, network, optimizer, options.steps)
    _keep_metrics_before(options.out / METRICS, state.step)
    started = time.perf_counter() - state.seconds
    for step in range(state.step, options.steps):
        samples = mixture.batch(step)
        tokens_BT = torch.from_numpy(samples.ids_NT.astype(np.int64))
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step)
        loss = network.loss(tokens_BT)
        (loss.next_token + options.balance * loss.balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip)
        if not torch.isfinite(norm):
            raise UserError(f"training must stay finite; the gradient of step {step} is {norm}; lower learning_rate")
        optimizer.step()
        optimizer.zero_grad()
        state = State(step + 1, extend(state.digest, samples), time.perf_counter() - started)
        last = state.step == options.steps
        # Metrics before the state: a row that is written twice is dropped at resume, one that is missing stays missing.
        if last or state.step % options.evaluate_every == 0:
            scores = evaluate(network, options.mixture)
            _append_metrics(options.out / METRICS, state, tokens_BT.numel(), loss.next_token.item(), scores)
            _show_progress(options, state, loss.next_token.item(), scores)
        if last or state.step % options.save_every == 0:
            _save_state(options.out / STATE, network, optimizer, state)
    network.to(torch.bfloat16).float()  # the README's figures are of the weights as they are stored
    readme = _readme(options, network, mixture, state, evaluate(network, options.mixture, episodes=256))
    network.save_pretrained(checkpoint, readme=readme, dtype=torch.bfloat16)
    return checkpoint


def _optimizer(network: LoopedMoE, options: TrainOptions) -> torch.optim.AdamW:
    matrices = [weight for weight in network.parameters() if weight.ndim >= 2]
    gains = [weight for weight in network.parameters() if weight.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))


def _named_state(network: LoopedMoE, optimizer: torch.optim.AdamW) -> Iterator[tuple[str, Tensor]]:
    for name, weight in network.named_parameters():
        yield f"weight/{name}", weight.detach()
        for key, value in optimizer.state[weight].items():
            yield f"{key}/{name}", value


def _save_state(path: Path, network: LoopedMoE, optimizer: torch.optim.AdamW, state: State) -> None:
    where = {"step": str(state.step), "digest": state.digest, "seconds": repr(state.seconds)}
    write_whole(path, save({name: value.contiguous() for name, value in _named_state(network, optimizer)}, where))


def _load_state(path: Path, network: LoopedMoE, optimizer: torch.optim.AdamW, steps: int) -> State:
    if not _is_there(path):
        return State()
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name, weight in network.named_parameters():
                shapes = {"weight": weight.shape, "step": (), "exp_avg": weight.shape, "exp_avg_sq": weight.shape}
                stored = {key: file.get_tensor(f"{key}/{name}") for key in shapes}
                for key, value in stored.items():
                    if value.shape != shapes[key] or value.dtype != torch.float32:
                        got = f"{value.dtype} {tuple(value.shape)}"
                        raise UserError(
                            f"{path}: {key}/{name} must be torch.float32 {tuple(shapes[key])}; got {got}; {START_ANEW}"
                        )
                weight.copy_(stored.pop("weight"))
                optimizer.state[weight] = stored
            return _place(path, file.metadata() or {}, steps)
    except SafetensorError as error:
        raise UserError(f"{path} must be a whole state of this run; {error}; {START_ANEW}") from None


def _place(path: Path, where: dict[str, str], steps: int) -> State:
    """Where the run stood, from what `_save_state` wrote of it."""
    rules = {"step": r"[1-9][0-9]{0,11}", "digest": r"[0-9a-f]{64}", "seconds": r"[0-9]+\.?[0-9]*(e[+-]?[0-9]+)?"}
    for name, rule in rules.items():
        if not re.fullmatch(rule, where.get(name, "")):
            got = repr(where.get(name, ""))[:80]
            raise UserError(f"{path} must say the {name} at which it was written; got {got}; {START_ANEW}")
    state = State(int(where["step"]), where["digest"], float(where["seconds"]))
    if state.step > steps or not math.isfinite(state.seconds):
        raise UserError(
            f"{path} must be of one of the {steps} steps of the run, after a finite time; got step {state.step} after "
            f"{state.seconds} s; {START_ANEW}"
        )
    return state


def _is_there(path: Path) -> bool:
    """Whether a file of the run is there. Raises `UserError` for something else of its name."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} must be a file of the run; got something else; {START_ANEW}")
    return path.exists()


def _write_or_compare_run(options: TrainOptions, config: ModelConfig, mixture: TrainingMixture) -> None:
    """`run.json` says what the run is, wherever its folder lies; a folder with another run's is refused."""
    run = {
        "options": {name: value for name, value in asdict(options).items() if name != "out"},
        "config": config.to_json(),
        "corpora": [asdict(corpus) for corpus in mixture.corpora],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "command": _command(options),
    }
    path = options.out / RUN
    if not _is_there(path):
        for name in (STATE, METRICS):
            if (options.out / name).exists():
                raise UserError(f"{path} must say what the run is that wrote {name}; it is missing; {START_ANEW}")
        write_whole(path, (json.dumps(run, indent=1) + "\n").encode())
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} must hold JSON; {error}; {START_ANEW}") from None
    if not isinstance(before, dict):
        raise UserError(f"{path} must hold one JSON object; got {type(before).__name__}; {START_ANEW}")
    for part in ("options", "config", "corpora"):
        if before.get(part) != json.loads(json.dumps(run[part])):
            raise UserError(f"{path} must be of a run with the same {part}; it differs; choose another --out")


def _command(options: TrainOptions) -> str:
    """The command line that makes the run: every option that is not the default."""
    ours, usual = map(_by_flag, (options, TrainOptions(preset=options.preset, out=options.out)))
    changed = "".join(f" --{flag} {value}" for flag, value in ours.items() if value != usual[flag])
    return f"python -m model.training.train --preset {options.preset} --out runs/{options.preset}{changed}"


def _by_flag(options: TrainOptions) -> dict[str, object]:
    flags = asdict(options)
    flags |= {f"mixture.{name}": value for name, value in flags.pop("mixture").items()}
    return {name.replace("_", "-"): value for name, value in flags.items()}


def _keep_metrics_before(path: Path, step: int) -> None:
    """Drop rows that a resumed run will write again, and a last one that was not written to its end."""
    if not _is_there(path):
        return
    kept = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} must hold JSON on line {number}; {error}; {START_ANEW}") from None
        row_step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(row_step, int):
            raise UserError(f"{path} must hold an object with a step on line {number}; got none; {START_ANEW}")
        if row_step <= step:
            kept.append(line + b"\n")
    write_whole(path, b"".join(kept))


def _append_metrics(path: Path, state: State, tokens_per_step: int, loss: float, scores: Evaluation) -> None:
    row = {
        "step": state.step,
        "tokens": state.step * tokens_per_step,
        "seconds": round(state.seconds, 1),
        "train_loss_nats": loss,
        "held_out_loss_nats": scores.loss_nats,
        "dyck_exact_match": scores.exact_match,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _show_progress(options: TrainOptions, state: State, loss: float, scores: Evaluation) -> None:
    left = (options.steps - state.step) * state.seconds / state.step
    curve = " ".join(f"k={shots} {match:.2f}" for shots, match in scores.exact_match.items())
    losses = " ".join(f"{domain} {value:.3f}" for domain, value in scores.loss_nats.items())
    print(
        f"step {state.step}/{options.steps}  loss {loss:.3f}  held out: {losses}  Dyck exact: {curve}  "
        f"{state.seconds / 60:.1f} min, {left / 60:.0f} min left",
        flush=True,
    )


def _readme(
    options: TrainOptions, network: LoopedMoE, mixture: TrainingMixture, state: State, scores: Evaluation
) -> str:
    tokens = state.step * options.mixture.context * len(mixture.batch(0))
    parameters = sum(weight.numel() for weight in network.parameters())
    curve = "".join(f"| {shots} | {match:.3f} |\n" for shots, match in scores.exact_match.items())
    losses = "".join(f"| {domain} | {value:.3f} |\n" for domain, value in scores.loss_nats.items())
    corpora = "".join(
        f"| {corpus.domain} | {corpus.documents} | {corpus.bytes:,} | `{corpus.digest}` |\n"
        for corpus in mixture.corpora
    )
    config = network.config
    twice = f"layers {config.loop_start + 1} to {config.loop_stop} run {config.num_visits} times"
    visits = twice if config.num_visits > 1 else "each runs once"
    return f"""# {options.preset}

{parameters:,} parameters, {config.num_layers} layers, {visits}; weights stored as bfloat16, trained in float32.

- tokens: {tokens:,} in {state.step:,} steps of {tokens // state.step:,}
- token order: `{state.digest}`
- wall time: {state.seconds / 60:.0f} minutes with --threads {options.threads}
- versions: Python {platform.python_version()}, torch {torch.__version__}
- mixture, rows a step: {_rows(options.mixture)}
- command: `python -m smelt_interp.data.fetch_texts`, then `{_command(options)}`

Held-out loss, nats a byte:

| rows | loss |
|---|---|
{losses}
Exact match on 256 fresh Dyck episodes (compact, `episode` pairing, up to {options.mixture.max_total} brackets):

| shots | exact match |
|---|---|
{curve}
Texts read:

| domain | documents | bytes | SHA-256 |
|---|---|---|---|
{corpora}"""


def _rows(mixture: MixtureOptions) -> str:
    kinds = ("dyck_episode", "dyck_standard", "code", "prose", "math", "backcopy")
    return ", ".join(f"{getattr(mixture, kind)} {kind}" for kind in kinds)


def main() -> None:
    """Train one network of the demo pair."""
    options = parse(TrainOptions, prog="python -m model.training.train", description=__doc__ or "")
    checkpoint = train(options, PRESETS[options.preset])
    print(f"wrote {checkpoint}")


if __name__ == "__main__":
    run_command(main)
