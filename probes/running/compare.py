"""A network on samples as it is and under edits, and what the edits do to a score, paired by sample.

    compare(model, samples, {"skip visit 2": skip([6])}, loss).table

Every edited pass starts before the first step that it changes, where the network can; what an edit reads of the
untouched pass, of other samples and of means is run once for all edits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.selection import check_batch_size
from model.hooks.interventions import Edit, Sources
from model.hooks.looped_model import LoopedModel
from model.hooks.names import PassOptions
from model.inputs import sample_inputs
from probes.statistics.bootstrap import interval, weights
from smelt_interp.data.dyck_scores import answer_loss, teacher_forced
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from smelt_interp.sites import hook_name, site_of

if TYPE_CHECKING:
    from pandas import DataFrame

Score = Callable[[Samples, Tensor], Tensor]
"""score(samples, logits_BTW): one number a sample, (B,)."""
PRE = "hook_resid_pre"

# Scores


def loss(samples: Samples, logits_BTW: Tensor) -> Tensor:
    """Nats a token: the mean over the tokens that follow another of their document. -> (B,)"""
    start_BT = samples.segment_start_NT
    counts = np.arange(1, start_BT.shape[1]) < samples.length_N[:, None]
    counts_BT = torch.from_numpy(counts & (start_BT[:, 1:] == start_BT[:, :-1])).to(logits_BTW.device)
    loss_BT = -_logprob(samples, logits_BTW)[:, :-1]
    return (loss_BT * counts_BT).sum(-1) / counts_BT.sum(-1)


def dyck_loss(samples: Samples, logits_BTW: Tensor) -> Tensor:
    """Nats a token of a Dyck answer, newline included. -> (B,)"""
    return torch.from_numpy(answer_loss(samples, _logprob(samples, logits_BTW).cpu().numpy()))


def exact_match(samples: Samples, logits_BTW: Tensor) -> Tensor:
    """1 where every token of a Dyck answer, newline included, is the most likely one. -> (B,)"""
    right_B = teacher_forced(samples, logits_BTW.argmax(-1).cpu().numpy(), newline=True)
    return torch.from_numpy(right_B.astype(np.float64))


def _logprob(samples: Samples, logits_BTW: Tensor) -> Tensor:
    """log p of the token after each position, (B, T); of no meaning at the last."""
    next_BT = torch.from_numpy(np.roll(samples.ids_NT, -1, axis=1).astype(np.int64)).to(logits_BTW.device)
    return logits_BTW.double().log_softmax(-1).gather(-1, next_BT[..., None])[..., 0]


# Passes


class EditedPasses:
    """A network on samples, some rows at a time, as it is and under each edit.

    Raises `UserError` for a site that the network does not compute.
    """

    def __init__(self, model: LoopedModel, samples: Samples, edits: Mapping[str, Edit], *, batch_size: int = 8) -> None:
        if "" in edits:
            raise UserError("an edit must have a name; got an empty one, which is that of the network as it is")
        self.model, self.samples, self.edits = model, samples, edits
        asked = [name for edit in edits.values() for name in edit.names]
        model.request(head_results=True, expert_results=True).check(asked)
        computed = {site_of(name).computed for name in asked}
        self._options: PassOptions = {
            "head_results": "head_results" in computed,
            "expert_results": "expert_results" in computed,
        }
        if samples.num_documents < 2 and any(edit.other for edit in edits.values()):
            raise UserError("samples to resample from must be of 2 documents or more, as one has no other; "
                            f"got {samples.num_documents}: give more samples, or edit otherwise")  # fmt: skip
        self._first = {name: self._first_step(edit) for name, edit in edits.items()}
        self._other_N = _others(samples)
        self._mean = self._means(batch_size)

    def scores(self, rows: NDArray[np.int64], scores: Mapping[str, Score]) -> dict[str, NDArray[np.float64]]:
        """Each score of these rows under each edit, and under "" as the network is: (B, scores)."""
        samples = self.samples.rows(rows)
        own_names = [name for edit in self.edits.values() for name in edit.own]
        own_names += [hook_name(step, PRE) for step in self._first.values() if step]
        other_names = [name for edit in self.edits.values() for name in edit.other]
        logits_BTW, own = self._run(samples, own_names)
        other = self._run(self.samples.rows(self._other_N[rows]), other_names)[1] if other_names else {}
        sources = Sources(samples=samples, sample_ids=rows, own=own, other=other, mean=self._mean)
        found = {"": _scored(samples, logits_BTW, scores)}
        for name, edit in self.edits.items():
            found[name] = _scored(samples, self._edited(edit, sources, self._first[name]), scores)
        return found

    def _first_step(self, edit: Edit) -> int:
        """The first step that an edit changes, where the network can start there; 0 is the whole pass."""
        steps = [int(name.split(".")[1]) for name in edit.sites if name.startswith("blocks.")]
        return min(steps) if self.model.restarts and len(steps) == len(edit.sites) else 0

    @torch.no_grad()
    def _run(self, samples: Samples, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Logits, and what the named points saw."""
        tokens_BT, options = self._inputs(samples)
        return self.model.run_with_cache(
            tokens_BT, names_filter=list(dict.fromkeys(names)), return_cache_object=False, **options
        )

    @torch.no_grad()
    def _edited(self, edit: Edit, sources: Sources, first: int) -> Tensor:
        """Logits under an edit."""
        tokens_BT, options = self._inputs(sources.samples)
        hooks = edit.hooks(sources)
        if not first:
            return self.model.run_with_hooks(tokens_BT, fwd_hooks=hooks, **options)
        layer, visit = self.model.plan[first]
        options["start_at"] = layer, visit
        return self.model.run_with_hooks(sources.own[hook_name(first, PRE)], fwd_hooks=hooks, **options)

    def _inputs(self, samples: Samples) -> tuple[Tensor, PassOptions]:
        tokens_BT, options = sample_inputs(samples, self.model.architecture, self.model.device)
        return tokens_BT, {**options, **self._options}

    def _means(self, batch_size: int) -> dict[str, Tensor]:
        """Means over all tokens of all samples, in float64."""
        names = list(dict.fromkeys(name for edit in self.edits.values() for name in edit.mean))
        sums: dict[str, Tensor] = {}
        for first in range(0, len(self.samples) if names else 0, batch_size):
            samples = self.samples.rows(slice(first, first + batch_size))
            is_token_BT = torch.from_numpy(np.arange(samples.ids_NT.shape[1]) < samples.length_N[:, None])
            for name, x in self._run(samples, names)[1].items():
                sums[name] = sums.get(name, 0.0) + x[is_token_BT.to(x.device)].double().sum(0)
        return {name: total / int(self.samples.length_N.sum()) for name, total in sums.items()}


def _scored(samples: Samples, logits_BTW: Tensor, scores: Mapping[str, Score]) -> NDArray[np.float64]:
    found = [np.asarray(score(samples, logits_BTW).cpu().numpy(), np.float64) for score in scores.values()]
    if wrong := [each.shape for each in found if each.shape != (len(samples),)]:
        raise UserError(f"a score must be one number a sample, ({len(samples)},); got shape {wrong[0]}")
    return np.stack(found, -1)


def _others(samples: Samples) -> NDArray[np.int64]:
    """For each row one of another document where there is one, as long as it or nearly so. -> (N,)"""
    order_N = np.lexsort((np.arange(len(samples)), samples.length_N))
    other_N = np.zeros(len(samples), np.int64)
    for place, row in enumerate(order_N):
        after = (order_N[(place + by) % len(samples)] for by in range(1, len(samples) + 1))
        other_N[row] = next((each for each in after if samples.document_N[each] != samples.document_N[row]), row)
    return other_N


# Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A score under each edit, beside the network as it is."""

    table: "DataFrame"
    """One row an edit: the mean score with it and without, the mean difference with its 95% interval over documents."""
    by_sample: "DataFrame"
    """One row a sample: its document, its score as the network is (`unedited`) and under each edit."""


def compare(
    model: LoopedModel, samples: Samples, edits: Mapping[str, Edit], score: Score, *, batch_size: int = 8, seed: int = 0
) -> Comparison:
    """What edits do to a score, paired by sample. Raises `UserError` for a site that the network does not compute."""
    from pandas import DataFrame

    if not (edits and len(samples)):
        raise UserError(f"edits and samples must be at least one; got {len(edits)} and {len(samples)}")
    check_batch_size(batch_size)
    passes = EditedPasses(model, samples, edits, batch_size=batch_size)
    found = [passes.scores(rows, {"score": score})
             for rows in np.split(np.arange(len(samples)), range(batch_size, len(samples), batch_size))]  # fmt: skip
    score_N = {name: np.concatenate([each[name][:, 0] for each in found]) for name in ("", *edits)}
    weight_RN = weights(seed, samples.document_N)
    rows = []
    for name in edits:
        effect_N = score_N[name] - score_N[""]
        with np.errstate(invalid="ignore"):
            effect = interval(weight_RN @ effect_N / weight_RN.sum(1), samples.num_documents)
        rows.append({"edit": name, "unedited": score_N[""].mean(), "edited": score_N[name].mean(),
                     "effect": effect.value, "low": effect.low, "high": effect.high, "n": effect.n})  # fmt: skip
    about = {"sample": np.arange(len(samples)), "document": samples.document_N, "unedited": score_N.pop("")}
    return Comparison(table=DataFrame(rows), by_sample=DataFrame({**about, **score_N}))
