"""The arithmetic of one layer, each part against its definition."""

from dataclasses import replace

import torch

from model.inputs import Inputs, rotary
from model.layer import RMSNorm, rotate
from model.network import LoopedMoE
from smelt_interp.plan import Step
from tests.support.configs import TINY
from tests.support.networks import random_tokens, tiny_network


def test_the_norm_makes_the_root_mean_square_the_gain():
    norm = RMSNorm(16, 1e-6)
    x_BTD = 5 * torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    out_BTD = norm(x_BTD)
    torch.testing.assert_close(out_BTD.square().mean(-1), torch.ones(3, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(norm(7 * x_BTD), out_BTD, atol=1e-5, rtol=0)
    with torch.no_grad():
        norm.weight.mul_(3)
    torch.testing.assert_close(norm(x_BTD), 3 * out_BTD)


def test_the_norm_of_zeros_is_zero_and_of_half_precision_is_summed_in_single():
    assert not RMSNorm(8, 1e-6)(torch.zeros(2, 8)).any()
    large_BD = torch.full((1, 8), 3e4, dtype=torch.float16)  # its square does not fit float16
    assert torch.isfinite(RMSNorm(8, 1e-6).half()(large_BD)).all()


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q_C, k_C = torch.randn(8, generator=generator), torch.randn(8, generator=generator)

    def score(query: int, key: int) -> float:
        rotated = [
            rotate(x_C[None, None, None], *rotary(TINY, torch.tensor([[position]])))
            for x_C, position in ((q_C, query), (k_C, key))
        ]
        assert torch.allclose(rotated[0].norm(), q_C.norm())
        return float((rotated[0] * rotated[1]).sum())

    assert abs(score(9, 4) - score(40, 35)) < 1e-5
    assert abs(score(9, 4) - score(9, 5)) > 1e-3
    assert abs(score(3, 3) - float(q_C @ k_C)) < 1e-5


def test_without_a_rotary_embedding_nothing_is_rotated():
    config = replace(TINY, rope_base=None)
    x_BTHC = torch.randn(1, 5, 2, 8)
    assert rotate(x_BTHC, *rotary(config, torch.arange(5)[None])) is x_BTHC


@torch.no_grad()
def test_query_heads_read_the_key_head_of_their_group():
    """Changing key/value head 1 of 2 reaches the query heads 2 and 3 of 4 and no other."""
    network, tokens_BT = tiny_network(), random_tokens()
    _, before = network.run_with_cache(tokens_BT, stop_at=(1, 0))
    for weight in (network.layers[0].attn.k_proj.weight, network.layers[0].attn.v_proj.weight):
        weight[8:].mul_(2)
    _, after = network.run_with_cache(tokens_BT, stop_at=(1, 0))
    same_Q = [
        torch.equal(before["attn.hook_z", 0][:, :, head], after["attn.hook_z", 0][:, :, head]) for head in range(4)
    ]
    assert same_Q == [True, True, False, False]


@torch.no_grad()
def test_the_pattern_is_a_distribution_over_what_a_query_may_see():
    network, tokens_BT = tiny_network(), random_tokens(2, 12)
    segment_start_BT = torch.tensor([[0] * 5 + [5] * 7, [0] * 12])
    _, cache = network.run_with_cache(tokens_BT, segment_start_BT=segment_start_BT)
    for step in range(6):
        pattern_BQTS = cache["attn.hook_pattern", step]
        torch.testing.assert_close(pattern_BQTS.sum(-1), torch.ones(2, 4, 12))
        for row, query in ((row, query) for row in range(2) for query in range(12)):
            start = int(segment_start_BT[row, query])
            seen_S = torch.zeros(12, dtype=torch.bool)
            seen_S[start : query + 1] = True
            assert torch.equal((pattern_BQTS[row, :, query] > 0).all(0), seen_S)
            assert torch.equal(pattern_BQTS[row, :, query] != 0, seen_S.expand(4, 12))


@torch.no_grad()
def test_nothing_attends_to_padding():
    network, tokens_BT = tiny_network(), random_tokens(1, 8)
    mask_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    _, cache = network.run_with_cache(tokens_BT, attention_mask_BT=mask_BS)
    assert not cache["attn.hook_pattern", 4][0, :, 3:, :3].any()
    other_BT = tokens_BT.clone()
    other_BT[0, :3] = 9
    logits = [network(each_BT, attention_mask_BT=mask_BS)[:, 3:] for each_BT in (tokens_BT, other_BT)]
    torch.testing.assert_close(*logits, atol=1e-6, rtol=0)  # experts share products with padding: rounding differs


def test_positions_start_anew_with_each_document_and_after_padding():
    """Read from the cosines: position 0 is all ones."""
    network = tiny_network()
    request = network.request()
    tokens_BT = random_tokens(1, 6)
    packed = Inputs(values=tokens_BT, segment_start_BT=torch.tensor([[0, 0, 0, 3, 3, 3]])).prepare(TINY, request, [])
    padded = Inputs(values=tokens_BT, attention_mask_BT=torch.tensor([[0, 0, 0, 1, 1, 1]])).prepare(TINY, request, [])
    plain = Inputs(values=tokens_BT).prepare(TINY, request, [])
    assert torch.equal(packed.cos_BT1C[0, 3:], plain.cos_BT1C[0, :3])
    assert torch.equal(padded.cos_BT1C[0, 3:], plain.cos_BT1C[0, :3])
    assert (plain.cos_BT1C[0, 0] == 1).all()
    assert plain.allowed_BTS is None


@torch.no_grad()
def test_a_layer_run_by_its_step_is_the_step():
    """The weights are asked for through the layer's own call: sharding and profilers see every use."""
    network: LoopedMoE = tiny_network()
    calls: list[int] = []
    for index, layer in enumerate(network.layers):
        layer.register_forward_hook(lambda module, inputs, output, index=index: calls.append(index))
    network(random_tokens())
    assert calls == [step.layer for step in network.plan] == [0, 1, 2, 1, 2, 3]
    assert network.plan[3] == Step(1, 1)
