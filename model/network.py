"""The looped Mixture-of-Experts transformer: a list of layers, a list of steps over them, and hooks by visit."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import HookedRootModule
from transformer_lens.config import TransformerLensConfig

from model.activation_cache import VisitCache, check_step
from model.checkpoint import checkpoint_folder, read_config, read_weights, write_checkpoint
from model.hook_names import AttentionPath, Request
from model.kv_cache import KVCache
from model.layer import Layer, Pass, RMSNorm
from model.routing import Routing, balance_loss
from model.step import Block, HookPoint, LayerRef
from model.text import to_single_token, to_str_tokens, to_string, to_tokens
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, plan, step_scale

Hook = tuple[str | Callable[[str], bool], Callable[..., Tensor | None]]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


class Loss(NamedTuple):
    """Training losses of one batch, each a scalar."""

    next_token: Tensor
    """Mean cross-entropy in nats over the targets that count."""
    balance: Tensor
    """Switch load-balancing loss, mean over steps; 1 for uniform routing."""


class Lock:
    """A re-entrant lock that a copy or a pickle of its owner gets anew."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()


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
        self.unembed = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_unembedding:
            self.unembed.weight = self.embed.weight
        self.setup()
        initialise(self, seed)

    def step(self, layer: int, visit: int) -> int:
        """The step index of a visit. Raises `UserError` when the layer has no such visit."""
        return check_step(self.plan, layer, visit)

    # Running

    def __call__(self, *args: object, **kwargs: object) -> Tensor:  # the lock covers the module's own hooks too
        with self.lock:
            out: Tensor = super().__call__(*args, **kwargs)
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
        head_results, expert_results: compute `attn.hook_result`, `mlp.hook_expert_result`, and sum the update from them.
        start_at: (layer, visit); `inputs` is then the residual stream (B, T, D) before that step.
        stop_at: (layer, visit); returns the residual stream (B, T, D) before that step.
        Raises `UserError` for tokens outside the vocabulary, a row longer than the context, masks of another shape, and
        a hook on a name that this pass does not compute.
        """
        request = self._request(attention, head_results, expert_results, start_at, stop_at)
        hooked = (name for name, point in self.hook_dict.items() if point._forward_hooks or point._backward_hooks)
        request.check(hooked, self.hook_dict)
        self._check_inputs(inputs, segment_start_BT, attention_mask_BT, kv_cache, request)
        return self._run(inputs, segment_start_BT, attention_mask_BT, kv_cache, request)[0]

    def loss(
        self,
        tokens_BT: Tensor,
        *,
        segment_start_BT: Tensor | None = None,
        counts_BT: Tensor | None = None,
        attention: AttentionPath = "fast",
    ) -> Loss:
        """Losses of predicting each next token. `counts_BT` is True where a token counts as a target.

        The first token of a row or of a document is never a target.
        """
        request = self._request(attention, False, False, None, None)
        self._check_inputs(tokens_BT, segment_start_BT, None, None, request)
        logits_BTW, routings = self._run(tokens_BT, segment_start_BT, None, None, request)
        target_BT = tokens_BT[:, 1:].long()
        counted_BT = torch.ones_like(target_BT, dtype=torch.bool)
        if segment_start_BT is not None:
            counted_BT &= segment_start_BT[:, 1:] == segment_start_BT[:, :-1]
        if counts_BT is not None:
            counted_BT &= counts_BT[:, 1:]
        target_BT = target_BT.masked_fill(~counted_BT, -100)
        next_token = functional.cross_entropy(logits_BTW[:, :-1].flatten(0, 1).float(), target_BT.flatten())
        return Loss(next_token, torch.stack([balance_loss(routing.scores_NE, routing.expert_indices_NK) for routing in routings]).mean())

    def _run(
        self,
        inputs: Tensor,
        segment_start_BT: Tensor | None,
        attention_mask_BT: Tensor | None,
        kv_cache: KVCache | None,
        request: Request,
    ) -> tuple[Tensor, list[Routing]]:
        run = self._prepare(inputs, segment_start_BT, attention_mask_BT, kv_cache, request)
        resid_BTD = self.hook_embed(self.embed(inputs)) if request.from_tokens else inputs
        routings: list[Routing] = []
        for block in self.blocks[request.first_step : request.stop_step]:
            resid_BTD = block(resid_BTD, run, routings)
        if not request.to_logits:
            return resid_BTD, routings
        return self.unembed(self.ln_final(resid_BTD)), routings

    def compiled(self) -> Callable[[Tensor], Tensor]:
        """Logits of whole rows on the fast path as one compiled graph. A compiled graph runs no hooks, so calling it
        while any hook is set raises `UserError`."""
        request = self._request("fast", False, False, None, None)
        compiled = torch.compile(lambda tokens_BT: self._run(tokens_BT, None, None, None, request)[0], fullgraph=True)

        def logits(tokens_BT: Tensor) -> Tensor:
            if hooked := [name for name, point in self.hook_dict.items() if point.has_hooks()]:
                raise UserError(f"a compiled network must run without hooks; got one on {hooked[0]!r}; call the model")
            self._check_inputs(tokens_BT, None, None, None, request)
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
                self._matching(name)
            with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts) as hooked:
                yield hooked

    def run_with_hooks(
        self,
        *args: object,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: object,
    ) -> Tensor:
        """Call the model with temporary hooks. Keyword arguments are those of `forward`."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def run_with_cache(
        self,
        *args: object,
        names_filter: NamesFilter = None,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        metric: Callable[[Tensor], Tensor] | None = None,
        return_cache_object: bool = True,
        **kwargs: object,
    ) -> tuple[Tensor, VisitCache | dict[str, Tensor]]:
        """Call the model and keep what its hook points saw, each entry a copy, after `fwd_hooks` have edited it.

        names_filter: hook names, or a predicate on them; None keeps every name that the pass computes.
        incl_bwd: also call backward on `metric(output)` and keep gradients under `NAME_grad`. Without a `metric` it is
            the mean next-token cross-entropy of the tokens. Integer sites have no gradient.
        Keyword arguments are those of `forward`. Raises `UserError` for a name that does not exist or does not fire.
        """
        request = self._request_of(kwargs)
        names = self._filtered(names_filter, request)
        cache: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: HookPoint, suffix: str) -> None:
            copy = x.detach().clone() if device is None else x.detach().to(device, copy=True)
            cache[f"{hook.name}{suffix}"] = copy[0] if remove_batch_dim else copy

        if remove_batch_dim and (rows := len(args[0])) != 1:  # type: ignore[arg-type]
            raise UserError(f"remove_batch_dim must come with a batch of one row; got {rows}")
        with_gradient = [name for name in names if not name.endswith("hook_expert_indices")]
        with self.hooks(
            [*fwd_hooks, *((name, partial(keep, suffix="")) for name in names)],
            [*bwd_hooks, *((name, partial(keep, suffix="_grad")) for name in with_gradient if incl_bwd)],
        ):
            out = self(*args, **kwargs)
            if incl_bwd:
                (metric or partial(next_token_loss, args[0]))(out).backward()  # type: ignore[arg-type]
        return out, VisitCache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: Callable[..., Tensor | None],
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """transformer-lens's `add_hook`; an unknown name raises `UserError`."""
        self._matching(name)
        with self.lock:
            super().add_hook(name, hook, dir, is_permanent, level, prepend)

    def _matching(self, name: str | Callable[[str], bool]) -> None:
        whole = self._request("eager", True, True, None, None)
        if isinstance(name, str):
            whole.check([name], self.hook_dict)
        elif not any(map(name, self.hook_dict)):
            raise UserError("a hook's name predicate must match at least one hook name; it matched none")

    def _filtered(self, names_filter: NamesFilter, request: Request) -> list[str]:
        fires = request.names()
        if names_filter is None:
            return list(fires)
        if callable(names_filter):
            if not (names := [name for name in fires if names_filter(name)]):
                raise UserError("names_filter must match a name that this pass computes; it matched none")
            return names
        names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        request.check(names, self.hook_dict)
        return names

    def _request(
        self,
        attention: AttentionPath,
        head_results: bool,
        expert_results: bool,
        start_at: tuple[int, int] | None,
        stop_at: tuple[int, int] | None,
    ) -> Request:
        if attention not in ("eager", "fast"):
            raise UserError(f"attention must be 'eager' or 'fast'; got {attention!r}")
        first = 0 if start_at is None else self.step(*start_at)
        stop = len(self.plan) if stop_at is None else self.step(*stop_at)
        if first > stop:
            raise UserError(f"start_at must not lie after stop_at; got {start_at} and {stop_at}")
        return Request(
            attention=attention,
            head_results=head_results,
            expert_results=expert_results,
            first_step=first,
            stop_step=stop,
            from_tokens=start_at is None,
            to_logits=stop_at is None,
        )

    def _request_of(self, kwargs: dict[str, object]) -> Request:
        return self._request(
            kwargs.get("attention", "eager"),  # type: ignore[arg-type]  # forward checks the same values
            bool(kwargs.get("head_results", False)),
            bool(kwargs.get("expert_results", False)),
            kwargs.get("start_at"),  # type: ignore[arg-type]
            kwargs.get("stop_at"),  # type: ignore[arg-type]
        )

    # Inputs

    def _check_inputs(
        self,
        inputs: Tensor,
        segment_start_BT: Tensor | None,
        attention_mask_BT: Tensor | None,
        kv_cache: KVCache | None,
        request: Request,
    ) -> None:
        config = self.config
        if request.from_tokens and (inputs.ndim != 2 or inputs.is_floating_point()):
            raise UserError(f"tokens must be integers of shape (B, T); got {inputs.dtype} {tuple(inputs.shape)}")
        if not request.from_tokens and (inputs.ndim != 3 or inputs.shape[-1] != config.width):
            raise UserError(f"a residual stream must have shape (B, T, {config.width}); got {tuple(inputs.shape)}")
        held = 0 if kv_cache is None else kv_cache.length
        batch, length = inputs.shape[:2]
        if length == 0 or batch == 0:
            raise UserError(f"inputs must hold at least one token; got shape {tuple(inputs.shape)}")
        if held + length > config.context:
            raise UserError(f"a row must be at most the context of {config.context} tokens; got {held + length}")
        if request.from_tokens and (int(inputs.min()) < 0 or int(inputs.max()) >= config.vocab_size):
            worst = int(inputs.max()) if int(inputs.min()) >= 0 else int(inputs.min())
            raise UserError(f"token ids must be from 0 to {config.vocab_size - 1}; got {worst}")
        if segment_start_BT is not None and segment_start_BT.shape != (batch, length):
            raise UserError(f"segment_start_BT must have the shape of the tokens; got {tuple(segment_start_BT.shape)}")
        if segment_start_BT is not None and (kv_cache is not None or attention_mask_BT is not None):
            raise UserError("segment_start_BT must come without kv_cache and attention_mask_BT; got both")
        if attention_mask_BT is not None and attention_mask_BT.shape != (batch, held + length):
            raise UserError(
                f"attention_mask_BT must have shape {(batch, held + length)}; got {tuple(attention_mask_BT.shape)}"
            )

    def _prepare(
        self,
        inputs: Tensor,
        segment_start_BT: Tensor | None,
        attention_mask_BT: Tensor | None,
        kv_cache: KVCache | None,
        request: Request,
    ) -> Pass:
        held = 0 if kv_cache is None else kv_cache.length
        length, device = inputs.shape[1], inputs.device
        query_T, key_S = torch.arange(held, held + length, device=device), torch.arange(held + length, device=device)
        positions_BT, allowed_BTS = query_T[None], None
        causal_1TS = (key_S <= query_T[:, None])[None]
        if segment_start_BT is not None:
            positions_BT = query_T - segment_start_BT
            allowed_BTS = causal_1TS & (key_S >= segment_start_BT[:, :, None])
        elif attention_mask_BT is not None:
            real_BS = attention_mask_BT.bool()
            positions_BT = (real_BS.long().cumsum(-1) - 1).clamp(min=0)[:, held:]
            # A padding query sees itself alone: a row without any key would be not-a-number.
            allowed_BTS = (causal_1TS & real_BS[:, None]) | (key_S == query_T[:, None])
        elif held:
            allowed_BTS = causal_1TS
        cos_BTC, sin_BTC = rotary(self.config, positions_BT)
        return Pass(
            allowed_BTS=allowed_BTS,
            cos_BTC=cos_BTC,
            sin_BTC=sin_BTC,
            eager_attention=request.attention == "eager",
            head_results=request.head_results,
            expert_results=request.expert_results,
            kv_cache=kv_cache,
        )

    # What transformer-lens's tools read

    @property
    def cfg(self) -> TransformerLensConfig:
        """transformer-lens's view of the config, made anew at each use: its layers are our steps."""
        config = self.config
        return TransformerLensConfig(
            d_model=config.width,
            d_head=config.head_width,
            n_layers=len(self.plan),
            n_ctx=config.context,
            n_heads=config.num_heads,
            n_key_value_heads=config.num_kv_heads,
            d_mlp=config.expert_width * config.top_k,
            d_vocab=config.vocab_size,
            device=str(self.unembed.weight.device),
            eps=config.norm_eps,
            normalization_type="RMS",
            uses_rms_norm=True,
            final_rms=True,
            positional_embedding_type="none" if config.rope_base is None else "rotary",
            act_fn="silu",
            gated_mlp=config.gated_experts,
            num_experts=config.num_experts,
            experts_per_token=config.top_k,
            dtype=self.unembed.weight.dtype,
        )

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

    to_tokens = staticmethod(to_tokens)
    to_single_token = staticmethod(to_single_token)
    to_string = staticmethod(to_string)
    to_str_tokens = staticmethod(to_str_tokens)

    @classmethod
    def from_pretrained(cls, checkpoint: str | Path, *, allow_download: bool = False) -> Self:
        """The network of a checkpoint folder, in float32 and evaluation mode; with `allow_download`, of a hub id too.

        Raises `UserError` for everything that `model.checkpoint` refuses.
        """
        folder = checkpoint_folder(checkpoint, allow_download=allow_download)
        network = cls(read_config(folder))
        own = network.stored_weights()
        weights = read_weights(folder, {name: tuple(weight.shape) for name, weight in own.items()})
        for name, weight in own.items():
            weight.copy_(weights[name])
        return network.eval()

    def stored_weights(self) -> dict[str, Tensor]:
        """Every weight once, without gradient: a tied unembedding is the embedding."""
        return {name: weight.detach() for name, weight in self.named_parameters()}

    def save_pretrained(self, folder: str | Path, *, readme: str, dtype: torch.dtype = torch.float32) -> None:
        """Write a checkpoint folder, its weights stored as `dtype`; an existing folder raises `UserError`."""
        write_checkpoint(Path(folder), self.config, self.stored_weights(), readme=readme, dtype=dtype)


class FinalNorm(RMSNorm):
    """The norm before the unembedding; it runs once, so its hook points are its own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self)


def rotary(config: ModelConfig, positions_BT: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """RoPE cosines and sines at the given positions, (B, T, C) each; None without a rotary embedding."""
    if config.rope_base is None:
        return None, None
    halves_C = torch.arange(0, config.head_width, 2, device=positions_BT.device, dtype=torch.float32)
    angles_BTC = positions_BT[..., None].float() * config.rope_base ** (-halves_C / config.head_width)
    angles_BTC = torch.cat((angles_BTC, angles_BTC), -1)
    return angles_BTC.cos(), angles_BTC.sin()


def next_token_loss(tokens_BT: Tensor, logits_BTW: Tensor) -> Tensor:
    """Mean cross-entropy of each row's next tokens, in nats."""
    return functional.cross_entropy(logits_BTW[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten().long())


@torch.no_grad()
def initialise(network: LoopedMoE, seed: int) -> None:
    """Random weights: normal, 1/sqrt(fan in); matrices that write to the stream are smaller by sqrt(2 L_exec)."""
    if network.embed.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    written = (2 * len(network.plan)) ** -0.5
    for name, weight in network.named_parameters():
        if weight.ndim < 2:
            continue
        fan_in = 1.0 if name == "embed.weight" else weight.shape[-1] ** -0.5
        scale = written if name.endswith(("o_proj.weight", "w_out")) else 1.0
        weight.copy_(torch.randn(weight.shape, generator=generator) * fan_in * scale)
