"""Edits of a pass: what a visit computes is skipped, repeated, swapped, clamped to another visit's, or replaced.

    skip([3])                                           the visit passes its input on
    again(model, [3])                                   it adds what the layer's first visit added
    swap(model, "hook_attn_out", layer=2)               both visits' values exchanged
    clamp(model, "attn.hook_pattern", [3])              it looks where the first visit looked
    clamp(model, "mlp.hook_router_logits", [3])         it goes to the first visit's experts
    zero(Target("attn.hook_z", (3,), heads=(1,)))       likewise `mean`, `resample`
    move_start_mass([3], content)                       what goes to the start goes to content
    put(target, values, where)                          anyone's values: patching
    at_random(edit, seed)                               as large a change in a random direction: the null of any edit

An edit makes hooks, on any `LoopedModel`. What they put in comes from the untouched pass over the same samples, from
that over others, or from means; an edit says which names it reads there. Steps are step indices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.hooks.looped_model import LoopedModel
from model.hooks.names import Hook
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from smelt_interp.plan import label, visits_of
from smelt_interp.sites import SITES, check_suffix, hook_name, site_of

PATTERN, POST, PRE = "attn.hook_pattern", "hook_resid_post", "hook_resid_pre"
SCORES = "attn.hook_attn_scores"
UPDATES = ("hook_attn_out", "hook_mlp_out")
Values = Mapping[str, Tensor]
Change = Callable[[Tensor], Tensor]
Content = Callable[[Samples], NDArray[np.bool_]]
"""Which tokens are content, (B, T)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the hooks of one batch are made from."""

    samples: Samples
    sample_ids: NDArray[np.int64]
    own: Values = field(default_factory=dict)
    """By hook name: the untouched pass over these samples."""
    other: Values = field(default_factory=dict)
    """The untouched pass over other samples, one for each of these."""
    mean: Values = field(default_factory=dict)
    """Means over the tokens of all samples, without the axes of batch and position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of a pass; `changes` are made anew for each batch and work on the values of their site."""

    name: str
    sites: tuple[str, ...]
    """Hook names that are changed."""
    changes: Callable[[Sources], Mapping[str, Change]]
    """For each of them, what becomes of its value; called in the order of the pass."""
    own: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    """Hook names that it reads from each of `Sources`."""

    def __post_init__(self) -> None:
        if not self.sites:
            raise UserError(f"an edit must have at least one step; got none: {self.name}")

    @property
    def names(self) -> tuple[str, ...]:
        """Every hook name that a pass must compute for it."""
        return tuple(dict.fromkeys((*self.sites, *self.own, *self.other, *self.mean)))

    def hooks(self, sources: Sources) -> list[Hook]:
        """The hooks of one batch."""
        return [(name, _as_hook(change)) for name, change in self.changes(sources).items()]


def _as_hook(change: Change) -> Callable[..., Tensor]:
    def hook(x: Tensor, hook: object) -> Tensor:  # transformer-lens hands the point over as `hook`
        return change(x)

    return hook


@dataclass(frozen=True, slots=True)
class Target:
    """Where an edit acts: a site, at some steps, in some heads."""

    suffix: str
    steps: tuple[int, ...]
    heads: tuple[int, ...] = ()
    """Along the site's own axis of heads; empty means all."""

    def __post_init__(self) -> None:
        check_suffix(self.suffix)
        if not self.steps:
            raise UserError("an edit must have at least one step; got none")
        if self.heads and head_axis(self.suffix) is None:
            raise UserError(f"heads must be those of a site that has some; got {self.suffix}")

    @property
    def names(self) -> tuple[str, ...]:
        """Its hook names."""
        return tuple(hook_name(step, self.suffix) for step in self.steps)

    def mix(self, x: Tensor, new: Tensor) -> Tensor:
        """`new` in the heads of the target, `x` elsewhere."""
        axis = head_axis(self.suffix)
        if not self.heads or axis is None:
            return new
        if outside := [head for head in self.heads if not 0 <= head < x.shape[axis]]:
            raise UserError(f"heads of {self.suffix} must be 0 to {x.shape[axis] - 1}; got {outside[0]}")
        chosen = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
        chosen[list(self.heads)] = True
        return torch.where(chosen.view(-1, *[1] * (x.ndim - 1 - axis)), new, x)


def head_axis(suffix: str) -> int | None:
    """Which axis of a site holds heads; None where there are none."""
    axes = SITES[suffix].axes
    return next((axes.index(letter) for letter in "QG" if letter in axes), None)


# Ablation


def zero(target: Target) -> Edit:
    """Zeros. Raises `UserError` for a site of whole numbers."""
    _refuse_integers(target.suffix, "set to 0")
    return _replaced("zero", target, lambda x, sources, name: torch.zeros_like(x))


def mean(target: Target) -> Edit:
    """The mean over the tokens of all samples. Raises `UserError` for whole numbers, and for scores and patterns, whose
    keys are other tokens at each query."""
    _refuse_integers(target.suffix, "set to a mean")
    if "S" in SITES[target.suffix].axes:
        raise UserError(f"a mean must be taken of a site without an axis of keys; got {target.suffix}: use resample")

    def new(x: Tensor, sources: Sources, name: str) -> Tensor:
        return sources.mean[name].to(x).expand_as(x)

    return _replaced("mean", target, new, mean=target.names)


def resample(target: Target) -> Edit:
    """What another sample has at the same position."""
    return _replaced("resample", target, lambda x, sources, name: sources.other[name].to(x), other=target.names)


def _replaced(
    name: str, target: Target, new: Callable[[Tensor, Sources, str], Tensor], **reads: tuple[str, ...]
) -> Edit:
    """An edit that puts `new(x, sources, hook name)` into the heads of a target."""

    def changes(sources: Sources) -> Mapping[str, Change]:
        def put_in(x: Tensor, at: str) -> Tensor:
            found = new(x, sources, at)
            if target.suffix == SCORES:  # what a query may not look at stays unseen
                found = torch.where(x == -torch.inf, x, found)
            return target.mix(x, found)

        def change(at: str) -> Change:
            return lambda x: put_in(x, at)

        return {at: change(at) for at in target.names}

    return Edit(name=name, sites=target.names, changes=changes, **reads)


def _refuse_integers(suffix: str, what: str) -> None:
    if SITES[suffix].integer:
        raise UserError(f"a site of whole numbers must not be {what}; got {suffix}: clamp or resample it")


# Visits


def skip(steps: Sequence[int]) -> Edit:
    """These visits pass the stream on as it came."""

    def changes(sources: Sources) -> Mapping[str, Change]:
        came: dict[int, Tensor] = {}
        found: dict[str, Change] = {}

        def keep(step: int) -> Change:
            def kept(x: Tensor) -> Tensor:
                came[step] = x
                return x

            return kept

        def passed_on(step: int) -> Change:
            return lambda x: came.pop(step)

        for step in steps:
            found[hook_name(step, PRE)], found[hook_name(step, POST)] = keep(step), passed_on(step)
        return found

    return Edit(name="skip", sites=tuple(hook_name(s, site) for s in steps for site in (PRE, POST)), changes=changes)


def again(model: LoopedModel, steps: Sequence[int]) -> Edit:
    """These visits add what their layer's first visit added in the untouched pass."""
    sources = {at: first for suffix in UPDATES for at, first in _first_visits(model, suffix, steps).items()}
    return _copied("again", sources)


def swap(
    model: LoopedModel, suffix: str, *, layer: int, visits: tuple[int, int] = (0, 1), heads: tuple[int, ...] = ()
) -> Edit:
    """Each of two visits of a layer has what the other has in the untouched pass."""
    one, two = (hook_name(model.step(layer, visit), suffix) for visit in visits)
    return _copied("swap", {one: two, two: one}, heads)


def clamp(model: LoopedModel, suffix: str, steps: Sequence[int], heads: tuple[int, ...] = ()) -> Edit:
    """These visits have what their layer's first visit has in the untouched pass."""
    return _copied("clamp", _first_visits(model, suffix, steps), heads)


def _first_visits(model: LoopedModel, suffix: str, steps: Sequence[int]) -> dict[str, str]:
    """Hook names of a site at some steps, and those at the first visits of their layers."""
    plan = model.plan
    for step in steps:
        if not 0 <= step < len(plan) or plan[step].visit == 0:
            where = label(plan[step]) if 0 <= step < len(plan) else f"step {step} of {len(plan)}"
            raise UserError(f"a step must be a later visit of its layer to be given the first one's; got {where}")
    return {hook_name(s, suffix): hook_name(visits_of(plan, plan[s].layer)[0], suffix) for s in steps}


def _copied(name: str, sources: Mapping[str, str], heads: tuple[int, ...] = ()) -> Edit:
    """Each name has what another has in the untouched pass, in the given heads or all."""

    def changes(found: Sources) -> Mapping[str, Change]:
        def change(at: str, source: str) -> Change:
            _, step, suffix = at.split(".", 2)
            target = Target(suffix, (int(step),), heads)
            return lambda x: target.mix(x, found.own[source].to(x))

        return {at: change(at, source) for at, source in sources.items()}

    return Edit(name=name, sites=tuple(sources), changes=changes, own=tuple(dict.fromkeys(sources.values())))


# Attention


def move_start_mass(steps: Sequence[int], content: Content, heads: tuple[int, ...] = ()) -> Edit:
    """What each query gives to its segment's start goes to the content that it sees, in proportion to what that has.

    Rows keep their sums. The start's own row, and rows that give nothing to content, stay as they are.
    """

    def new(x_BQTS: Tensor, sources: Sources, name: str) -> Tensor:
        device, keys = x_BQTS.device, x_BQTS.shape[-1]
        start_BT1 = torch.from_numpy(sources.samples.segment_start_NT.astype(np.int64)).to(device)[..., None]
        is_start_BTS = torch.arange(keys, device=device) == start_BT1
        content_BS = torch.from_numpy(np.array(content(sources.samples))).to(device)
        _require_places(content_BS, (len(x_BQTS), keys))
        to_content_BQTS = x_BQTS * (content_BS[:, None] & ~is_start_BTS)[:, None]
        total_BQT1 = to_content_BQTS.sum(-1, keepdim=True)
        start_BQT1 = (x_BQTS * is_start_BTS[:, None]).sum(-1, keepdim=True)
        own_T1 = torch.arange(x_BQTS.shape[2], device=device)[:, None]
        moves_BQT1 = (total_BQT1 > 0) & (start_BT1 < own_T1)[:, None]
        moved_BQTS = x_BQTS * ~is_start_BTS[:, None] + to_content_BQTS * (start_BQT1 / total_BQT1)
        return torch.where(moves_BQT1, moved_BQTS, x_BQTS)

    return _replaced("move start mass", Target(PATTERN, tuple(steps), heads), new)


# Patching and its null


def put(target: Target, values: Values, where_BT: Tensor | None = None) -> Edit:
    """Given values, by hook name: everywhere, or at the query positions that are True."""

    def new(x: Tensor, sources: Sources, name: str) -> Tensor:
        if name not in values:
            raise UserError(f"values to put must be those of every site of the target; got none of {name!r}")
        given = values[name].to(x)
        if where_BT is None:
            return given
        axis = SITES[target.suffix].axes.index("T")
        _require_places(where_BT, (x.shape[0], x.shape[axis]))
        chosen = where_BT.view(*where_BT.shape[:1], *[1] * (axis - 1), -1, *[1] * (x.ndim - 1 - axis))
        return torch.where(chosen.to(x.device), given, x)

    return _replaced("put", target, new)


def _require_places(where_BT: Tensor, shape: tuple[int, int]) -> None:
    """Raise `UserError` for places that are not those of the tokens."""
    if tuple(where_BT.shape) != shape:
        raise UserError(f"places must be given for each token, {shape}; got shape {tuple(where_BT.shape)}")


def together(name: str, edits: Sequence[Edit]) -> Edit:
    """Several edits of different sites as one. Raises `UserError` for a site that two of them change."""
    sites = [site for edit in edits for site in edit.sites]
    if twice := [site for site in sites if sites.count(site) > 1]:
        raise UserError(f"edits of one pass must change different sites; got {twice[0]!r} twice")

    def changes(sources: Sources) -> Mapping[str, Change]:
        return {site: change for edit in edits for site, change in edit.changes(sources).items()}

    own, other, means = (
        tuple(dict.fromkeys(each for edit in edits for each in getattr(edit, kind)))
        for kind in ("own", "other", "mean")
    )
    return Edit(name=name, sites=tuple(sites), changes=changes, own=own, other=other, mean=means)


def at_random(edit: Edit, seed: int = 0) -> Edit:
    """As large a change as an edit makes in each vector of its sites, in a random direction drawn by sample.

    A vector is the site's last axis. Of a pattern, the direction leaves out keys that the query does not see, and keeps
    the row's sum. Raises `UserError` for a site of whole numbers.
    """
    for name in edit.sites:
        if site_of(name).integer:
            raise UserError(f"a random direction must be one of real numbers; got {name!r}")

    def changes(sources: Sources) -> Mapping[str, Change]:
        def change(name: str, own: Change) -> Change:
            keys, of_site = "S" in site_of(name).axes, seed + crc32(name.encode())
            return lambda x: x + random_like(own(x) - x, x, sources.sample_ids, of_site, keys=keys)

        return {name: change(name, own) for name, own in edit.changes(sources).items()}

    return Edit(name=f"{edit.name}, random", sites=edit.sites, changes=changes, own=edit.own, other=edit.other,
                mean=edit.mean)  # fmt: skip


def random_like(change: Tensor, x: Tensor, sample_ids: NDArray[np.int64], seed: int, *, keys: bool) -> Tensor:
    """Random vectors along the last axis, as long as those of `change`, the same for a sample in any batch.

    With `keys` the last axis is that of keys: only those that hold something move, and their sum stays.
    """
    drawn = torch.empty(x.shape, dtype=torch.float32)
    for row, sample in enumerate(sample_ids.tolist()):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + sample) % 2**63)
        drawn[row] = torch.randn(x.shape[1:], generator=generator)
    change = torch.nan_to_num(change.float(), nan=0.0, posinf=0.0, neginf=0.0)  # scores of keys that are not seen
    drawn = drawn.to(x.device)
    if keys:
        seen = ((x != 0) & x.isfinite()).float()
        drawn = (drawn - (drawn * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)) * seen
    length = drawn.norm(dim=-1, keepdim=True)
    scaled = drawn * (change.norm(dim=-1, keepdim=True) / torch.where(length > 0, length, 1.0))
    return torch.where(length > 0, scaled, 0.0).to(x.dtype)
