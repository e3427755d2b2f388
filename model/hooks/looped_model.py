"""What every hooked network shares: a plan whose steps are transformer-lens's layers, hooks, caches, names, one lock.

A child hands its `Architecture` and its tokenizer over, makes `blocks`, one module of `SitePoint`s a step, and whatever
else it needs, calls `setup()`, and writes `forward` and `cfg`. Nothing here knows how a pass is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Literal, Protocol, Self, Unpack

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from transformer_lens import HookedRootModule
from transformer_lens.config import TransformerLensConfig
from transformer_lens.hook_points import HookPoint

from model.hooks.activation_cache import VisitCache, caching_hooks
from model.hooks.hook_point import SitePoint
from model.hooks.lock import Lock
from model.hooks.names import Hook, NamePredicate, NamesFilter, PassOptions, Request, hook_list
from model.losses import next_token_loss
from model.text import to_single_token, to_str_tokens, to_string, to_tokens
from smelt_interp.architecture import MOST_STEPS, Architecture
from smelt_interp.data.tokenizer import ByteTokenizer, Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, step_index
from smelt_interp.sites import TOP_LEVEL_SITES, hook_name
from smelt_interp.validation import validated

LoopScale = float | Literal["kept", "1/r"]
"""The loop factor of a network with another number of visits: a number, the one it has, or one over that number."""


@validated
class Repetition:
    """How often a loop runs, and the factor on its updates."""

    num_visits: Annotated[int, Field(ge=1, le=MOST_STEPS)]
    loop_scale: Literal["kept", "1/r"] | Annotated[float, Field(gt=0, le=1)]

    def factor(self, kept: float) -> float:
        """The factor itself, of a network that has `kept`."""
        if self.loop_scale == "1/r":
            return 1 / self.num_visits
        return kept if self.loop_scale == "kept" else self.loop_scale


class Weighted(Protocol):
    """A module with a weight."""

    @property
    def weight(self) -> Tensor:
        """The weight."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """What the module makes of its input."""
        ...


class LoopedModel(HookedRootModule):
    """A network that runs its layers in the order of a plan. Calls from several threads run one after the other."""

    blocks: nn.ModuleList
    """Step s of the plan is `blocks[s]`; its hook points are those of `architecture.sites`."""
    embed: Weighted
    """Weight (W, D)."""
    ln_final: Weighted
    """Weight (D,), the gain."""
    unembed: Weighted
    """Weight (W, D)."""
    overwrites = True
    """Whether the network's own code may write over a value that a hook point has seen."""
    restarts = False
    """Whether a pass may start at a step (`start_at`), from the residual stream alone."""

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.architecture = architecture
        self._tokenizer = tokenizer
        self.lock = Lock()

    def setup(self) -> None:
        """transformer-lens's method, to be called when all modules are made: names the hook points and lists them."""
        # transformer-lens lists and names every module: a layer replaced later would live on in the list, and a module
        # of someone else's network may have a name of its own.
        self.hook_dict = {name: module for name, module in self.named_modules() if isinstance(module, HookPoint)}
        self.mod_dict = self.hook_dict
        self._hook_tables = [
            table
            for point in self.hook_dict.values()
            for table in (
                point._forward_hooks,
                point._forward_pre_hooks,
                point._backward_hooks,
                point._backward_pre_hooks,
            )
        ]
        for name, point in self.hook_dict.items():
            point.name = name
        self._listed_blocks = tuple(self.blocks)
        steps = range(len(self.plan))
        expected = {hook_name(step, suffix) for step in steps for suffix in self.architecture.sites}
        if wrong := expected ^ {name for name in self.hook_dict if name not in TOP_LEVEL_SITES}:
            raise TypeError(f"hook points must be those of architecture.sites at every step; differing: {min(wrong)}")
        if unchecked := [name for name, point in self.hook_dict.items() if not isinstance(point, SitePoint)]:
            raise TypeError(f"hook points must be SitePoints; {unchecked[0]} is none")

    @property
    def plan(self) -> Plan:
        """Every layer execution, in order."""
        return self.architecture.steps

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    def step(self, layer: int, visit: int) -> int:
        """The step index of a visit. Raises `UserError` when the layer has no such visit."""
        return step_index(self.plan, layer, visit)

    def with_visits(self, num_visits: int, *, loop_scale: LoopScale = "kept") -> Self:
        """A network that runs its loop `num_visits` times with these very parameters, and has hooks of its own.

        Raises `UserError` where the number of visits is fixed by the network's own code, and where there is no loop.
        """
        raise UserError(
            f"visits must be those that the code of family {self.architecture.family} runs; got another number: "
            "with_visits takes our networks and those opened with --loop"
        )

    def layer_modules(self) -> list[nn.Module]:
        """The modules whose calls, one after the other, are the steps of a pass."""
        return list(self.get_submodule("layers").children())

    @property
    def halting(self) -> nn.Module | None:
        """The gate that is called once a visit, if the network has one."""
        return None

    def stops(self, gates: Tensor) -> Tensor:
        """The chance with which a token stops after each visit (V, B, T), of what the gate gave; chances add up."""
        return gates

    # Running

    def __call__(self, inputs: Tensor, **options: Unpack[PassOptions]) -> Tensor:
        with self.lock:  # around the module's own hooks too
            if self.hooked():
                self.check_hooks(self.request(**options))
            out: Tensor = super().__call__(inputs, **options)
            return out

    def request(self, **options: Unpack[PassOptions]) -> Request:
        """What a pass with these options computes."""
        top_level = tuple(name for name in TOP_LEVEL_SITES if name in self.hook_dict)
        return Request.of(self.architecture, top_level, **options)

    def hooked(self) -> list[str]:
        """The names that have a hook, set by transformer-lens's methods or by torch's."""
        points = self._points()
        # Nearly always there is none, and each token that is generated asks.
        return [name for name, point in points.items() if point.is_hooked] if any(self._hook_tables) else []

    def check_hooks(self, request: Request) -> None:
        """Raise `UserError` when a hook is set that the pass would not run: on a name that it does not compute, or
        where compiled code would run, which takes hooks away in silence."""
        if not (hooked := self.hooked()):
            return
        if get_eval_frame_callback():
            self.refuse_hooks("a compiled network")
        for module in self._compiled_modules():
            self.refuse_hooks(f"a network with {module} compiled")
        request.check(hooked)

    def refuse_hooks(self, what: str) -> None:
        """Raise `UserError` when any hook is set."""
        if hooked := self.hooked():
            raise UserError(f"{what} must run without hooks; got one on {hooked[0]!r}; call the network uncompiled")

    def _compiled_modules(self) -> Iterator[str]:
        """Modules of this network that were compiled in place, wrapped, or given a compiled `forward`."""
        for name, module in self.parts():
            forward = vars(module).get("forward")
            compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
            if compiled or (forward is not None and hasattr(forward, "_torchdynamo_orig_callable")):
                yield f"module {name}" if name else "itself"

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """`named_modules` in half of its time, for what is asked at each pass: in no order, shared ones repeated."""
        left: list[tuple[str, nn.Module]] = [("", self)]
        while left:
            name, module = left.pop()
            yield name, module
            left += [
                (f"{name}.{key}" if name else key, part) for key, part in module._modules.items() if part is not None
            ]

    def _points(self) -> dict[str, SitePoint]:
        """The hook points by name, listed anew when a block was replaced."""
        if self._listed_blocks != tuple(self.blocks):
            self.setup()
        points: dict[str, SitePoint] = self.hook_dict
        return points

    # Hooks and caches

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Iterable[Hook] = (),
        bwd_hooks: Iterable[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """transformer-lens's context manager, holding the model's lock; unknown names raise `UserError`. An exception
        inside takes the hooks away even when they were to stay."""
        with self.lock:
            forward, backward = hook_list(fwd_hooks), hook_list(bwd_hooks)
            names = [name for name, _ in (*forward, *backward)]
            self._select([name for name in names if isinstance(name, str)])
            for predicate in (name for name in names if not isinstance(name, str)):
                self._select(predicate)
            with super().hooks(forward, backward, True, clear_contexts and reset_hooks_end):
                yield self
                if not reset_hooks_end:
                    for point in self._points().values():
                        for handle in (*point.fwd_hooks, *point.bwd_hooks):
                            if handle.context_level == self.context_level:
                                handle.context_level = None  # as `add_hook` sets them: no later block takes them away

    def run_with_hooks(
        self,
        inputs: Tensor,
        *,
        fwd_hooks: Iterable[Hook] = (),
        bwd_hooks: Iterable[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **options: Unpack[PassOptions],
    ) -> Tensor:
        """Call the model with temporary hooks; `options` are those of `forward`."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            out: Tensor = self(inputs, **options)
            return out

    def run_with_cache(
        self,
        inputs: Tensor,
        *,
        names_filter: NamesFilter = None,
        fwd_hooks: Iterable[Hook] = (),
        bwd_hooks: Iterable[Hook] = (),
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        metric: Callable[[Tensor], Tensor] | None = None,
        return_cache_object: bool = True,
        **options: Unpack[PassOptions],
    ) -> tuple[Tensor, VisitCache | dict[str, Tensor]]:
        """Call the model and keep what its hook points saw, each entry a copy, after `fwd_hooks` have edited it.

        names_filter: hook names, or a predicate on them; None keeps every name that the pass computes.
        device: where the copies go; None leaves each where it was computed.
        incl_bwd: also call backward on `metric(output)` and keep gradients under `NAME_grad`. Without a `metric` it is
            the mean next-token cross-entropy of the tokens, padding and the borders of documents left out. Integer
            sites have no gradient.
        options: those of `forward`. Raises `UserError` for a name that does not exist or does not fire.
        """
        # Everything that can be refused is, before anything runs.
        request = self.request(**options)
        names = request.select(names_filter)
        if remove_batch_dim and len(inputs) != 1:
            raise UserError(f"remove_batch_dim must come with a batch of one row; got {len(inputs)}")
        if metric is not None and not incl_bwd:
            raise UserError("a metric must come with incl_bwd=True; got incl_bwd=False")
        if incl_bwd and metric is None:
            if not (request.from_tokens and request.to_logits):
                raise UserError("incl_bwd must come with a metric when start_at or stop_at is given; got none")
            metric = partial(
                next_token_loss,
                inputs,
                segment_start_BT=options.get("segment_start_BT"),
                attention_mask_BT=options.get("attention_mask_BT"),
            )
        # One pass, its edits before what is kept, the gradients while the hooks are there.
        cache: dict[str, Tensor] = {}
        fwd_caching, bwd_caching = caching_hooks(
            cache, names, incl_bwd=incl_bwd, device=device, remove_batch_dim=remove_batch_dim
        )
        with self.hooks([*hook_list(fwd_hooks), *fwd_caching], [*hook_list(bwd_hooks), *bwd_caching]):
            out = self(inputs, **options)
            if metric is not None:
                if not out.requires_grad:
                    raise UserError("incl_bwd must run with gradients on; got an output that has none")
                metric(out).backward()
        return out, VisitCache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    def add_hook(
        self,
        name: str | NamePredicate,
        hook: Callable[..., Tensor | None],
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """transformer-lens's `add_hook`; an unknown name raises `UserError`."""
        with self.lock:
            self._select(name)
            super().add_hook(name, hook, dir, is_permanent, level, prepend)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """transformer-lens's `reset_hooks`, after any pass of another thread."""
        with self.lock:
            super().reset_hooks(clear_contexts, direction, including_permanent, level)

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """transformer-lens's method, for the few points that have hooks: it writes to all, at the end of each pass."""
        for point in self.hook_points():
            if point.fwd_hooks or point.bwd_hooks:
                point.remove_hooks(direction, including_permanent, level)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], list[Hook], list[Hook]]:
        """transformer-lens's method: the cache to be filled, and the hooks that fill it with copies. Without a filter
        they are on the names of a plain pass; unknown names raise `UserError`."""
        names = list(self.request().names()) if names_filter is None else self._select(names_filter)
        cache = {} if cache is None else cache
        return (
            cache,
            *caching_hooks(cache, names, incl_bwd=incl_bwd, device=device, remove_batch_dim=remove_batch_dim),
        )

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """transformer-lens's method: hooks that stay until `reset_hooks`, filling the returned cache at each run."""
        cache, fwd_hooks, bwd_hooks = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        with self.lock:
            for name, hook in fwd_hooks:
                self.add_hook(name, hook)
            for name, hook in bwd_hooks:
                self.add_hook(name, hook, dir="bwd")
        return cache

    def _select(self, names: NamesFilter) -> list[str]:
        """The names that a filter keeps of all there are."""
        self._points()
        return self.request(head_results=True, expert_results=True).select(names)

    # What transformer-lens's tools read

    @property
    def cfg(self) -> TransformerLensConfig:
        """transformer-lens's view of the network, `model.hooks.lens_config`, made anew at each use."""
        raise NotImplementedError(f"{type(self).__name__} must define cfg")  # torch's modules have no abstract methods

    @property
    def W_E(self) -> Tensor:
        """Embedding, (W, D)."""
        return self.embed.weight

    @property
    def W_U(self) -> Tensor:
        """Unembedding, (D, W), without the final norm's gain."""
        return self.unembed.weight.T

    @property
    def b_U(self) -> Tensor:
        """Zeros (W,), where the unembedding has no bias."""
        return self.W_U.new_zeros(self.architecture.vocab_size)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """Zeros (D,), where no part of the network has a bias."""
        return self.W_U.new_zeros(self.architecture.width)

    def readout(self, resid_BTD: Tensor) -> Tensor:
        """Logits (B, T, W) of a state of the stream: the final norm, then the unembedding."""
        return self.unembed(self.ln_final(resid_BTD))

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """Direction of each token's logit in the normalised stream, the final norm's gain folded in: (..., D)."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        return self.W_U.T[torch.as_tensor(tokens, device=self.device)] * self.ln_final.weight

    # Text

    @property
    def tokenizer(self) -> Tokenizer:
        """The network's own. Raises `UserError` for one whose ids are not those of the network."""
        own, vocab_size = self._tokenizer.vocab_size, self.architecture.vocab_size
        if own > vocab_size or (
            isinstance(self._tokenizer, ByteTokenizer) and own < vocab_size
        ):  # rows beyond the ids fill up sizes
            raise UserError(
                f"a tokenizer must have the ids of its network, which knows {vocab_size}; got {own}; give the network "
                "its own: tokenizer.json in its folder, or tokenizer=... when it is made"
            )
        return self._tokenizer

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool = True) -> Tensor:
        """Tokens (B, T) of one text or of several of the same length, where the weights are. Raises as
        `model.text.to_tokens` does."""
        return to_tokens(self.tokenizer, text, prepend_bos).to(self.device)

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token. Raises `UserError` for any other."""
        return to_single_token(self.tokenizer, text)

    def to_string(self, tokens_T: Tensor | Sequence[int]) -> str:
        """The text of one row of tokens, without special tokens."""
        return to_string(self.tokenizer, tokens_T)

    def to_str_tokens(self, text: str, prepend_bos: bool = True) -> list[str]:
        """A visible label for each token of a text."""
        return to_str_tokens(self.tokenizer, text, prepend_bos)
