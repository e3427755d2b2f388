"""The looped Mixture-of-Experts transformer: a list of layers, a list of steps over them, and hooks by visit."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformer_lens.config import TransformerLensConfig

from model.checkpoint import check_layers, checkpoint_folder, read_config, read_weights, write_checkpoint
from model.hooks.hook_point import SitePoint
from model.hooks.lens_config import lens_config
from model.hooks.looped_model import LoopedModel, LoopScale, Repetition
from model.hooks.names import AttentionPath
from model.inputs import Inputs
from model.kv_cache import KVCache
from model.layer import Layer
from model.losses import Loss, OverSteps, next_token_loss, routed_tokens, routing_losses
from model.readout import FinalNorm, TiedUnembedding
from model.routing import Routing, alone
from model.step import Block, LayerRef
from model.tokenizers import read_tokenizer
from smelt_interp.config import ModelConfig
from smelt_interp.data.tokenizer import BYTES, Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan


class LoopedMoE(LoopedModel):
    """A looped transformer with sparse experts (arXiv:2609.01343); one visit is its Baseline.

    `layers[l]` owns the weights of physical layer l. `blocks[s]` is step s of the plan: it owns the hook points of
    that one execution.
    """

    embed: nn.Embedding
    ln_final: FinalNorm
    unembed: nn.Linear | TiedUnembedding
    overwrites = False
    restarts = True

    def __init__(self, config: ModelConfig, *, seed: int = 0, tokenizer: Tokenizer = BYTES) -> None:
        """Build with random weights from `seed`; on the meta device nothing is drawn. Raises `UserError` for a seed
        that torch does not take."""
        if not 0 <= seed < 2**63:
            raise UserError(f"seed must be from 0 to 2^63 - 1; got {seed}")
        super().__init__(config.architecture(), tokenizer)
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.hook_embed = SitePoint()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(
            Block(index, LayerRef(self.layers, step.layer), factor)
            for index, (step, factor) in enumerate(zip(self.plan, self.architecture.loop_factors, strict=True))
        )
        self.ln_final = FinalNorm(config.width, config.norm_eps)
        if config.tied_unembedding:
            self.unembed = TiedUnembedding(self)
        else:
            self.unembed = nn.Linear(config.width, config.vocab_size, bias=False)
        self.setup()
        initialise(self, seed)

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
        routings: list[Routing] | None = None,
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
        kv_cache: keys and values of the tokens before these; those of these are added to it, unless the pass starts at
            a step: it reads what the cache holds.
        routings: takes each step's routing, in order.
        Raises `UserError` for tokens outside the vocabulary, a row longer than the context, and masks of another shape.
        """
        # What is asked for, and what every step reads: masks, positions, slots.
        request = self.request(
            attention=attention,
            head_results=head_results,
            expert_results=expert_results,
            start_at=start_at,
            stop_at=stop_at,
        )
        read = Inputs(
            values=inputs, segment_start_BT=segment_start_BT, attention_mask_BT=attention_mask_BT, kv_cache=kv_cache
        )
        run = read.prepare(self.config, request, [] if routings is None else routings)
        # The pass itself.
        with nullcontext() if kv_cache is None else kv_cache.whole_pass(keep=request.from_tokens):
            resid_BTD = self.hook_embed(self.embed(inputs)) if request.from_tokens else inputs
            for block in self.blocks[request.first_step : request.stop_step]:
                resid_BTD = block(resid_BTD, run)
            return self.unembed(self.ln_final(resid_BTD)) if request.to_logits else resid_BTD

    def loss(
        self,
        tokens_BT: Tensor,
        *,
        segment_start_BT: Tensor | None = None,
        attention_mask_BT: Tensor | None = None,
        attention: AttentionPath = "fast",
        over_steps: OverSteps = "mean",
        over_ranks: Callable[[Tensor], Tensor] = alone,
    ) -> Loss:
        """Losses of predicting each next token. The first token of a row or of a document is never a target, padding
        counts in none of the losses; `over_steps` says how the routing losses of the steps become one, `over_ranks` is
        that of `balance_loss`.

        Under `fully_shard` it is a forward method of its own: `register_fsdp_forward_method(network, "loss")`.
        """
        routings: list[Routing] = []
        with self.lock:
            self.check_hooks(self.request(attention=attention))
            logits_BTW = self.forward(
                tokens_BT,
                segment_start_BT=segment_start_BT,
                attention_mask_BT=attention_mask_BT,
                attention=attention,
                routings=routings,
            )
        counts_BT = routed_tokens(tokens_BT, segment_start_BT, attention_mask_BT)
        balance, router_z = routing_losses(routings, counts_BT, over_steps, over_ranks)
        return Loss(next_token_loss(tokens_BT, logits_BTW, segment_start_BT, attention_mask_BT), balance, router_z)

    def compiled(self) -> Callable[[Tensor], Tensor]:
        """Logits of whole rows on the fast path as one compiled graph. A compiled graph runs no hooks, so calling it
        while any hook is set raises `UserError`."""
        request = self.request(attention="fast")
        compiled = torch.compile(partial(self.forward, attention="fast"), fullgraph=True)

        def logits(tokens_BT: Tensor) -> Tensor:
            with self.lock:
                self.refuse_hooks("a compiled network")
                Inputs(values=tokens_BT).check(self.config, request)
                out: Tensor = compiled(tokens_BT)
                return out

        return logits

    # Other plans over the same weights

    def sharing_weights(self, config: ModelConfig) -> Self:
        """A network of another plan over this one's own parameters: trained or edited in place they change in both.
        Hooks are not shared, nor is a layer that is put in another's place."""
        with torch.device("meta"):  # no memory and no random numbers for weights that there are
            other = type(self)(config, tokenizer=self._tokenizer)
        for name, weight in self.named_parameters():  # loading would thaw those that are frozen
            other.get_parameter(name).requires_grad_(weight.requires_grad)
        other.load_state_dict(self.state_dict(keep_vars=True), assign=True)
        other.train(self.training)
        return other

    def with_visits(self, num_visits: int, *, loop_scale: LoopScale = "kept") -> Self:
        scale = Repetition(num_visits=num_visits, loop_scale=loop_scale).factor(self.config.loop_scale)
        return self.sharing_weights(replace(self.config, num_visits=num_visits, loop_scale=scale))

    @property
    def cfg(self) -> TransformerLensConfig:
        """transformer-lens's view of the config, made anew at each use: its layers are our steps."""
        config, weight = self.config, self.W_E
        return lens_config(
            self.architecture,
            device=weight.device,
            dtype=weight.dtype,
            d_mlp=config.expert_width * config.top_k,
            eps=config.norm_eps,
            positional_embedding_type="none" if config.rope_base is None else "rotary",
            act_fn="silu",
            gated_mlp=config.gated_experts,
        )

    # Checkpoints

    @classmethod
    def from_transformers(cls, folder: str | Path, loop: LoopedSpan | None = None) -> Self:
        """Our network with the weights of a folder that transformers loads (Llama, Qwen3, Qwen3-MoE, OLMoE, Mixtral),
        a span of its layers looped where asked for.

        Raises `UserError` for a folder that cannot be opened, and for what our network cannot hold, by name.
        """
        from model.from_transformers import read_held  # transformers takes seconds to import

        held = read_held(folder, loop)
        with torch.device("meta"):
            network = cls(held.config, tokenizer=held.tokenizer)
        network.load_state_dict(held.weights, assign=True)
        network.eval()
        return network

    @classmethod
    def from_pretrained(cls, checkpoint: str | Path, *, allow_download: bool = False) -> Self:
        """The network of a checkpoint folder, in float32 and evaluation mode; with `allow_download`, of a hub id too.

        Raises `UserError` for everything that `model.checkpoint` refuses.
        """
        folder = checkpoint_folder(checkpoint, allow_download=allow_download)
        config = read_config(folder)
        check_layers(folder, config)
        with torch.device("meta"):  # no memory and no random numbers for weights that are read
            network = cls(config, tokenizer=read_tokenizer(folder))
        network.tokenizer  # noqa: B018  # raises when it is not the network's
        shapes = {name: tuple(weight.shape) for name, weight in network.stored_weights().items()}
        network.load_state_dict(read_weights(folder, shapes), assign=True)
        network.eval()
        return network

    def stored_weights(self) -> dict[str, Tensor]:
        """Every weight by name, without gradient."""
        return {name: weight.detach() for name, weight in self.named_parameters()}

    def save_pretrained(self, folder: str | Path, *, readme: str, dtype: torch.dtype = torch.float32) -> None:
        """Write a checkpoint folder, its weights stored as `dtype`; an existing folder raises `UserError`."""
        write_checkpoint(
            Path(folder), self.config, self.stored_weights(), tokenizer=self.tokenizer, readme=readme, dtype=dtype
        )


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
