"""Numbers that are not finite are told at the site that has them."""

import pytest
import torch

from model.hooks.finite import check_finite
from model.network import LoopedMoE
from smelt_interp.errors import UserError
from tests.support.networks import random_tokens, tiny_network

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_site_the_value_and_its_place_are_named(value, dtype):
    x_BTD = torch.zeros(2, 3, 4, dtype=dtype)
    check_finite("blocks.1.hook_resid_pre", x_BTD)
    x_BTD[1, 0, 2] = value
    line = rf"blocks\.1\.hook_resid_pre must be finite; got {value} at index \(1, 0, 2\)"
    with pytest.raises(UserError, match=line):
        check_finite("blocks.1.hook_resid_pre", x_BTD)


def test_scores_of_masked_keys_are_minus_infinite_and_nothing_else_is():
    scores_BQTS = torch.full((1, 1, 2, 2), -INF)
    check_finite("blocks.0.attn.hook_attn_scores", scores_BQTS)
    for value in (NAN, INF):
        scores_BQTS[0, 0, 1, 0] = value
        with pytest.raises(UserError, match=rf"hook_attn_scores must be finite; got {value} at index \(0, 0, 1, 0\)"):
            check_finite("blocks.0.attn.hook_attn_scores", scores_BQTS)


def test_integers_and_nothing_at_all_are_finite():
    check_finite("blocks.0.mlp.hook_expert_indices", torch.tensor([[3, 1]]))
    check_finite("hook_embed", torch.zeros(0, 4))


def spoiled_router() -> LoopedMoE:
    network = tiny_network()
    with torch.no_grad():
        network.layers[2].attn.o_proj.weight[0, 0] = NAN
    return network


def spoiled_readout() -> LoopedMoE:
    network = tiny_network()
    with torch.no_grad():
        network.ln_final.weight[5] = NAN
    return network


def test_a_loss_of_numbers_that_are_not_finite_is_told_where_they_arise():
    """In a layer, the router of its first visit has them; in the last norm, nothing before the logits does."""
    for ask in (lambda network: network.loss(random_tokens()), lambda network: network(random_tokens())):
        with pytest.raises(UserError, match=r"blocks\.2\.mlp\.hook_router_logits must be finite; got nan"):
            ask(spoiled_router())
    with pytest.raises(UserError, match="logits must be finite; got nan"):
        spoiled_readout().loss(random_tokens())
    with pytest.raises(UserError, match="logits must be finite; got nan"):
        spoiled_readout().run_with_cache(random_tokens(), incl_bwd=True)
