"""GPT-2: learned positions, LayerNorm, queries, keys and values from one map."""

from model.families.family import Family

GPT2 = Family(
    loopable=True,
    layers=("transformer.h.*",),
    final_norm="transformer.ln_f",
    attention="attn",
    rotary=False,
    projections={},
    heads_out="attn.c_proj",
    attn_out="attn",
    first_norm="ln_1",
    second_norm="ln_2",
    norm="LN",
    gated_mlp=False,
)
