"""Which hook names a forward pass computes: asking for another raises instead of staying silent."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, TOP_LEVEL_SITES, hook_name, nearest, site_of

AttentionPath = Literal["eager", "fast"]
NamePredicate = Callable[[str], bool]
Hook = tuple[str | NamePredicate, Callable[..., Tensor | None]]
NamesFilter = str | Sequence[str] | NamePredicate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one forward pass is asked to compute."""

    attention: AttentionPath
    """`eager` computes scores and patterns; `fast` uses fused attention and has neither."""
    head_results: bool
    """Compute `attn.hook_result`, each head's own update."""
    expert_results: bool
    """Compute `mlp.hook_expert_result`, each chosen expert's own update."""
    first_step: int
    """The pass starts before this step; 0 with tokens as input is the whole network."""
    stop_step: int
    """The pass ends before this step; the executed depth with `to_logits` is the whole network."""
    from_tokens: bool
    to_logits: bool

    def __post_init__(self) -> None:
        if self.attention not in get_args(AttentionPath):
            raise UserError(f"attention must be 'eager' or 'fast'; got {self.attention!r}")

    def names(self) -> tuple[str, ...]:
        """Every hook name that fires in this pass, in order of the steps."""
        offered = {
            "always": True,
            "eager": self.attention == "eager",
            "head_results": self.head_results,
            "expert_results": self.expert_results,
        }
        names = ["hook_embed"] if self.from_tokens else []
        for step in range(self.first_step, self.stop_step):
            names += [hook_name(step, suffix) for suffix, site in SITES.items() if offered[site.computed]]
        if self.to_logits:
            names += [name for name in TOP_LEVEL_SITES if name != "hook_embed"]
        return tuple(names)

    def check(self, asked: Iterable[str], known: Iterable[str]) -> None:
        """Raise `UserError` for the first asked name that does not exist or does not fire in this pass."""
        fires, known = set(self.names()), set(known)
        for name in asked:
            if name not in known:
                raise UserError(f"a hook name must be one of the network's; got {name!r}{nearest(str(name), known)}")
            if name not in fires:
                raise UserError(
                    f"a hook must be on a name that this pass computes; got {name!r}; {self._way_out(name)}"
                )

    def select(self, names: NamesFilter, known: Iterable[str]) -> list[str]:
        """The names of this pass that a filter keeps; None keeps all. Raises `UserError` when a name does not exist or
        does not fire, and when a predicate matches none."""
        if names is None:
            return list(self.names())
        if callable(names):
            if not (chosen := [name for name in self.names() if names(name)]):
                raise UserError("a name predicate must match a hook name that this pass computes; it matched none")
            return chosen
        chosen = [names] if isinstance(names, str) else list(names)
        self.check(chosen, known)
        return chosen

    def _way_out(self, name: str) -> str:
        computed = site_of(name).computed
        if computed == "eager" and self.attention != "eager":
            return "pass attention='eager'"
        if computed in ("head_results", "expert_results") and not getattr(self, computed):
            return f"pass {computed}=True"
        return "it lies outside start_at and stop_at"
