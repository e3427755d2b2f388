"""A network of a family: its authors' forward pass, with the hook points of every step of its plan."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch import Tensor, nn
from transformer_lens.config import TransformerLensConfig

from model.families.attention import NAME, register
from model.families.family import Family
from model.families.module_hooks import install
from model.families.norms import FinalNorm, through
from model.families.run import RUNNING, FamilyRun, Stopped
from model.families.visits import run_again
from model.hooks.hook_point import SitePoint
from model.hooks.lens_config import lens_config
from model.hooks.looped_model import LoopedModel, LoopScale, Repetition, Weighted
from model.hooks.names import PassOptions, Request
from model.inputs import Inputs
from smelt_interp.architecture import Architecture
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class FamilyHeads(nn.Module):
    """Hook points of one visit's attention."""

    @property
    def W_O(self) -> Tensor:
        """What transformer-lens asks for where heads' results are not cached. Raises `UserError`."""
        raise UserError("results of heads must be cached in another family's network: run_with_cache(..., "
                        "head_results=True); got a cache without attn.hook_result")  # fmt: skip


class FamilyStep(nn.Module):
    """The hook points of one step, and nothing else."""

    hook_out_is_single_residual_stream = True

    def __init__(self, sites: tuple[str, ...]) -> None:
        super().__init__()
        for site in sites:
            folder, _, name = site.rpartition(".")
            if folder and folder not in self._modules:
                self.add_module(folder, FamilyHeads() if folder == "attn" else nn.Module())
            self.get_submodule(folder).add_module(name, SitePoint())


class FamilyNetwork(LoopedModel):
    """Someone else's network under our names. `model` is theirs, and called by itself it computes what it always did,
    but for the layers that a looped span runs again.

    A pass stops at any step. It starts at one, and goes on from a `kv_cache`, where the family lets it.
    """

    def __init__(
        self, model: "PreTrainedModel", family: Family, tokenizer: Tokenizer, loop: LoopedSpan | None = None
    ) -> None:
        """`loop` runs a span of a network's layers again, with the same weights. Raises `UserError` for a family that
        has no such span, and for a network whose layers are not alike."""
        config = model.config.get_text_config()
        layers = family.find_layers(model)
        super().__init__(architecture_of(config, family, len(layers), loop), tokenizer)
        self.model, self.family = model, family
        # In a tuple, where it is no part of this network; its modules are not hooked, its weights are these.
        self._once = (None if loop is None else sharing_weights(model), loop)
        if loop is not None:
            _loop(model, config, family, self.architecture)
        for step, module in enumerate(layers if loop is None else family.find_layers(model)):
            layer = step if loop is None else self.plan[step].layer
            _require_parts(family, module, layer)
            install(family, layer, module)
        model.get_input_embeddings().register_forward_hook(self._embedded)
        config.use_cache = False
        if family.calls == "interface":
            register()
            model.set_attn_implementation(NAME)
        self.hook_embed = SitePoint()
        if family.final_norm:
            norm = model.get_submodule(family.final_norm)
            self.ln_final = FinalNorm(norm)
            norm.register_forward_hook(self._finally_normed)
        self.blocks = nn.ModuleList(FamilyStep(self.architecture.sites) for _ in self.plan)
        self.setup()

    def with_visits(self, num_visits: int, *, loop_scale: LoopScale = "kept") -> Self:
        model, loop = self._once
        if model is None or loop is None:
            return super().with_visits(num_visits, loop_scale=loop_scale)
        factor = Repetition(num_visits=num_visits, loop_scale=loop_scale).factor(loop.factor)
        loop = replace(loop, visits=num_visits, factor=factor)
        other = type(self)(sharing_weights(model), self.family, self._tokenizer, loop)
        other.to(self.device).train(self.training)
        return other

    def layer_modules(self) -> list[nn.Module]:
        return self.family.find_layers(self.model)

    @property
    def halting(self) -> nn.Module | None:
        return self.model.get_submodule(self.family.halting) if self.family.halting else None

    def stops(self, gates: Tensor) -> Tensor:
        return self.family.stops(gates)

    def forward(self, inputs: Tensor, **options: Unpack[PassOptions]) -> Tensor:
        """Logits (B, T, W) of tokens (B, T); options as in `model.network.LoopedMoE.forward`.

        Raises `UserError` as that does, for options that this network has not, and when the modules that ran are not
        the steps of the plan.
        """
        request = self.request(**options)
        start_BT, mask_BS = options.get("segment_start_BT"), options.get("attention_mask_BT")
        read = Inputs(values=inputs, segment_start_BT=start_BT, attention_mask_BT=mask_BS,
                      kv_cache=options.get("kv_cache"))  # fmt: skip
        self._check_start(request, read)
        read.check(self.architecture, request)
        run = FamilyRun(request, self.family, self.blocks, read)
        given = {**self.family.options, **({} if self.family.masked else {"use_cache": False}), **self._rows(run, read)}
        # Where the pass starts at a step, tokens of no meaning go through what lies before it.
        tokens_BT = inputs if request.from_tokens else inputs.new_zeros(inputs.shape[:2], dtype=torch.int64)
        kept = nullcontext() if read.kv_cache is None else read.kv_cache.whole_pass(keep=request.from_tokens)
        try:
            with kept, run.now():
                logits_BTW: Tensor = self.model(input_ids=tokens_BT, **given).logits
        except Stopped as stopped:
            return stopped.stream_BTD
        return logits_BTW

    def _check_start(self, request: Request, read: Inputs) -> None:
        """Raise `UserError` for a start and a cache that the network cannot have."""
        family = self.architecture.family
        if not request.from_tokens and not self.restarts:
            raise UserError(f"a network of family {family} must start with tokens, as what it hands on is more "
                            "than a stream; got start_at")  # fmt: skip
        if read.kv_cache is not None and not self.remembers:
            raise UserError(f"a network of family {family} must read whole rows, as it reads more of earlier "
                            "tokens than all their keys and values; got a kv_cache")  # fmt: skip

    def _rows(self, run: FamilyRun, read: Inputs) -> dict[str, object]:
        """The mask and the positions of rows that are padded, hold several documents, or go on. What the network does
        not take is left to `run`. Raises `UserError` for several documents where one row is one."""
        start_BT, mask_BS, given = read.segment_start_BT, read.attention_mask_BT, dict[str, object]()
        query_T = torch.arange(read.held, read.held + read.values.shape[1], device=read.values.device)
        if read.kv_cache is not None:
            key_S = torch.arange(read.held + len(query_T), device=query_T.device)
            run.within_BTS = (key_S <= query_T[:, None])[None]
            given["position_ids"] = query_T[None]
        if mask_BS is not None and not bool(mask_BS.all()):
            run.padded = True
            if self.family.takes_masks:
                positions_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
                given |= {"position_ids": positions_BS[:, read.held :]}
            if self.family.takes_masks and read.kv_cache is None:
                given |= {"attention_mask": mask_BS}
            else:
                real_BTS = mask_BS[:, None].bool()
                run.within_BTS = real_BTS if run.within_BTS is None else run.within_BTS & real_BTS
        if start_BT is not None and bool(start_BT.any()):
            if self.family.whole_rows:
                raise UserError(
                    f"a row of a network of family {self.architecture.family} must be one document; got several"
                )
            same_BTS = start_BT[:, :, None] == start_BT[:, None]
            run.within_BTS = same_BTS if run.within_BTS is None else same_BTS & run.within_BTS
            if self.family.takes_masks:
                given["position_ids"] = query_T - start_BT
        return given

    @property
    def remembers(self) -> bool:
        """Whether a pass may go on from a `kv_cache`: what attention reads of earlier tokens is keys and values alone,
        all of them."""
        config, family = self.model.config.get_text_config(), self.family
        windows = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
        windowed = bool(windows or getattr(config, "sliding_window", None))
        return family.causal and family.takes_masks and not (family.whole_rows or windowed)

    @property
    def restarts(self) -> bool:  # type: ignore[override]  # of a family, not of all of them
        """Whether a pass may start at a step: where layers hand one stream on."""
        return self.family.loopable and self.remembers

    def _embedded(self, module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor | None:
        run = RUNNING.get()
        return None if run is None or not run.request.from_tokens else self.hook_embed(output)

    def _finally_normed(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        run = RUNNING.get()  # some families' norm runs after each visit: the last time is the last norm
        if run is None or not run.is_over:
            return None
        return through(self.get_submodule("ln_final"), module, self.family.norm, args[0], output)

    @property
    def embed(self) -> Weighted:  # type: ignore[override]  # a part of the authors' network, not one of ours
        """The token embedding."""
        embedding: Weighted = self.model.get_input_embeddings()
        return embedding

    @property
    def unembed(self) -> Weighted:  # type: ignore[override]  # theirs, as well
        """The map from the stream to logits."""
        unembedding: Weighted = self.model.get_output_embeddings()
        return unembedding

    def readout(self, resid_BTD: Tensor) -> Tensor:
        """Raises `UserError` for a network whose head is more than a norm and a map."""
        self._check_reads_out()
        return super().readout(resid_BTD)

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """Raises `UserError` as `readout` does."""
        self._check_reads_out()
        return super().tokens_to_residual_directions(tokens)

    def _check_reads_out(self) -> None:
        if not self.family.reads_out:
            raise UserError(f"a state to be read out must be of a network whose head is a norm and a map; got one of "
                            f"{self.architecture.family}, whose head does more")  # fmt: skip

    @property
    def cfg(self) -> TransformerLensConfig:
        """transformer-lens's view of the network, made anew at each use: its layers are our steps."""
        config = self.model.config.get_text_config()
        lens = lens_config(
            self.architecture,
            device=self.device,
            dtype=self.W_E.dtype,
            d_mlp=getattr(config, "intermediate_size", None) or 4 * self.architecture.width,
            eps=float(getattr(config, "rms_norm_eps", 0) or getattr(config, "layer_norm_epsilon", 1e-6)),
            positional_embedding_type="rotary" if self.family.rotary else "standard",
            act_fn=str(getattr(config, "hidden_act", "gelu")),
            gated_mlp=self.family.gated_mlp,
        )
        if self.family.norm == "LN":
            lens.normalization_type, lens.uses_rms_norm, lens.final_rms = "LN", False, False
        return lens


def sharing_weights(model: "PreTrainedModel") -> "PreTrainedModel":
    """A copy of the modules and the config over the same parameters and buffers."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def architecture_of(
    config: "PretrainedConfig", family: Family, num_layers: int, loop: LoopedSpan | None
) -> Architecture:
    """What readers of the network need to know, from its config."""
    plan = family.plan(config)
    if loop is not None and not family.loopable:
        raise UserError(f"--loop must be of a network that runs each layer once; got one of {config.model_type}, "
                        "whose code has its own order")  # fmt: skip
    if loop is not None:
        plan = loop.plan(num_layers)
    if {step.layer for step in plan} != {*range(num_layers)}:
        raise UserError(f"the plan of a config must run each of the network's {num_layers} layers; got one of "
                        f"{len({step.layer for step in plan})} layers and {len(plan)} steps")  # fmt: skip
    heads = config.num_attention_heads
    return Architecture(
        family=config.model_type,
        steps=plan,
        loop_factors=(1.0,) * len(plan) if loop is None else loop.factors(plan),
        sites=family.sites(),
        width=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        num_experts=getattr(config, family.num_experts) if family.router else 0,
        top_k=config.num_experts_per_tok if family.router else 0,
        router=family.router_kind,
        vocab_size=config.vocab_size,
        context=getattr(config, family.context),
        causal=family.causal,
    )


def _loop(model: "PreTrainedModel", config: "PretrainedConfig", family: Family, architecture: Architecture) -> None:
    """Make the authors' list of layers the steps of the plan, and their config say so."""
    layers = model.get_submodule(family.layers[0].removesuffix(".*"))
    run_again(layers, architecture.steps)
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[step.layer] for step in architecture.steps]
    config.num_hidden_layers = len(architecture.steps)


def _require_parts(family: Family, module: nn.Module, layer: int) -> None:
    """Raise `UserError` when a layer is not built as its family's row says."""
    heads_out = family.heads_out if family.heads_apart else ""
    paths = (family.attention, heads_out, family.attn_out, family.mlp_out, family.first_norm, family.second_norm,
             family.router, family.experts, *family.projections.values())  # fmt: skip
    known = dict(module.named_modules())
    if missing := [path for path in paths if path and path not in known]:
        raise UserError(f"every layer must have the parts of its family; layer {layer + 1} has no {missing[0]}")
