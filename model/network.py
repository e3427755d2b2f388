"""The looped Mixture-of-Experts transformer: a list of layers, a list of steps over them, and hooks by visit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import HookedRootModule
from transformer_lens.config import TransformerLensConfig
from transformer_lens.hook_points import HookPoint

from model.checkpoint import check_layers, checkpoint_folder, read_config, read_weights, write_checkpoint
from model.hooks.activation_cache import VisitCache, caching_hooks
from model.hooks.lens_config import lens_config
from model.hooks.lock import Lock
from model.hooks.names import AttentionPath, Hook, NamePredicate, NamesFilter, Request
from model.inputs import Inputs, PassOptions, require_all
from model.kv_cache import KVCache
from model.layer import Layer
from model.readout import FinalNorm, TiedUnembedding
from model.routing import Routing, balance_loss
from model.step import Block, LayerRef
from model.text import to_single_token, to_str_tokens, to_string, to_tokens
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, plan, step_index, step_scale


class Loss(NamedTuple):
    """Training losses of one batch, each a scalar."""

    next_token: Tensor
    """Mean cross-entropy in nats over the targets that count."""
    balance: Tensor
    """Switch load-balancing loss, mean over steps; 1 for uniform routing."""


class LoopedMoE(HookedRootModule):
    """A looped transformer with sparse experts (arXiv:2609.01343); one visit is its Baseline.

    `layers[l]` owns the weights of physical layer l. `blocks[s]` is step s of the plan: it owns the hook points of
    that one execution. Calls from several threads run one after the other.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        """Build with random weights from `seed`; on the meta device nothing is drawn."""
        super().__init__()
        self.config = config
        self.plan: Plan = plan(config)
        self.lock = Lock()
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.hook_embed = HookPoint()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(
            Block(index, LayerRef(self.layers, step.layer), step_scale(config, step))
            for index, step in enumerate(self.plan)
        )
        self.ln_final = FinalNorm(config.width, config.norm_eps)
        self.unembed: nn.Linear | TiedUnembedding
        if config.tied_unembedding:
            self.unembed = TiedUnembedding(self.embed)
        else:
            self.unembed = nn.Linear(config.width, config.vocab_size, bias=False)
        self.setup()
        # transformer-lens lists every module here; a layer that is replaced later would live on in the list.
        self.mod_dict = self.hook_dict
        initialise(self, seed)

    def step(self, layer: int, visit: int) -> int:
        """The step index of a visit. Raises `UserError` when the layer has no such visit."""
        return step_index(self.plan, layer, visit)

    # Running

    def __call__(self, inputs: Tensor, **options: Unpack[PassOptions]) -> Tensor:
        with self.lock:  # around the module's own hooks too
            out: Tensor = super().__call__(inputs, **options)
            return out

    def forward(
        self,
        inputs: Tensor,
        *,
        segment_start_BT: Tensor | None = None,
        attention_mask_BT: Tensor | None = None,
        attention: AttentionPath = "eager",
        head_results: bool = False,
        expert_results: bool = False,
        start_at: tuple[int, int] | None = None,
        stop_at: tuple[int, int] | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """Logits (B, T, W) of tokens (B, T).

        segment_start_BT: position at which each token's document starts; attention does not cross it.
        attention_mask_BT: 0 on padding, which nothing attends to; padding may stand on the left. With a `kv_cache` it
            covers the tokens already read too, (B, S).
        attention: `eager` offers scores and patterns to hooks, `fast` is fused.
        head_results, expert_results: compute `attn.hook_result`, `mlp.hook_expert_result`, and sum the update from
            them.
        start_at: (layer, visit); `inputs` is then the residual stream (B, T, D) before that step.
        stop_at: (layer, visit); returns the residual stream (B, T, D) before that step.
        kv_cache: keys and values of the tokens before these; those of these are added to it.
        Raises `UserError` for tokens outside the vocabulary, a row longer than the context, masks of another shape, and
        a hook on a name that this pass does not compute.
        """
        request = self._request(
            attention=attention,
            head_results=head_results,
            expert_results=expert_results,
            start_at=start_at,
            stop_at=stop_at,
        )
        return self._checked_run(
            Inputs(
                values=inputs,
                segment_start_BT=segment_start_BT,
                attention_mask_BT=attention_mask_BT,
                kv_cache=kv_cache,
            ),
            request,
        )[0]

    def loss(
        self,
        tokens_BT: Tensor,
        *,
        segment_start_BT: Tensor | None = None,
        attention: AttentionPath = "fast",
    ) -> Loss:
        """Losses of predicting each next token; the first token of a row or of a document is never a target.

        Under `fully_shard` it is a forward method of its own: `register_fsdp_forward_method(network, "loss")`.
        """
        inputs = Inputs(values=tokens_BT, segment_start_BT=segment_start_BT)
        with self.lock:
            logits_BTW, routings = self._checked_run(inputs, self._request(attention=attention))
        _require_a_target(tokens_BT)
        target_BT = tokens_BT[:, 1:].long()
        if segment_start_BT is not None:
            counts_BT = segment_start_BT[:, 1:] == segment_start_BT[:, :-1]
            rule = "a loss must have a token to predict: one that is not the first of its document"
            require_all(counts_BT.any(), counts_BT.sum(), rule)
            target_BT = target_BT.masked_fill(~counts_BT, -100)
        next_token = functional.cross_entropy(logits_BTW[:, :-1].flatten(0, 1).float(), target_BT.flatten())
        balance = [balance_loss(routing.scores_NE, routing.expert_indices_NK) for routing in routings]
        return Loss(next_token, torch.stack(balance).mean())

    def _checked_run(self, inputs: Inputs, request: Request) -> tuple[Tensor, list[Routing]]:
        request.check(self._hooked(), self.hook_dict)
        inputs.check(self.config, request)
        with nullcontext() if inputs.kv_cache is None else inputs.kv_cache.whole_pass():
            return self._run(inputs, request)

    def _run(self, inputs: Inputs, request: Request) -> tuple[Tensor, list[Routing]]:
        run = inputs.prepare(self.config, request)
        resid_BTD = self.hook_embed(self.embed(inputs.values)) if request.from_tokens else inputs.values
        routings: list[Routing] = []
        for block in self.blocks[request.first_step : request.stop_step]:
            resid_BTD = block(resid_BTD, run, routings)
        if not request.to_logits:
            return resid_BTD, routings
        return self.unembed(self.ln_final(resid_BTD)), routings

    def compiled(self) -> Callable[[Tensor], Tensor]:
        """Logits of whole rows on the fast path as one compiled graph. A compiled graph runs no hooks, so calling it
        while any hook is set raises `UserError`."""
        request = self._request(attention="fast")
        compiled = torch.compile(lambda tokens_BT: self._run(Inputs(values=tokens_BT), request)[0], fullgraph=True)

        def logits(tokens_BT: Tensor) -> Tensor:
            with self.lock:
                if hooked := self._hooked():
                    raise UserError(
                        f"a compiled network must run without hooks; got one on {hooked[0]!r}; call the network itself"
                    )
                Inputs(values=tokens_BT).check(self.config, request)
                out: Tensor = compiled(tokens_BT)
                return out

        return logits

    # Hooks and caches

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """transformer-lens's context manager, holding the model's lock; unknown names raise `UserError`."""
        with self.lock:
            for name, _ in (*fwd_hooks, *bwd_hooks):
                self._select(name)
            with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
                yield self

    def run_with_hooks(
        self,
        inputs: Tensor,
        *,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **options: Unpack[PassOptions],
    ) -> Tensor:
        """Call the model with temporary hooks; `options` are those of `forward`."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(inputs, **options)

    def run_with_cache(
        self,
        inputs: Tensor,
        *,
        names_filter: NamesFilter = None,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
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
            the mean next-token cross-entropy of the tokens. Integer sites have no gradient.
        options: those of `forward`. Raises `UserError` for a name that does not exist or does not fire.
        """
        request = self._request(**options)
        names = request.select(names_filter, self.hook_dict)
        if remove_batch_dim and len(inputs) != 1:
            raise UserError(f"remove_batch_dim must come with a batch of one row; got {len(inputs)}")
        if metric is not None and not incl_bwd:
            raise UserError("a metric must come with incl_bwd=True; got incl_bwd=False")
        if incl_bwd and metric is None:
            if not (request.from_tokens and request.to_logits):
                raise UserError("incl_bwd must come with a metric when start_at or stop_at is given; got none")
            metric = partial(next_token_loss, inputs)
        cache: dict[str, Tensor] = {}
        fwd_caching, bwd_caching = caching_hooks(
            cache, names, incl_bwd=incl_bwd, device=device, remove_batch_dim=remove_batch_dim
        )
        with self.hooks([*fwd_hooks, *fwd_caching], [*bwd_hooks, *bwd_caching]):
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
        names = list(self._request().names()) if names_filter is None else self._select(names_filter)
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

    def _hooked(self) -> list[str]:
        """The names that have a hook, set by transformer-lens's methods or by torch's."""
        return [name for name, point in self.hook_dict.items() if point._forward_hooks or point._backward_hooks]

    def _select(self, names: NamesFilter) -> list[str]:
        """The names that a filter keeps of all there are."""
        return self._request(head_results=True, expert_results=True).select(names, self.hook_dict)

    def _request(self, **options: Unpack[PassOptions]) -> Request:
        """What a pass with these options computes."""
        start_at, stop_at = options.get("start_at"), options.get("stop_at")
        first = 0 if start_at is None else self.step(*start_at)
        stop = len(self.plan) if stop_at is None else self.step(*stop_at)
        if first > stop:
            raise UserError(f"start_at must not lie after stop_at; got {start_at} and {stop_at}")
        return Request(
            attention=options.get("attention", "eager"),
            head_results=options.get("head_results", False),
            expert_results=options.get("expert_results", False),
            first_step=first,
            stop_step=stop,
            from_tokens=start_at is None,
            to_logits=stop_at is None,
        )

    # What transformer-lens's tools read

    @property
    def cfg(self) -> TransformerLensConfig:
        """transformer-lens's view of the config, made anew at each use: its layers are our steps."""
        return lens_config(self.config, self.unembed.weight.device, self.unembed.weight.dtype)

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
        """Zeros (W,): the unembedding has no bias."""
        return self.unembed.weight.new_zeros(self.config.vocab_size)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """Zeros (D,): no part of the network has a bias."""
        return self.unembed.weight.new_zeros(self.config.width)

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """Direction of each token's logit in the normalised stream, the final norm's gain folded in: (..., D)."""
        if isinstance(tokens, str):
            tokens = to_single_token(tokens)
        return self.unembed.weight[torch.as_tensor(tokens, device=self.unembed.weight.device)] * self.ln_final.weight

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool = True) -> Tensor:
        """Tokens (B, T) of one text or of several of the same length, where the weights are. Raises as
        `model.text.to_tokens` does."""
        return to_tokens(text, prepend_bos).to(self.unembed.weight.device)

    to_single_token = staticmethod(to_single_token)
    to_string = staticmethod(to_string)
    to_str_tokens = staticmethod(to_str_tokens)

    # Checkpoints

    @classmethod
    def from_pretrained(cls, checkpoint: str | Path, *, allow_download: bool = False) -> Self:
        """The network of a checkpoint folder, in float32 and evaluation mode; with `allow_download`, of a hub id too.

        Raises `UserError` for everything that `model.checkpoint` refuses.
        """
        folder = checkpoint_folder(checkpoint, allow_download=allow_download)
        config = read_config(folder)
        check_layers(folder, config)
        with torch.device("meta"):  # no memory and no random numbers for weights that are read
            network = cls(config)
        shapes = {name: tuple(weight.shape) for name, weight in network.stored_weights().items()}
        network.load_state_dict(read_weights(folder, shapes), assign=True)
        network.eval()
        return network

    def stored_weights(self) -> dict[str, Tensor]:
        """Every weight by name, without gradient."""
        return {name: weight.detach() for name, weight in self.named_parameters()}

    def save_pretrained(self, folder: str | Path, *, readme: str, dtype: torch.dtype = torch.float32) -> None:
        """Write a checkpoint folder, its weights stored as `dtype`; an existing folder raises `UserError`."""
        write_checkpoint(Path(folder), self.config, self.stored_weights(), readme=readme, dtype=dtype)


def next_token_loss(tokens_BT: Tensor, logits_BTW: Tensor) -> Tensor:
    """Mean cross-entropy of each row's next tokens, in nats."""
    _require_a_target(tokens_BT)
    return functional.cross_entropy(logits_BTW[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten().long())


def _require_a_target(tokens_BT: Tensor) -> None:
    if tokens_BT.shape[1] < 2:
        raise UserError("a loss must have rows of at least 2 tokens, one to predict; got 1")


@torch.no_grad()
def initialise(network: LoopedMoE, seed: int) -> None:
    """Random weights, the same on every device: normal, 1/sqrt(fan in); matrices that write to the stream are smaller
    by sqrt(2 L_exec)."""
    if network.embed.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    written = (2 * len(network.plan)) ** -0.5
    for name, weight in network.named_parameters():
        if weight.ndim < 2:
            continue
        fan_in = 1.0 if name == "embed.weight" else weight.shape[-1] ** -0.5
        scale = written if name.endswith(("o_proj.weight", "w_out")) else 1.0
        weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * fan_in * scale)
