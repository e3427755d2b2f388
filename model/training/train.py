"""Train one network: resumable to the bit, with a metrics file, ending in a checkpoint folder.

The batch of a step is a function of the options and the step alone, and a state holds all that is remembered between
steps, so a run that is stopped at any moment and goes on is the run that was never stopped. Under torchrun each rank
has rows of its own, and the first one writes.
"""

import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model import ranks
from model.checkpoint import write_checkpoint
from model.losses import Loss, predicted_tokens, routed_tokens
from model.network import LoopedMoE
from model.training.card import card
from model.training.evaluate import Evaluation, evaluate, held_out_batches
from model.training.metrics import METRICS, append, keep_before, row_of
from model.training.optimizers import Optimizers
from model.training.options import TrainOptions
from model.training.run_folder import CHECKPOINT, RUN, locked, read_run, write_or_compare
from model.training.schedule import decay_start, rate
from model.training.sharding import check_ranks, clip, round_weights, shard, whole_weights
from model.training.state import TrainingPlace, load_state, save_state, states
from model.training.tensorboard import Events
from smelt_interp.data.mixture import TrainingMixture, extend
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError, run_command, shown
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.output_files import make_folder
from smelt_interp.terminal.progress import Progress


@dataclass(slots=True)
class Training:
    """A network that is trained, and what trains it."""

    options: TrainOptions
    network: LoopedMoE
    optimizers: Optimizers

    def tensors(self) -> dict[str, Tensor]:
        """All that is remembered between steps, in place."""
        weights = {f"weight/{name}": weight.detach() for name, weight in self.network.named_parameters()}
        return weights | self.optimizers.state()

    def step(self, number: int, samples: Samples) -> dict[str, float]:
        """Losses and gradient of all rows of a step, then the update. -> the step's numbers

        The rows are read in parts, and each part by all ranks, of which each counts by its targets and tokens, so that
        the number of ranks changes nothing, nor that of parts where the balance loss has no weight.
        Raises `UserError` when a loss or the gradient is not finite; the weights are then as they were.
        """
        options = self.options
        whole = self._inputs(samples)
        targets, tokens = int(predicted_tokens(*whole).sum()), int(routed_tokens(*whole).sum())
        added = torch.zeros(3, dtype=torch.float64, device=whole[0].device)
        try:
            for part in np.array_split(np.arange(len(samples)), options.accumulate):
                each = self._inputs(samples.rows(ranks.own_part(part)))
                loss = self._loss(*each)
                of_targets, of_tokens = predicted_tokens(*each).sum() / targets, routed_tokens(*each).sum() / tokens
                routing = options.balance * loss.balance + options.router_z * loss.router_z
                (loss.next_token * of_targets + routing * of_tokens).backward()
                shares = torch.stack((of_targets, of_tokens, of_tokens))
                added += torch.stack(loss).detach().double() * shares
        except UserError as error:  # the network's own checks: of logits, of the router
            raise UserError(self._stopped(number, str(error))) from None
        sums = dict(zip(("loss", "balance", "router_z"), ranks.total(added).tolist(), strict=True))
        norm = clip(self.network, options.clip)
        if not np.isfinite([norm, *sums.values()]).all():
            raise UserError(self._stopped(number, f"the gradient's norm is {norm}, the loss {sums['loss']}"))
        learning_rate = rate(options, number)
        self.optimizers.step(learning_rate)
        return sums | {"gradient_norm": norm, "learning_rate": learning_rate}

    def _inputs(self, samples: Samples) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens, and the masks that the rows need: those of one document each, and full, need none."""
        device = torch.device(self.options.device)
        ids_BT = torch.from_numpy(samples.ids_NT.astype(np.int64)).to(device)
        start_BT = torch.from_numpy(samples.segment_start_NT.astype(np.int64)).to(device)
        real_BT = torch.arange(ids_BT.shape[1]) < torch.from_numpy(samples.length_N)[:, None]
        packed, short = bool(samples.segment_start_NT.any()), not bool(real_BT.all())
        return ids_BT, start_BT if packed else None, real_BT.long().to(device) if short else None

    def _loss(self, tokens_BT: Tensor, start_BT: Tensor | None, mask_BT: Tensor | None) -> Loss:
        with self._precision():
            return self.network.loss(
                tokens_BT, segment_start_BT=start_BT, attention_mask_BT=mask_BT, over_steps=self.options.over_steps,
                over_ranks=ranks.total,
            )  # fmt: skip

    def _precision(self) -> AbstractContextManager[object]:
        kind = torch.device(self.options.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.dtype == "bfloat16")

    def _stopped(self, number: int, why: str) -> str:
        kept = [*states(self.options.out)]
        left = f"the state of step {kept[-1]} stays" if kept else "there is no state yet"
        return f"training must stay finite; step {number + 1}: {why:.120}; {left}: lower --learning-rate"


def train(options: TrainOptions) -> list[Path]:
    """Run, or go on with, a training, or each of its branches in turn. -> the checkpoint folders

    Raises `UserError` when the folder cannot be written, is in use, or holds a run that is finished or another, when
    a text changed, and when a number is no longer finite.
    """
    if not options.horizons:
        return [_train_one(options)]
    branches = [replace(options, out=options.out / str(steps), steps=steps, horizons=()) for steps in options.horizons]
    return [each.out / CHECKPOINT if _is_finished(each) else _train_one(each) for each in branches]


def _is_finished(options: TrainOptions) -> bool:
    return (options.out / CHECKPOINT).exists()


def _refuse_finished(options: TrainOptions) -> None:
    if _is_finished(options):
        raise UserError(f"a run must not be finished already; {options.out / CHECKPOINT} exists; choose another --out")


def _train_one(options: TrainOptions) -> Path:
    checkpoint = options.out / CHECKPOINT
    _refuse_finished(options)  # before the texts are read, and again once nobody else can finish it
    # What is read: the network's config, its tokenizer, the texts.
    torch.set_num_threads(options.threads)
    config, tokenizer = options.network()
    check_ranks(config, options)
    _check_device(options)
    mixture = TrainingMixture(options.read, tokenizer)
    held_out = held_out_batches(mixture)
    make_folder(options.out)
    with locked(options.out) if ranks.is_first_rank() else nullcontext():
        _refuse_finished(options)
        # Where the run stands: at its newest state, at a state of the run that it branches from, or at the start.
        if ranks.is_first_rank():
            write_or_compare(options, config, mixture)
        ranks.wait()
        network = LoopedMoE(config, seed=options.seed, tokenizer=tokenizer)
        shard(network, options.device, options.expert_parallel)
        training = Training(options, network, Optimizers(network, options))
        place = _begin(options, training)
        if ranks.is_first_rank():
            keep_before(options.out / METRICS, place.step)
        with closing(Events(options.out, place.step)) if ranks.is_first_rank() else nullcontext() as events:
            place = _steps(training, mixture, held_out, place, events)
        # The checkpoint: the README's figures are of the weights as they are stored.
        round_weights(network, torch.bfloat16)
        scores = evaluate(network, options.read, held_out, episodes=256)
        weights = whole_weights(network)
        if ranks.is_first_rank():
            readme = card(options, network, mixture, place, scores)
            write_checkpoint(checkpoint, config, weights, tokenizer=tokenizer, readme=readme, dtype=torch.bfloat16)
    return checkpoint


def _check_device(options: TrainOptions) -> None:
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device must be one of this machine; got {options.device!r}: {error!s:.80}") from None
    cuda = torch.device(options.device).type == "cuda"
    if options.dtype == "bfloat16" and cuda and not torch.cuda.is_bf16_supported():
        raise UserError(f"dtype must be float32 on {options.device}, which has no bfloat16; got bfloat16")


def _begin(options: TrainOptions, training: Training) -> TrainingPlace:
    """Load the state from which the run goes on."""
    found = states(options.out)
    if found:
        step, folder = found.popitem()
        if step > options.steps:
            raise UserError(f"a state must be of one of the {options.steps} steps of the run; got {folder}")
        return load_state(folder, training.tensors())
    if not options.branch_from:
        return TrainingPlace()
    trunk = Path(options.branch_from)
    _compare_trunk(options, trunk)
    before = [folder for step, folder in states(trunk).items() if step <= decay_start(options)]
    if not before:
        raise UserError(
            f"{trunk} must keep a state of step {decay_start(options)} or before, where the decay of {options.steps} "
            f"steps starts; got {', '.join(map(str, states(trunk)))[:60] or 'none'}: train it with --keep-every"
        )
    return replace(load_state(before[-1], training.tensors()), seconds=0.0)


def _compare_trunk(options: TrainOptions, trunk: Path) -> None:
    """Until its decay, a branch must be the run that it starts from."""
    run = read_run(trunk / RUN).get("options")
    of_trunk = run if isinstance(run, dict) else {}
    for name, value in options.deciding().items():
        if name not in ("steps", "decay", "branch_from") and of_trunk.get(name) != value:
            raise UserError(
                f"--{name.replace('_', '-')} must be that of the run to branch from, {of_trunk.get(name)!r:.40}; got "
                f"{value!r:.40}"
            )
    steps, decay = of_trunk.get("steps"), of_trunk.get("decay")
    if not (isinstance(steps, int) and 0 < steps < 10**10 and isinstance(decay, int | float) and 0 <= decay <= 1):
        got = f"got {shown(steps)} and {shown(decay)}"
        raise UserError(f"{trunk / RUN} must say the steps and the decay of its run; {got}: branch from another run")
    last = steps - round(decay * steps)
    if decay_start(options) > last:
        raise UserError(
            f"steps must be so few that the decay starts before that of {trunk}, at step {last}; got {options.steps}, "
            f"whose decay starts at {decay_start(options)}"
        )


def _steps(
    training: Training,
    mixture: TrainingMixture,
    held_out: tuple[Samples, ...],
    place: TrainingPlace,
    events: Events | None,
) -> TrainingPlace:
    """The steps that are left; `events` on the rank that writes. -> where the run stands at the end"""
    options, a_step = training.options, training.options.tokens_a_step
    progress = Progress("trained", options.steps * a_step, " tokens", place.step * a_step)
    started = time.perf_counter() - place.seconds
    for number in range(place.step, options.steps):
        samples = mixture.batch(number)
        numbers = training.step(number, samples)
        done = number + 1
        seconds = time.perf_counter() - started
        place = TrainingPlace(step=done, digest=extend(place.digest, samples), seconds=seconds)
        if ranks.is_first_rank():
            progress.show(done * a_step)
        last = done == options.steps
        # Every rank evaluates, since each holds a part of the network; the first writes.
        # Metrics before the state: a row that is written twice is dropped at resume, a missing one stays missing.
        if last or done % options.evaluate_every == 0:
            scores = evaluate(training.network, options.read, held_out)
            where = {"step": done, "tokens": done * a_step, "seconds": round(seconds, 1)}
            if events:
                row = row_of(where | numbers, scores)
                append(options.out / METRICS, row)
                events.write(row)
                _show(done, numbers["loss"], scores)
        if last or done % options.save_every == 0 or (options.keep_every and done % options.keep_every == 0):
            save_state(options.out, place, training.tensors(), options.keep_every)
    return place


def _show(step: int, loss: float, scores: Evaluation) -> None:
    losses = " ".join(f"{domain} {value:.3f}" for domain, value in scores.loss_nats.items())
    curve = " ".join(f"k={shots} {match:.2f}" for shots, match in scores.exact_match.items())
    print(f"step {step}  loss {loss:.3f}  held out: {losses}  {'Dyck exact: ' if curve else ''}{curve}", flush=True)


def main() -> None:
    """Train one network."""
    options = parse(TrainOptions, prog="python -m model.training.train", description=__doc__ or "")
    with ranks.joined(options.device):
        for checkpoint in train(options):
            print(f"wrote {checkpoint}")


if __name__ == "__main__":
    run_command(main)
