"""One pass a patch, many patches a pass: a corrupted run with values of a clean one, at every step and place.

A patch at step s and position p changes nothing before either. So rows are repeated, one for each patch of a chunk;
the pass starts at the patched step from the corrupted run's stream; and it holds the positions from the chunk's first
on alone, with the corrupted run's keys and values before them, up to the position that is scored. Where a network
cannot start at a step the whole pass runs with the rows repeated. A patch of what is there already is not run at all.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.hooks.hook_point import SitePoint
from model.hooks.interventions import head_axis, random_like
from model.hooks.looped_model import LoopedModel
from model.kv_cache import KVCache
from smelt_interp.data.dyck_scores import answer_start
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, hook_name

PRE, KEY, VALUE = "hook_resid_pre", "attn.hook_rot_k", "attn.hook_v"


class Patch(NamedTuple):
    """What is put in at once: positions of each row, in one head or in all."""

    where_BT: NDArray[np.bool_]
    head: int | None = None


class PatchedRuns:
    """Clean and corrupted rows of one batch, and the corrupted run under patches.

    The score is the logit of the clean answer's first token minus that of the corrupted one's, before the answer.
    Raises `UserError` for a site that the network does not compute, or of whole numbers.
    """

    def __init__(self, model: LoopedModel, clean: Samples, corrupted: Samples, sites: Sequence[str]) -> None:
        if whole := [suffix for suffix in sites if SITES[suffix].integer]:
            raise UserError(f"a site to patch must hold real numbers; got {whole[0]}")
        if "head_results" in {SITES[suffix].computed for suffix in sites}:
            raise UserError("heads to patch must be those of a site that every pass has; got attn.hook_result")
        self.model, self.sites, self.steps = model, tuple(sites), range(len(model.plan))
        self.scored_B = answer_start(clean) - 1
        rows = np.arange(len(clean))
        ids_2B = [samples.ids_NT[rows, self.scored_B + 1].astype(np.int64) for samples in (clean, corrupted)]
        self._tokens_2B = torch.from_numpy(np.stack(ids_2B)).to(model.device)
        self.length = int(self.scored_B.max()) + 1
        self._clean = self._run(clean, sites)
        self._corrupted = self._run(corrupted, (*sites, PRE, *((KEY, VALUE) if model.restarts else ())))
        self._rows = corrupted

    def _inputs(self, samples: Samples) -> Tensor:
        return torch.from_numpy(samples.ids_NT[:, : self.length].astype(np.int64)).to(self.model.device)

    @torch.no_grad()
    def _run(self, samples: Samples, suffixes: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        names = [hook_name(step, suffix) for step in self.steps for suffix in dict.fromkeys(suffixes)]
        logits_BTW, cache = self.model.run_with_cache(
            self._inputs(samples), names_filter=names, return_cache_object=False
        )
        return self._score(logits_BTW, 0), cache

    def _score(self, logits_NTW: Tensor, first: int) -> Tensor:
        """The score of each row (N,): N is a multiple of B, positions begin at `first`."""
        num, repeats = len(self.scored_B), len(logits_NTW) // len(self.scored_B)
        at_N = torch.from_numpy(self.scored_B - first).to(logits_NTW.device).repeat(repeats)
        last_NW = logits_NTW[torch.arange(num * repeats, device=at_N.device), at_N]
        of_clean_N, of_corrupted_N = (
            last_NW.gather(1, token_B.repeat(repeats)[:, None])[:, 0] for token_B in self._tokens_2B
        )
        return of_clean_N - of_corrupted_N

    @property
    def clean_B(self) -> Tensor:
        """The score of the clean rows."""
        return self._clean[0]

    @property
    def corrupted_B(self) -> Tensor:
        """The score of the corrupted rows."""
        return self._corrupted[0]

    def values(self, suffix: str, step: int) -> Tensor:
        """What a patch puts in: the clean run's."""
        return self._clean[1][hook_name(step, suffix)]

    def random(self, suffix: str, step: int, rows: NDArray[np.int64], seed: int) -> Tensor:
        """Its null: the corrupted run's, changed as much in a random direction."""
        was = self._corrupted[1][hook_name(step, suffix)]
        keys = "S" in SITES[suffix].axes
        return was + random_like(self.values(suffix, step) - was, was, rows, seed + step, keys=keys)

    @torch.no_grad()
    def scores(self, suffix: str, step: int, given: Tensor, patches: Sequence[Patch], most_rows: int = 256) -> Tensor:
        """The score under each patch, (P, B)."""
        was, axes = self._corrupted[1][hook_name(step, suffix)], SITES[suffix].axes
        differs_BT = (given != was).movedim(axes.index("T"), 1).flatten(2).any(-1).cpu().numpy()
        found_PB = self.corrupted_B.repeat(len(patches), 1)
        # In order of where they begin, so that a chunk leaves out as much as it can; those of no effect are left as is.
        changes_PT = [(patch.where_BT[:, : self.length] & differs_BT).any(0) for patch in patches]
        begins = {p: int(np.flatnonzero(changes_T)[0]) for p, changes_T in enumerate(changes_PT) if changes_T.any()}
        order = sorted(begins, key=lambda p: begins[p])
        size = max(most_rows // len(self.scored_B), 1)
        for at in range(0, len(order), size):
            chunk = order[at : at + size]
            restarts = self.model.restarts and "S" not in axes
            first = min(begins[chunk[0]], int(self.scored_B.min())) if restarts else 0
            found_PB[chunk] = self._chunk(suffix, step, given, [patches[p] for p in chunk], first)
        return found_PB

    def _chunk(self, suffix: str, step: int, given: Tensor, patches: Sequence[Patch], first: int) -> Tensor:
        """Scores of a few patches, none of which changes a position before `first`, (P, B)."""
        axes, repeats = SITES[suffix].axes, len(patches)
        time = axes.index("T")
        given = given.narrow(time, first, self.length - first).repeat(repeats, *[1] * (given.ndim - 1))
        where = self._where(axes, patches, first).to(given.device)

        def put(x: Tensor, hook: object) -> Tensor:
            return torch.where(where, given, x)

        hooks = [(hook_name(step, suffix), put)]
        if not self.model.restarts:
            tokens_NT = self._inputs(self._rows).repeat(repeats, 1)
            logits_NTW = self.model.run_with_hooks(tokens_NT, fwd_hooks=hooks)
        else:
            cache = self._corrupted[1]
            key, value = (
                {s: cache[hook_name(s, kind)].repeat(repeats, 1, 1, 1) for s in self.steps[step:]}
                for kind in (KEY, VALUE)
            )
            rooms = [
                (key[max(s, step)], value[max(s, step)]) for s in self.steps
            ]  # what lies before the patched step is not read
            resid_NTD = cache[hook_name(step, PRE)][:, first:].repeat(repeats, 1, 1)
            layer, visit = self.model.plan[step]
            logits_NTW = self.model.run_with_hooks(
                resid_NTD, fwd_hooks=hooks, start_at=(layer, visit),
                kv_cache=KVCache.holding(rooms, first) if first else None,
            )  # fmt: skip
        return self._score(logits_NTW, first).view(repeats, -1)

    def _where(self, axes: str, patches: Sequence[Patch], first: int) -> Tensor:
        """Where a chunk's values are put in, in the axes of the site, the rows of each patch after the other."""
        where_NT = torch.from_numpy(np.concatenate([patch.where_BT[:, first : self.length] for patch in patches]))
        shape = [len(where_NT), *[1] * (len(axes) - 1)]
        shape[axes.index("T")] = -1
        where = where_NT.reshape(shape)
        if patches[0].head is None:
            return where
        axis = next(axes.index(letter) for letter in "QG" if letter in axes)
        heads = self.model.architecture.num_heads if axes[axis] == "Q" else self.model.architecture.num_kv_heads
        head_N = torch.tensor([patch.head for patch in patches]).repeat_interleave(len(self.scored_B))
        chosen = torch.nn.functional.one_hot(head_N, heads).bool()
        return where & chosen.view(len(where_NT), *[heads if index == axis else 1 for index in range(1, len(axes))])

    def attributions(self, suffixes: Sequence[str]) -> dict[tuple[str, int], Tensor]:
        """Attribution patching: (clean - corrupted) times the score's gradient in the corrupted run, by site and step,
        summed over all axes but B, T and heads. -> (B, T) or (B, T, heads)

        One backward pass; no gradient is left on the weights.
        """
        kept: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: SitePoint) -> Tensor:
            name = str(hook.name)
            kept[name] = x if x.requires_grad else x.detach().requires_grad_()
            return kept[name]

        names = {hook_name(step, suffix): (suffix, step) for step in self.steps for suffix in suffixes}
        with torch.enable_grad():
            logits_BTW = self.model.run_with_hooks(self._inputs(self._rows), fwd_hooks=[(name, keep) for name in names])
            grads = torch.autograd.grad(
                self._score(logits_BTW, 0).sum(), [kept[name] for name in names], allow_unused=True
            )
        found = {}
        for (name, (suffix, step)), grad in zip(names.items(), grads, strict=True):
            change = self._clean[1][name] - self._corrupted[1][name]
            product = torch.nan_to_num(change) * grad if grad is not None else torch.zeros_like(change)
            axis, axes = head_axis(suffix), SITES[suffix].axes
            moved = (
                product.movedim(axes.index("T"), 1) if axis is None or axes.index("T") == 1 else product.transpose(1, 2)
            )
            found[suffix, step] = moved.flatten(2).sum(-1) if axis is None else moved.flatten(3).sum(-1)
        return found
