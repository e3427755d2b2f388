"""One prompt through a network as it is, under an edit, and under a random change as large as the edit's.

    network = open_network("checkpoints/demo-smelt")
    look(network, "A prompt", skip([5])).next_tokens

An edit is chosen by `Change` and made by `made`, which writes the same as Python. Everything runs under the network's
lock with hooks that end with the pass: nothing of one look is left for the next, whoever asks.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from unicodedata import combining, normalize

import numpy as np
import torch
from numpy.typing import NDArray
from pandas import DataFrame
from torch import Tensor

from model.checkpoint import CONFIG, read_config
from model.hooks import interventions
from model.hooks.interventions import PATTERN, POST, PRE, UPDATES, Edit, Sources, Target, Values
from model.hooks.looped_model import LoopedModel
from model.hooks.names import Hook
from probes.sample_values import Coloured
from probes.statistics.quantities import NULL_PREFIX, OTHER_PREFIX, Record
from smelt_interp.architecture import Architecture
from smelt_interp.data.marked_text import MarkedText, Row, padded, tokens_of, with_bos
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError, shown
from smelt_interp.looped_span import LoopedSpan
from smelt_interp.sites import SITES, hook_name

Kind = Literal["skip", "again", "swap", "clamp", "patch", "zero", "mean"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WORDS: dict[Kind, str] = {
    "skip": "skip these steps", "again": "add what visit 1 added", "swap": "swap with visit 1",
    "clamp": "clamp to visit 1", "patch": "take what another prompt has at the same position",
    "zero": "set to 0 (ablate)", "mean": "set to the mean over the prompt's tokens (ablate)",
}  # fmt: skip
FROM_FIRST: tuple[Kind, ...] = ("again", "swap", "clamp")
"""Those that need a later visit of a layer."""
LAYER = "layer"
"""The site of an ablation that is everything the layer adds, UPDATES."""
COPIED = (PATTERN, "attn.hook_attn_scores", "mlp.hook_router_logits", "attn.hook_z", *UPDATES)
ABLATED = (LAYER, "attn.hook_z", *UPDATES)
SITES_OF: dict[Kind, tuple[str, ...]] = {
    "skip": (), "again": (), "swap": COPIED, "clamp": COPIED, "patch": COPIED, "zero": ABLATED, "mean": ABLATED,
}  # fmt: skip
"""Where each may act; those without act on the layer as a whole."""
WHOLE: dict[Kind, tuple[str, ...]] = {"skip": (PRE, POST), "again": UPDATES}
EDITED, RANDOM = "edited", "random"
MOST_TOKENS = 512
MOST_CHARACTERS = 4096
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


def first_to_show(root: Path, names: list[str]) -> str:
    """The first of ours that visits a layer more than once, or else the first."""
    for name in names:
        try:
            if read_config(root / name).num_visits > 1:
                return name
        except UserError:  # another family's, or none: opening it says which
            continue
    return names[0]


def stamp_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes with the files of a checkpoint. Raises `UserError` for weights that no page should open."""
    try:
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    except OSError as error:  # deleted since it was listed
        raise UserError(f"a network must be there and readable; got {folder}: {error.strerror}") from None
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
    """Empty is every layer that runs on the visits."""
    visits: tuple[int, ...]
    """Those of them that a layer has."""
    site: str = ""
    """One of SITES_OF, for those that have some."""
    heads: tuple[int, ...] = ()
    """Of a site with heads; empty is all."""


class Made(NamedTuple):
    """An edit, and the Python that makes it with `model.hooks.interventions`, where the network is `network`."""

    edit: Edit
    text: str


def kinds_of(architecture: Architecture) -> list[Kind]:
    """The edits that can be made of a network: without a loop there is no first visit to copy."""
    found: list[Kind] = []
    for kind in KINDS:
        has_sites = set(WHOLE[kind]) <= set(architecture.sites) if kind in WHOLE else bool(sites_of(kind, architecture))
        if has_sites and (architecture.loops or kind not in FROM_FIRST):
            found.append(kind)
    return found


def sites_of(kind: Kind, architecture: Architecture) -> list[str]:
    """Where an edit may act in a network."""
    return [site for site in SITES_OF[kind] if set(_parts(site)) <= set(architecture.sites)]


def has_heads(site: str) -> bool:
    """Whether heads of a site can be chosen."""
    return site in SITES and interventions.head_axis(site) is not None


def made(network: LoopedModel, change: Change) -> Made:
    """The edit that was chosen. Raises `UserError` where no layer has the visits, and as the edits do."""
    plan, site, heads = network.plan, change.site, change.heads
    # The steps that the layers and visits come to.
    steps = [
        index
        for index, step in enumerate(plan)
        if step.visit in change.visits and (not change.layers or step.layer in change.layers)
    ]
    if not steps:
        raise UserError("an edit must have at least one layer that runs on the chosen visit; got none: choose another")
    of_heads = f", heads={heads}" if heads else ""
    # Edits of whole visits, and those that copy another one.
    match change.kind:
        case "skip":
            return Made(interventions.skip(steps), f"skip({steps})")
        case "again":
            return Made(interventions.again(network, steps), f"again(network, {steps})")
        case "clamp":
            return Made(
                interventions.clamp(network, site, steps, heads), f"clamp(network, {site!r}, {steps}{of_heads})"
            )
        case "swap":
            pairs = [(plan[step].layer, (0, plan[step].visit)) for step in steps]
            if any(visits == (0, 0) for _, visits in pairs):
                raise UserError("a swap must be with a later visit than the first; got visit 1: choose another")
            return _together("swap", [
                Made(
                    interventions.swap(network, site, layer=layer, visits=visits, heads=heads),
                    f"swap(network, {site!r}, layer={layer}, visits={visits}{of_heads})",
                )
                for layer, visits in pairs
            ])  # fmt: skip
    # What is put in place of a site's values, or of both of a layer's.
    word, make = {
        "patch": ("resample", interventions.resample),
        "zero": ("zero", interventions.zero),
        "mean": ("mean", interventions.mean),
    }[change.kind]
    return _together(word, [
        Made(make(Target(part, tuple(steps), heads)), f"{word}(Target({part!r}, {tuple(steps)}{of_heads}))")
        for part in _parts(site)
    ])  # fmt: skip


def _parts(site: str) -> tuple[str, ...]:
    return UPDATES if site == LAYER else (site,)


def _together(name: str, parts: list[Made]) -> Made:
    if len(parts) == 1:
        return parts[0]
    text = ", ".join(part.text for part in parts)
    return Made(interventions.together(name, [part.edit for part in parts]), f"together({name!r}, [{text}])")


def code(folder: str, loop: LoopedSpan | None, prompt: str, edit: Made, other: str = "") -> str:
    """A script that prints what the page shows; `loop` and `other` are those of `open_network` and `look`."""
    called = sorted(set(re.findall(r"(\w+)\(", edit.text)))
    opening = "Opening, open_network" if loop else "open_network"
    also = "from smelt_interp.costs.spans import LayerRange\nfrom smelt_interp.looped_span import LoopedSpan\n"
    return (
        f"from model.families.opening import {opening}\n"
        f"from model.hooks.interventions import {', '.join(called)}\n"
        f"from probes.running.live import look\n{also if loop else ''}\n"
        f"network = open_network({folder!r}{f', Opening(loop={loop!r})' if loop else ''})\n"
        f"edit = {edit.text}\n"
        f"seen = look(network, {prompt!r}, edit{f', other={other!r}' if other else ''})\n"
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

    def loss_change(self) -> dict[str, float]:
        """What each edit adds to the mean loss, in nats a token."""
        loss = self.mean_loss()
        return {name: loss[name] - loss["before"] for name in (EDITED, RANDOM)}

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
    loss_T: NDArray[np.float64]
    """Of every token but the first."""
    logprob_W: NDArray[np.float64]
    """Of the next token."""
    kept: Values
    mass_L: NDArray[np.float64]
    """Start mass by step; empty without patterns."""


def prompt_samples(network: LoopedModel, prompt: str) -> Samples:
    """The prompt as one row, behind a BOS where the network has one. Raises `UserError` for one that does not fit, and
    for characters that the tokenizer lacks."""
    if not network.architecture.causal:
        raise UserError(f"a live network must predict the next token; {network.architecture.family} fills in others")
    if len(prompt) > MOST_CHARACTERS:
        raise UserError(f"a prompt must be at most {MOST_CHARACTERS} characters; got {len(prompt)}")
    text = MarkedText(text=prompt, document=0, domain="prompt")
    own = tokens_of(text, network.tokenizer)
    tokens = with_bos(own, network.tokenizer)
    most = min(MOST_TOKENS, network.architecture.context)
    if not 2 <= len(tokens.ids_T) <= most:
        raise UserError(f"a prompt must be 2 to {most} tokens of this network, BOS included; got {len(tokens.ids_T)}")
    # A tokenizer may change case, accents and white space; what it lacks it drops, or writes as something else.
    wanted, said = _plain(prompt), _plain(network.tokenizer.decode(own.ids_T))
    if lost := next((letter for letter, back in zip_longest(wanted, said[: len(wanted)]) if letter != back), ""):
        raise UserError(f"a prompt must be of characters that the tokenizer has; got {shown(lost)}: leave it out")
    return padded([Row(tokens, text)], network.tokenizer)


def _plain(text: str) -> str:
    spelt = normalize("NFKD", text.casefold())
    return "".join(letter for letter in spelt if not letter.isspace() and not combining(letter))


def look(network: LoopedModel, prompt: str, edit: Edit, other: str = "") -> Look:
    """What a prompt shows under an edit; `other` is the prompt that a patch takes from, means are over `prompt`.

    Raises `UserError` for prompts that do not fit, and for numbers that are not finite.
    """
    # The untouched pass, whose values the edit is made of, then the edited and the random one.
    samples = prompt_samples(network, prompt)
    others = _others(network, samples, other) if edit.other else None
    with network.lock, torch.no_grad():
        before = _run(network, samples, (), (*edit.own, *edit.mean))
        sources = Sources(
            samples=samples,
            sample_ids=np.zeros(1, np.int64),
            own=before.kept,
            other=_run(network, others, (), edit.other).kept if others else {},
            mean={name: before.kept[name][0].double().mean(0) for name in edit.mean},
        )
        passes = {"before": before} | {
            name: _run(network, samples, each.hooks(sources), ())
            for name, each in ((EDITED, edit), (RANDOM, interventions.at_random(edit)))
        }
    for name, found in passes.items():
        if not (np.isfinite(found.loss_T).all() and np.isfinite(found.logprob_W).all()):
            raise UserError(f"log-probabilities must be finite; got others in the pass {name!r}: choose another edit")
    # What they show.
    last = {name: np.exp(found.logprob_W) for name, found in passes.items()}
    return Look(
        samples=samples,
        next_tokens=_next_tokens(network, last),
        tokens=_token_losses(samples, passes),
        kl_nats={
            name: float((last["before"] * (before.logprob_W - passes[name].logprob_W)).sum())
            for name in (EDITED, RANDOM)
        },
        mass_rows=_mass_rows(network.architecture, passes, samples.ids_NT.shape[1]),
    )


def _others(network: LoopedModel, samples: Samples, other: str) -> Samples:
    found = prompt_samples(network, other)
    wanted, given = samples.ids_NT.shape[1], found.ids_NT.shape[1]
    if wanted != given:
        raise UserError(f"the other prompt must have as many tokens as the first, {wanted}; got {given}: a patch goes "
                        "position by position")  # fmt: skip
    return found


def _run(network: LoopedModel, samples: Samples, hooks: Iterable[Hook], names: Iterable[str]) -> _Pass:
    """One pass: losses, the next token, the named values, and the start mass as the edit left it."""
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
    logits_BTW, kept = network.run_with_cache(
        tokens_BT, names_filter=list(dict.fromkeys(names)), fwd_hooks=[*hooks, *readers], return_cache_object=False,
        attention="eager", segment_start_BT=start_BT,
    )  # fmt: skip
    logprob_TW = logits_BTW[0].double().log_softmax(-1)
    loss_T = -logprob_TW[:-1].gather(-1, tokens_BT[0, 1:, None])[:, 0]
    mass_L = np.array([mass[step] for step in steps])
    return _Pass(loss_T.cpu().numpy(), logprob_TW[-1].cpu().numpy().copy(), kept, mass_L)


def _next_tokens(network: LoopedModel, last: dict[str, NDArray[np.float64]]) -> DataFrame:
    ids = np.argsort(-np.maximum(last["before"], last[EDITED]), kind="stable")[:TOP]
    names = [network.tokenizer.token_text.label(each) for each in ids.tolist()]
    return DataFrame({"token": names, "id": ids} | {name: chance_W[ids] for name, chance_W in last.items()})


def _token_losses(samples: Samples, passes: dict[str, _Pass]) -> DataFrame:
    frame = DataFrame({"position": np.arange(1, samples.ids_NT.shape[1] + 1), "token": samples.labels(0)})
    for name, found in passes.items():
        frame[name] = np.concatenate([[np.nan], found.loss_T])
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
