"""One pass a patch, many patches a pass: a corrupted run with values of a clean one, at every step and place.

A patch at step s and position p changes nothing before either. So patches are run in chunks, in order of where they
begin: at each step the rows of the patches made there join, from the corrupted run's stream, and all go on together;
they hold the positions from the chunk's first on alone, with the corrupted run's keys and values before them, up to the
position that is scored. Where a network cannot start at a step the whole pass runs with the rows repeated. A patch of
what is there already is not run at all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.hooks.hook_point import SitePoint
from model.hooks.interventions import head_axis, random_like
from model.hooks.looped_model import LoopedModel
from model.hooks.names import AttentionPath
from model.kv_cache import KVCache
from smelt_interp.data.dyck_scores import answer_start
from smelt_interp.data.samples import Samples
from smelt_interp.sites import SITES, hook_name

PRE, KEY, VALUE = "hook_resid_pre", "attn.hook_rot_k", "attn.hook_v"
PLAIN_KEY = "attn.hook_k"
"""What stands for it in a network that rotates no keys."""


class Patch(NamedTuple):
    """What is put in at once: positions of each row, in one head or in all."""

    where_BT: NDArray[np.bool_]
    head: int | None = None


class PatchedRuns:
    """Clean and corrupted rows of one batch, and the corrupted run under patches.

    The score is the logit of the clean answer's first token minus that of the corrupted one's, before the answer.
    Raises `UserError` for a site that the network does not compute; that sites can be patched is for the caller to see.
    """

    def __init__(self, model: LoopedModel, clean: Samples, corrupted: Samples, sites: Sequence[str]) -> None:
        self.model, self.sites, self.steps = model, tuple(sites), range(len(model.plan))
        self.scored_B = answer_start(clean) - 1
        rows = np.arange(len(clean))
        ids_2B = [samples.ids_NT[rows, self.scored_B + 1].astype(np.int64) for samples in (clean, corrupted)]
        self._tokens_2B = torch.from_numpy(np.stack(ids_2B)).to(model.device)
        self.length = int(self.scored_B.max()) + 1
        self._clean = self._run(clean, sites)
        self._key = KEY if KEY in model.architecture.sites else PLAIN_KEY
        self._corrupted = self._run(corrupted, (*sites, PRE, *((self._key, VALUE) if model.restarts else ())))
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
    def scores(
        self, suffix: str, given: Mapping[int, Tensor], patches: Sequence[Patch], most_rows: int = 192
    ) -> Tensor:
        """The score under each patch with the values of each step in `given`, (L, P, B)."""
        found_LPB = self.corrupted_B.repeat(len(given), len(patches), 1)
        # Where each changes anything first; those that change nothing are left as they are.
        begins: dict[tuple[int, int], int] = {}
        for step, value in given.items():
            differs = (value != self._corrupted[1][hook_name(step, suffix)]).movedim(SITES[suffix].axes.index("T"), 1)
            differs_BT = differs.flatten(2).any(-1).cpu().numpy()
            for p, patch in enumerate(patches):
                if (changes_T := (patch.where_BT[:, : self.length] & differs_BT).any(0)).any():
                    begins[step, p] = int(changes_T.argmax())
        # In order of where they begin, so that a chunk leaves out as many positions as it can.
        order = sorted(begins, key=lambda each: begins[each])
        size, rows = max(most_rows // len(self.scored_B), 1), {step: at for at, step in enumerate(given)}
        for start in range(0, len(order), size):
            chunk = sorted(order[start : start + size])
            restarts = self.model.restarts and "S" not in SITES[suffix].axes
            first = min(begins[order[start]], int(self.scored_B.min())) if restarts else 0
            made: dict[int, list[Patch]] = {step: [] for step, _ in chunk}
            for step, p in chunk:
                made[step].append(patches[p])
            found_LPB[[rows[step] for step, _ in chunk], [p for _, p in chunk]] = self._chunk(
                suffix, given, made, first
            )
        return found_LPB

    def _chunk(
        self, suffix: str, given: Mapping[int, Tensor], made: Mapping[int, Sequence[Patch]], first: int
    ) -> Tensor:
        """Scores of the patches made at each step, none of which changes a position before `first`, (P, B)."""
        num, cache, plan = len(self.scored_B), self._corrupted[1], self.model.plan
        edits, stop = {}, 0
        for step, patches in made.items():
            start, stop = stop, stop + len(patches) * num
            edits[step] = self._edit(suffix, given[step], patches, first, (start, stop))
        if not self.model.restarts:
            hooks = [(hook_name(step, suffix), edit) for step, edit in edits.items()]
            tokens_NT = self._inputs(self._rows).repeat(stop // num, 1)
            return self._score(self.model.run_with_hooks(tokens_NT, fwd_hooks=hooks), first).view(-1, num)
        attention: AttentionPath = "eager" if SITES[suffix].computed == "eager" else "fast"
        out = cache[hook_name(0, PRE)][:0, first:]
        for step in self.steps[min(made) :]:
            # The rows of this step's patches join; keys and values before `first` are those of the corrupted run.
            out = torch.cat((out, cache[hook_name(step, PRE)][:, first:].repeat(len(made.get(step, ())), 1, 1)))
            hooks = [(hook_name(step, suffix), edits[step])] if step in edits else []
            if hooks and suffix == PRE:  # what goes in is the site: no hook is needed
                out, hooks = edits[step](out, None), []
            key, value = (cache[hook_name(step, kind)].repeat(len(out) // num, 1, 1, 1) for kind in (self._key, VALUE))
            out = self.model.run_with_hooks(
                out, fwd_hooks=hooks, attention=attention,
                start_at=plan[step], stop_at=plan[step + 1] if step + 1 < len(plan) else None,
                kv_cache=KVCache.holding([(key, value)] * len(plan), first) if first else None,
            )  # fmt: skip
        return self._score(out, first).view(-1, num)

    def _edit(
        self, suffix: str, given: Tensor, patches: Sequence[Patch], first: int, rows: tuple[int, int]
    ) -> Callable[[Tensor, object], Tensor]:
        """A hook that puts given values into some rows of a chunk: those of these patches."""
        start, stop = rows
        given = given.narrow(SITES[suffix].axes.index("T"), first, self.length - first)
        given = given.repeat(len(patches), *[1] * (given.ndim - 1))
        where = self._where(SITES[suffix].axes, patches, first).to(given.device)

        def put(x: Tensor, hook: object) -> Tensor:
            return torch.cat((x[:start], torch.where(where, given, x[start:stop]), x[stop:]))

        return put

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
