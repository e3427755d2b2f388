"""One prompt through a network as it is, under an edit, and under a random change as large as the edit's.

    network = open_network("checkpoints/demo-smelt")
    look(network, "A prompt", skip([5])).next_tokens

An edit is chosen by `Change` and made by `made`, which writes the same as Python. Everything runs under the network's
lock with hooks that end with the pass: nothing of one look is left for the next, whoever asks.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pandas import DataFrame
from torch import Tensor

from model.checkpoint import CONFIG
from model.hooks import interventions
from model.hooks.interventions import PATTERN, POST, PRE, UPDATES, Edit, Sources, Target, Values
from model.hooks.looped_model import LoopedModel
from model.hooks.names import Hook
from probes.sample_values import Coloured
from probes.statistics.quantities import NULL_PREFIX, OTHER_PREFIX, Record
from smelt_interp.architecture import Architecture
from smelt_interp.data.marked_text import MarkedText, Row, padded, tokens_of, with_bos
from smelt_interp.data.samples import Samples
from smelt_interp.data.token_text import label
from smelt_interp.errors import UserError
from smelt_interp.sites import hook_name

Kind = Literal["skip", "again", "swap", "clamp", "zero"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WORDS: dict[Kind, str] = {
    "skip": "skip these steps", "again": "add what visit 1 added", "swap": "swap with visit 1",
    "clamp": "clamp to visit 1", "zero": "set to 0 (ablate)",
}  # fmt: skip
COPIED = (PATTERN, "attn.hook_attn_scores", "mlp.hook_router_logits", "attn.hook_z", *UPDATES)
SITES_OF: dict[Kind, tuple[str, ...]] = {
    "skip": (), "again": (), "swap": COPIED, "clamp": COPIED, "zero": ("attn.hook_z", *UPDATES),
}  # fmt: skip
"""Where each may act; those without act on the layer as a whole."""
WHOLE: dict[Kind, tuple[str, ...]] = {"skip": (PRE, POST), "again": UPDATES}
EDITED, RANDOM = "edited", "random"
MOST_TOKENS = 512
MOST_CHARACTERS = 8192
MOST_BYTES = 4 * 2**30
"""Of a checkpoint's weights that a page opens."""
DEEPEST = 4
"""Folders below the root in which checkpoints are looked for."""
TOP = 10

# Networks


def checkpoints_below(root: Path) -> list[str]:
    """The folders with a config and safetensors at most DEEPEST below `root`; no links are followed, no hidden ones."""
    found = []
    for folder, below, files in os.walk(root):
        path = Path(folder).relative_to(root)
        below[:] = [] if len(path.parts) >= DEEPEST else [name for name in below if not name.startswith(".")]
        if CONFIG in files and any(name.endswith(".safetensors") for name in files):
            found.append(path.as_posix())
    return sorted(found)


def stamp_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes with the files of a checkpoint. Raises `UserError` for weights that no page should open."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    total = sum(each.st_size for name, each in files if name.endswith(".safetensors"))
    if total > MOST_BYTES:
        raise UserError(f"weights on a page must be at most {MOST_BYTES} bytes; got {total} in {folder}: run the code")
    return tuple((name, each.st_mtime_ns, each.st_size) for name, each in files)


# Edits


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An edit as it is chosen; everything counts from 0."""

    kind: Kind
    layers: tuple[int, ...]
    visits: tuple[int, ...]
    """Those of them that a layer has; `swap` takes one."""
    site: str = ""
    """One of SITES_OF, for those that have some."""
    heads: tuple[int, ...] = ()
    """Of a site with heads; empty is all."""


class Made(NamedTuple):
    """An edit, and the Python that makes it where the network is called `network`."""

    edit: Edit
    text: str
    names: tuple[str, ...]
    """What the text needs of `model.hooks.interventions`."""


def kinds_of(architecture: Architecture) -> list[Kind]:
    """The edits that can be made of a network: without a loop there is no first visit to copy."""
    found: list[Kind] = []
    for kind in KINDS:
        has_sites = set(WHOLE[kind]) <= set(architecture.sites) if kind in WHOLE else bool(sites_of(kind, architecture))
        if has_sites and (architecture.loops or kind in ("skip", "zero")):
            found.append(kind)
    return found


def sites_of(kind: Kind, architecture: Architecture) -> list[str]:
    """Where an edit may act in a network."""
    return [site for site in SITES_OF[kind] if site in architecture.sites]


def has_heads(site: str) -> bool:
    """Whether heads of a site can be chosen."""
    return bool(site) and interventions.head_axis(site) is not None


def made(network: LoopedModel, change: Change) -> Made:
    """The edit that was chosen. Raises `UserError` where no layer has the visits, and as the edits do."""
    plan, site, heads = network.plan, change.site, change.heads
    steps = [index for index, step in enumerate(plan) if step.layer in change.layers and step.visit in change.visits]
    if not steps:
        raise UserError("an edit must have at least one layer that runs on the chosen visit; got none: choose another")
    of_heads = f", heads={heads}" if heads else ""
    match change.kind:
        case "skip":
            return Made(interventions.skip(steps), f"skip({steps})", ("skip",))
        case "again":
            return Made(interventions.again(network, steps), f"again(network, {steps})", ("again",))
        case "clamp":
            text = f"clamp(network, {site!r}, {steps}{of_heads})"
            return Made(interventions.clamp(network, site, steps, heads), text, ("clamp",))
        case "zero":
            text = f"zero(Target({site!r}, {tuple(steps)}{of_heads}))"
            return Made(interventions.zero(Target(site, tuple(steps), heads)), text, ("Target", "zero"))
    visits = (0, change.visits[0])
    if len(change.visits) > 1 or visits == (0, 0):
        raise UserError(f"a swap must be with one later visit; got {[visit + 1 for visit in change.visits]}")
    layers = [plan[step].layer for step in steps]
    swaps = [interventions.swap(network, site, layer=layer, visits=visits, heads=heads) for layer in layers]
    each = f"swap(network, {site!r}, layer=layer, visits={visits}{of_heads})"
    return Made(
        interventions.together("swap", swaps), f'together("swap", [{each} for layer in {layers}])', ("swap", "together")
    )


def code(folder: str, prompt: str, edit: Made) -> str:
    """A script that prints what the page shows."""
    return (
        "from model.families.opening import open_network\n"
        f"from model.hooks.interventions import {', '.join(edit.names)}\n"
        "from probes.running.live import look\n\n"
        f"network = open_network({folder!r})\n"
        f"edit = {edit.text}\n"
        f"seen = look(network, {prompt!r}, edit)\n"
        'print(seen.next_tokens, seen.tokens, seen.start_mass(), sep="\\n\\n")\n'
    )


# Looking


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a prompt shows: as the network is, edited, and changed at random."""

    samples: Samples
    next_tokens: DataFrame
    """The TOP tokens that are likeliest before or after: token, id, and their probabilities."""
    tokens: DataFrame
    """A row a token, from 1: token, its loss in nats (none of the first), and the change by the edit."""
    kl_nats: dict[str, float]
    """Of the next token's distribution as it is from that of the edited pass, and of the random one."""
    mass_rows: tuple[Record, ...]
    """Start mass of each step, as a probe's rows; empty where the network has no pattern."""

    def start_mass(self) -> DataFrame:
        """Start mass of each step: mean over heads and over every query but the first."""
        columns = {"layers": "layer", "visit": "visit", "value": "before", f"{OTHER_PREFIX}{EDITED}": EDITED,
                   f"{NULL_PREFIX}{RANDOM}": RANDOM, f"{NULL_PREFIX}uniform": "uniform"}  # fmt: skip
        return DataFrame(list(self.mass_rows), columns=list(columns)).rename(columns=columns)

    def mean_loss(self) -> dict[str, float]:
        """Nats a token."""
        return {name: float(self.tokens[name].mean()) for name in ("before", EDITED, RANDOM)}

    def coloured(self) -> Coloured:
        """The text by what the edit changes in each token's loss."""
        change_T = self.tokens["change"].to_numpy(np.float64)
        most = max(float(np.nanmax(np.abs(change_T), initial=0)), 1e-6)
        numbers = self.tokens[["before", EDITED, "change"]].itertuples(index=False)
        readings = [
            "no loss" if np.isnan(row[0]) else f"loss {row[0]:.3f} nats, edited {row[1]:.3f}, change {row[2]:+.3f}"
            for row in numbers
        ]
        summary = f"loss edited - before: blue is less, orange more; deepest at {most:.3g} nats"
        return Coloured(change_T.astype(np.float32), most, readings, summary)


class _Pass(NamedTuple):
    logprob_TW: Tensor
    own: Values
    mass_L: NDArray[np.float64]
    """Start mass by step; empty without patterns."""


def prompt_samples(network: LoopedModel, prompt: str) -> Samples:
    """The prompt as one row, behind a BOS where the network has one. Raises `UserError` for one that does not fit."""
    if not network.architecture.causal:
        raise UserError(f"a live network must predict the next token; {network.architecture.family} fills in others")
    if len(prompt) > MOST_CHARACTERS:
        raise UserError(f"a prompt must be at most {MOST_CHARACTERS} characters; got {len(prompt)}")
    text = MarkedText(text=prompt, document=0, domain="prompt")
    tokens = with_bos(tokens_of(text, network.tokenizer), network.tokenizer)
    most = min(MOST_TOKENS, network.architecture.context)
    if not 2 <= len(tokens.ids_T) <= most:
        raise UserError(f"a prompt must be 2 to {most} tokens of this network, BOS included; got {len(tokens.ids_T)}")
    return padded([Row(tokens, text)], network.tokenizer)


def look(network: LoopedModel, prompt: str, edit: Edit) -> Look:
    """What a prompt shows. Raises `UserError` for a prompt that does not fit, for an edit that reads other samples, and
    for numbers that are not finite."""
    samples = prompt_samples(network, prompt)
    if edit.other or edit.mean:
        raise UserError(f"a live edit must read the prompt's own pass alone; got {edit.name}: compare takes samples")
    with network.lock, torch.no_grad():
        before = _run(network, samples, (), edit.own)
        sources = Sources(samples=samples, sample_ids=np.zeros(1, np.int64), own=before.own)
        passes = {"before": before} | {
            name: _run(network, samples, each.hooks(sources), ())
            for name, each in ((EDITED, edit), (RANDOM, interventions.at_random(edit)))
        }
    for name, found in passes.items():
        if not found.logprob_TW.isfinite().all():
            raise UserError(f"log-probabilities must be finite; got others in the pass {name!r}: choose another edit")
    last = {name: found.logprob_TW[-1].exp().numpy() for name, found in passes.items()}
    return Look(
        samples=samples,
        next_tokens=_next_tokens(network, last),
        tokens=_token_losses(samples, passes),
        kl_nats={
            name: float((last["before"] * (before.logprob_TW[-1] - passes[name].logprob_TW[-1]).numpy()).sum())
            for name in (EDITED, RANDOM)
        },
        mass_rows=_mass_rows(network.architecture, passes, samples.ids_NT.shape[1]),
    )


def _run(network: LoopedModel, samples: Samples, hooks: Iterable[Hook], names: tuple[str, ...]) -> _Pass:
    """One pass: log-probabilities, the named values, and the start mass as the edit left it."""
    mass: dict[int, float] = {}

    def reading(step: int) -> Callable[..., None]:
        def read(pattern_BQTS: Tensor, hook: object) -> None:  # transformer-lens hands the point over as `hook`
            mass[step] = float(pattern_BQTS[0, :, 1:, 0].double().mean())

        return read

    steps = range(len(network.plan)) if PATTERN in network.architecture.sites else ()
    readers = [(hook_name(step, PATTERN), reading(step)) for step in steps]
    tokens_BT, start_BT = (
        torch.from_numpy(x_BT.astype(np.int64)).to(network.device)
        for x_BT in (samples.ids_NT, samples.segment_start_NT)
    )
    logits_BTW, own = network.run_with_cache(
        tokens_BT, names_filter=list(names), fwd_hooks=[*hooks, *readers], return_cache_object=False,
        attention="eager", segment_start_BT=start_BT,
    )  # fmt: skip
    return _Pass(logits_BTW[0].double().log_softmax(-1).cpu(), own, np.array([mass[step] for step in steps]))


def _next_tokens(network: LoopedModel, last: dict[str, NDArray[np.float64]]) -> DataFrame:
    texts = network.tokenizer.token_text
    ids = np.argsort(-np.maximum(last["before"], last[EDITED]), kind="stable")[:TOP]
    names = [label(texts[each]) if each < len(texts) and texts[each] else "<special>" for each in ids.tolist()]
    return DataFrame({"token": names, "id": ids} | {name: chance_W[ids] for name, chance_W in last.items()})


def _token_losses(samples: Samples, passes: dict[str, _Pass]) -> DataFrame:
    next_T1 = torch.from_numpy(samples.ids_NT[0, 1:].astype(np.int64))[:, None]
    frame = DataFrame({"position": np.arange(1, samples.ids_NT.shape[1] + 1), "token": samples.labels(0)})
    for name, found in passes.items():
        loss_T = -found.logprob_TW[:-1].gather(-1, next_T1)[:, 0].numpy()
        frame[name] = np.concatenate([[np.nan], loss_T])
    frame["change"] = frame[EDITED] - frame["before"]
    return frame


def _mass_rows(architecture: Architecture, passes: dict[str, _Pass], length: int) -> tuple[Record, ...]:
    """Beside each mass what uniform attention gives, and the random change."""
    uniform = float((1 / np.arange(2, length + 1)).mean())
    before, edited, random = (passes[name].mass_L.tolist() for name in ("before", EDITED, RANDOM))
    return tuple(
        {
            "quantity": "start mass", "level": "layer", "layers": str(step.layer + 1), "visit": step.visit + 1,
            "value": before[at], f"{OTHER_PREFIX}{EDITED}": edited[at], f"{NULL_PREFIX}uniform": uniform,
            f"{NULL_PREFIX}{RANDOM}": random[at],
        }
        for at, step in enumerate(architecture.steps if before else ())
    )  # fmt: skip
