"""Which hook names a forward pass computes: asking for another raises instead of staying silent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypedDict, Unpack, get_args

from torch import Tensor

from model.kv_cache import KVCache
from smelt_interp.architecture import Architecture
from smelt_interp.errors import UserError
from smelt_interp.plan import step_index
from smelt_interp.sites import SITES, TOP_LEVEL_SITES, hook_name, nearest, site_of

AttentionPath = Literal["eager", "fast"]
NamePredicate = Callable[[str], bool]
Hook = tuple[str | NamePredicate, Callable[..., Tensor | None]]
NamesFilter = str | Iterable[str] | NamePredicate | None


class PassOptions(TypedDict, total=False):
    """The keyword arguments of every network's `forward`; `model.network.LoopedMoE.forward` says what they mean."""

    segment_start_BT: Tensor | None
    attention_mask_BT: Tensor | None
    attention: AttentionPath
    head_results: bool
    expert_results: bool
    start_at: tuple[int, int] | None
    stop_at: tuple[int, int] | None
    kv_cache: KVCache | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one forward pass of a network is asked to compute."""

    architecture: Architecture
    top_level: tuple[str, ...] = tuple(TOP_LEVEL_SITES)
    """Those of the names outside the steps that the network has."""
    attention: AttentionPath = "eager"
    """`eager` computes scores and patterns; `fast` uses fused attention and has neither."""
    head_results: bool = False
    """Compute `attn.hook_result`, each head's own update."""
    expert_results: bool = False
    """Compute `mlp.hook_expert_result`, each chosen expert's own update."""
    first_step: int = 0
    """The pass starts before this step; 0 with tokens as input is the whole network."""
    stop_step: int
    """The pass ends before this step; the executed depth with `to_logits` is the whole network."""
    from_tokens: bool = True
    to_logits: bool = True

    def __post_init__(self) -> None:
        if self.attention not in get_args(AttentionPath):
            raise UserError(f"attention must be 'eager' or 'fast'; got {self.attention!r}")

    @classmethod
    def of(cls, architecture: Architecture, top_level: tuple[str, ...], **options: Unpack[PassOptions]) -> "Request":
        """What a pass with these options computes. Raises `UserError` for a visit that is not in the plan, and for an
        end before the start."""
        steps = architecture.steps
        start_at, stop_at = options.get("start_at"), options.get("stop_at")
        for visit in (start_at, stop_at):
            if visit is not None and not (isinstance(visit, tuple) and len(visit) == 2):
                raise UserError(f"start_at and stop_at must each be a pair (layer, visit); got {visit!r}")
        first = 0 if start_at is None else step_index(steps, *start_at)
        stop = len(steps) if stop_at is None else step_index(steps, *stop_at)
        if first > stop:
            raise UserError(f"start_at must not lie after stop_at; got {start_at} and {stop_at}")
        return cls(
            architecture=architecture,
            top_level=top_level,
            attention=options.get("attention", "eager"),
            head_results=options.get("head_results", False),
            expert_results=options.get("expert_results", False),
            first_step=first,
            stop_step=stop,
            from_tokens=start_at is None,
            to_logits=stop_at is None,
        )

    def names(self) -> tuple[str, ...]:
        """Every hook name that fires in this pass, in order of the steps."""
        return _names(self)

    def check(self, asked: Iterable[str]) -> None:
        """Raise `UserError` for the first asked name that does not exist, that this network does not compute, or that
        does not fire in this pass."""
        fires = set(self.names())
        for name in asked:
            if name not in fires:
                self._refuse(name)

    def select(self, names: NamesFilter) -> list[str]:
        """The names of this pass that a filter keeps; None keeps all. Raises `UserError` when a name does not exist or
        does not fire, and when a predicate matches none."""
        if names is None:
            return list(self.names())
        if callable(names):
            if not (chosen := [name for name in self.names() if names(name)]):
                raise UserError("a name predicate must match a hook name that this pass computes; it matched none")
            return chosen
        chosen = [names] if isinstance(names, str) else list(names)
        self.check(chosen)
        return chosen

    def _refuse(self, name: object) -> None:
        steps = range(len(self.architecture.steps))
        own = {*self.top_level, *(hook_name(step, suffix) for step in steps for suffix in self.architecture.sites)}
        if name not in {*TOP_LEVEL_SITES, *(hook_name(step, suffix) for step in steps for suffix in SITES)}:
            raise UserError(f"a hook name must be one of the network's; got {name!r}{nearest(str(name), own)}")
        if name not in own:
            raise UserError(
                f"a hook must be on a site that a network of family {self.architecture.family} has; got {name!r}"
            )
        raise UserError(f"a hook must be on a name that this pass computes; got {name!r}; {self._way_out(str(name))}")

    def _way_out(self, name: str) -> str:
        computed = site_of(name).computed
        if computed == "eager" and self.attention != "eager":
            return "pass attention='eager'"
        if computed in ("head_results", "expert_results") and not getattr(self, computed):
            return f"pass {computed}=True"
        return "it lies outside start_at and stop_at"


def hook_list(hooks: Iterable[Hook]) -> list[Hook]:
    """The hooks as a list: an iterator would be used up by the check. Raises `UserError` for what is no pair of a name
    and a function."""
    listed = list(hooks)
    for hook in listed:
        named = isinstance(hook, (tuple, list)) and len(hook) == 2 and (isinstance(hook[0], str) or callable(hook[0]))
        if not (named and callable(hook[1])):
            raise UserError(f"a hook must be a pair of a name and a function; got {str(hook)[:80]!r}")
    return listed


@lru_cache(maxsize=64)
def _names(request: Request) -> tuple[str, ...]:
    """`Request.names`, which a pass asks for once a hook."""
    offered = {
        "always": True,
        "eager": request.attention == "eager",
        "head_results": request.head_results,
        "expert_results": request.expert_results,
    }
    suffixes = [suffix for suffix in request.architecture.sites if offered[SITES[suffix].computed]]
    names = [name for name in request.top_level if name == "hook_embed" and request.from_tokens]
    names += [hook_name(step, suffix) for step in range(request.first_step, request.stop_step) for suffix in suffixes]
    if request.to_logits:
        names += [name for name in request.top_level if name != "hook_embed"]
    return tuple(names)
