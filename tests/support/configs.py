"""Small configs, the paper's shape and every way to depart from it."""

from dataclasses import replace

from smelt_interp.config import ModelConfig

TINY = ModelConfig(
    num_layers=4, width=16, num_heads=4, num_kv_heads=2, head_width=8, num_experts=6, top_k=2, expert_width=12,
    vocab_size=259, context=64, loop_start=1, loop_stop=3, num_visits=2, loop_scale=0.5,
)  # fmt: skip
"""Steps 0 | 1 2 | 3 4 | 5: layers 1 and 2 are visited twice."""
TINY_BASELINE = replace(TINY, num_visits=1, loop_scale=1.0)

VARIANTS: dict[str, ModelConfig] = {
    "as the paper": TINY,
    "Baseline": TINY_BASELINE,
    "one visit, scale kept": replace(TINY, num_visits=1),
    "three visits": replace(TINY, num_visits=3, loop_scale=1 / 3),
    "four visits, built for two": replace(TINY, num_visits=4),
    "all layers looped": replace(TINY, loop_start=0, loop_stop=4),
    "nothing looped": replace(TINY, loop_start=2, loop_stop=2, num_visits=1),
    "QK-norm": replace(TINY, qk_norm=True),
    "QK-norm over all heads": replace(TINY, qk_norm=True, qk_norm_over="all heads"),
    "no RoPE": replace(TINY, rope_base=None),
    "sigmoid router": replace(TINY, router="sigmoid"),
    "not renormalised": replace(TINY, renormalise_top_k=False),
    "sigmoid, not renormalised": replace(TINY, router="sigmoid", renormalise_top_k=False),
    "ungated experts": replace(TINY, gated_experts=False),
    "tied unembedding": replace(TINY, tied_unembedding=True),
    "one key head, all experts": replace(TINY, num_kv_heads=1, top_k=6),
    "scale 1": replace(TINY, loop_scale=1.0),
}
