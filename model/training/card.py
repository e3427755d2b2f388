"""The README of a trained checkpoint: what it is, the command that makes it, what it read and how well it predicts."""

import platform

import torch

from model.network import LoopedMoE
from model.training.evaluate import Evaluation
from model.training.options import KINDS, TrainOptions
from model.training.state import TrainingPlace
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture


def card(
    options: TrainOptions, network: LoopedMoE, mixture: TrainingMixture, place: TrainingPlace, scores: Evaluation
) -> str:
    """Markdown; the title is the network's own name."""
    parameters = sum(weight.numel() for weight in network.parameters())
    config = network.config
    looped = f"layers {config.loop_start + 1} to {config.loop_stop} run {config.num_visits} times"
    visits = looped if config.num_visits > 1 else "each runs once"
    losses = [f"| {domain} | {value:.3f} |" for domain, value in scores.loss_nats.items()]
    curve = [f"| {shots} | {match:.3f} |" for shots, match in scores.exact_match.items()]
    corpora = [f"| {c.domain} | {c.documents} | {c.bytes:,} | `{c.digest}` |" for c in mixture.corpora]
    dyck = f"Exact match on 256 fresh Dyck episodes (`episode` pairing, up to {options.mixture.max_total} brackets)"
    return f"""# {options.name}

{parameters:,} parameters, {config.num_layers} layers, {visits}; weights stored as bfloat16, trained in {options.dtype}.

- tokens: {place.step * options.tokens_a_step:,} in {place.step:,} steps of {options.tokens_a_step:,}
- token order: `{place.digest}`
- wall time: {place.seconds / 60:.0f} minutes with --threads {options.threads}
- versions: Python {platform.python_version()}, torch {torch.__version__}
- rows a step: {_rows(options.read)}
- command: {_fetched(options.read)}`{options.command()}`
{_table("Held-out loss, nats a token", "| rows | loss |", losses)}{_table(dyck, "| shots | exact match |", curve)}\
{_table("Texts read", "| domain | documents | bytes | SHA-256 |", corpora)}"""


def _table(title: str, head: str, rows: list[str]) -> str:
    if not rows:
        return ""
    return "\n".join([f"\n{title}:\n", head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def _rows(read: MixtureOptions) -> str:
    own = [f"{read.text_rows} of {path}" for path in read.text]
    return ", ".join([f"{getattr(read, kind)} {kind}" for kind in KINDS if getattr(read, kind)] + own)


def _fetched(read: MixtureOptions) -> str:
    fetched = read.source == "fetched" and (read.prose or read.math)
    return "`python -m smelt_interp.data.fetch_texts`, then " if fetched else ""
