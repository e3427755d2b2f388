"""Budgets are what the network has and what torch counts in a pass."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.layer import Pass
from model.network import LoopedMoE
from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import budget
from smelt_interp.costs.presets import DEMO_BASELINE, DEMO_SMELT, PAPER_ROWS
from smelt_interp.plan import plan

CONFIGS = {
    **{" ".join(key): config for key, config in PAPER_ROWS.items()},
    "demo smelt": DEMO_SMELT,
    "demo baseline": DEMO_BASELINE,
    "query and key gains": replace(DEMO_SMELT, qk_norm=True),
    "query and key gains over all heads": replace(DEMO_SMELT, qk_norm=True, qk_norm_over="all heads"),
    "ungated": replace(DEMO_SMELT, gated_experts=False),
    "tied": replace(DEMO_SMELT, tied_unembedding=True),
    "heads wider than the stream": replace(DEMO_SMELT, head_width=40),
    "three visits": replace(DEMO_SMELT, num_visits=3),
}


def grouped_flops(rows_RK: tuple[int, int], weights_EKG: tuple[int, int, int], *_: object, **__: object) -> int:
    """Each row is multiplied with the matrix of its own expert alone; torch's counter leaves this product out."""
    return 2 * rows_RK[0] * weights_EKG[1] * weights_EKG[2]


def meta_network(config: ModelConfig) -> LoopedMoE:
    with torch.device("meta"):
        return LoopedMoE(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_numel_of_the_network(name: str) -> None:
    network = meta_network(CONFIGS[name])
    counted = budget(CONFIGS[name]).parameters
    sizes = {parameter: value.numel() for parameter, value in network.named_parameters()}
    assert sum(sizes.values()) == counted.stored
    assert sum(size for parameter, size in sizes.items() if "embed" not in parameter) == counted.total
    assert sum(size for parameter, size in sizes.items() if "router" in parameter) == counted.router
    assert sum(size for parameter, size in sizes.items() if ".w_" in parameter) == counted.experts
    assert sum(size for parameter, size in sizes.items() if "_proj" in parameter) == counted.projections


@pytest.mark.parametrize("name", ["demo smelt", "demo baseline", "ungated", "heads wider than the stream", "tied"])
def test_flops_are_what_torch_counts_in_a_forward_pass(name: str) -> None:
    config, batch, length = CONFIGS[name], 2, 16
    network = LoopedMoE(config)
    mapping = {torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
        network(torch.zeros(batch, length, dtype=torch.long), attention="eager")
    unembedding = 2 * config.width * config.vocab_size
    # Eager attention computes every score and masks after, so each query pays for the whole row.
    expected = budget(config, length).flops.forward + unembedding
    assert counter.get_total_flops() == batch * length * expected


@pytest.mark.parametrize("name", ["200M smelt", "1.6B baseline", "heads wider than the stream"])
def test_flops_of_a_step_are_what_torch_counts_on_the_meta_device(name: str) -> None:
    config, length = CONFIGS[name], 512
    network = meta_network(config)
    request = network.request(attention="fast")
    run = Pass(request=request, allowed_BTS=None, cos_BT1C=None, sin_BT1C=None, kv_cache=None, routings=[])
    x_BTD = torch.empty(1, length, config.width, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.layers[0].attn(x_BTD, hooks=network.blocks[0].attn, scale=1.0, run=run)
        network.layers[0].mlp.router(x_BTD)
    flops = budget(config, length).flops
    expected = (flops.projections + flops.scores + flops.router) / len(plan(config))
    assert counter.get_total_flops() == length * expected
