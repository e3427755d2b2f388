"""OpenMythos, a package outside transformers: prelude, one block run again and again, coda.

Each visit reads the normed sum of a state, a code of the visit and the prelude's output; what it gives is added to a
decayed state, and a learned halting gate weighs the states into what the coda gets. The block alone is a mixture, so
routers, which not every step has, have no site. `docs/adding_a_family.md` makes a folder of one.
"""

from typing import TYPE_CHECKING

from model.families.family import Family, in_order
from smelt_interp.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """The prelude, the block once a loop, the coda."""
    start, stop = config.prelude_layers, config.prelude_layers + 1 + config.coda_layers
    return in_order([*range(start), *[start] * config.max_loop_iters, *range(start + 1, stop)])


OPEN_MYTHOS = Family(
    layers=("model.prelude.*", "model.recurrent.block", "model.coda.*"),
    plan=plan,
    attention="attn",
    calls="softmax",
    projections={"attn.hook_q": "attn.wq", "attn.hook_k": "attn.wk", "attn.hook_v": "attn.wv"},
    heads_out="attn.wo",
    attn_out="attn",
    mlp_out="ffn",
    first_norm="attn_norm",
    second_norm="ffn_norm",
    halting="model.recurrent.act",
    takes_masks=False,
)
