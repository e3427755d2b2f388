"""Time generation on this CPU, one token a pass, beside transformers' at the same shape.

    python -m benchmarks.decode

Each network decodes greedily from prompts of the same length; both have the KV cache, QK-norm and random weights.
Every round runs each competitor once; what is reported is the median over rounds of its time / our time, with
quartiles, so above 1 we are faster. Times are the process's CPU time on one thread, the prompt's pass included.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import tyro
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from model.generate import Sampling, generate
from model.network import LoopedMoE
from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import DEMO_SMELT

ONE_VISIT = replace(DEMO_SMELT, num_visits=1, loop_scale=1.0, qk_norm=True, context=512)
SHAPES: dict[str, ModelConfig] = {
    "demo": ONE_VISIT,
    "M": replace(
        ONE_VISIT, width=256, num_heads=8, num_kv_heads=4, head_width=32, num_experts=64, top_k=8, expert_width=96
    ),
}
"""transformers loops no layers, so both run each layer once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to time."""

    shapes: tuple[Literal["demo", "M"], ...] = ("demo", "M")
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 32
    """Tokens of each prompt."""
    new_tokens: int = 64
    rounds: int = 7


def transformers_network(config: ModelConfig) -> Qwen3MoeForCausalLM:
    """Qwen3-MoE of the same shape, fused attention and grouped_mm experts."""
    torch.manual_seed(0)
    network = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads, head_dim=config.head_width,
            num_experts=config.num_experts, num_experts_per_tok=config.top_k, norm_topk_prob=config.renormalise_top_k,
            moe_intermediate_size=config.expert_width, max_position_embeddings=config.context,
            tie_word_embeddings=config.tied_unembedding, attn_implementation="sdpa",
        )
    ).eval()  # fmt: skip
    network.set_experts_implementation("grouped_mm")
    return network


def calls(config: ModelConfig, batch: int, options: Options) -> dict[str, Callable[[], object]]:
    """What each competitor runs in one round: prompts in, new tokens out, none of them a stop."""
    ours, theirs = LoopedMoE(config).eval(), transformers_network(config)
    tokens_BT = torch.randint(0, 256, (batch, options.prompt), generator=torch.Generator().manual_seed(0))
    prompts, sampling = tokens_BT.tolist(), Sampling(max_new_tokens=options.new_tokens)

    def transformers_generate() -> object:
        return theirs.generate(
            tokens_BT, attention_mask=torch.ones_like(tokens_BT), do_sample=False,
            max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens, pad_token_id=0,
        )  # fmt: skip

    return {"ours": lambda: generate(ours, prompts, sampling), "transformers": transformers_generate}


def seconds(competitors: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU time of each call in each round, in random order; a first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in competitors}
    order = random.Random(0)
    for counted in [False] + [True] * rounds:
        for name in order.sample(list(competitors), len(competitors)):
            start = time.process_time()
            competitors[name]()
            if counted:
                taken[name].append(time.process_time() - start)
    return taken


def main() -> None:
    """One line for each shape and batch."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    print("| shape | batch | ours, tokens/s | transformers, tokens/s | ratio | quartiles | rounds |")
    print("|---|---|---|---|---|---|---|")
    for name in options.shapes:
        for batch in options.batches:
            taken = seconds(calls(SHAPES[name], batch, options), options.rounds)
            ratios = [theirs / ours for theirs, ours in zip(taken["transformers"], taken["ours"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            ours, theirs = (batch * options.new_tokens / statistics.median(each) for each in taken.values())
            print(f"| {name} | {batch} | {ours:.0f} | {theirs:.0f} | {middle:.2f} | {low:.2f} to {high:.2f} | "
                  f"{options.rounds} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
