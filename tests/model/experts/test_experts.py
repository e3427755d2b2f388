"""The expert layer's values on the CPU: equal to a float64 loop at every shape, and the identities it must keep."""

import pytest
import torch

from model.experts.call import ExpertCall, ExpertWeights, sum_slots
from model.experts.expert_layer import experts, experts_traced
from model.routing import gather_weights, route
from tests.support.experts_oracle import (
    assert_close,
    assert_equal_bits,
    layer_inputs,
    ours_and_truth,
    relative_error,
    with_gradients,
)

BACKENDS = ("reference", "torch", "auto")
BOUND = 1e-6
"""float32 against float64, relative to each tensor's own norm."""


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 63, 65, 127, 129])
def test_any_number_of_tokens(tokens, backend, gated):
    assert_close(*ours_and_truth(layer_inputs(tokens=tokens, gated=gated), backend=backend, gated=gated), BOUND)


@pytest.mark.parametrize(
    ("width", "expert_width"), [(1056, 352), (40, 24), (24, 40), (20, 6), (6, 20), (18, 6), (7, 5), (1, 1)]
)
def test_any_widths(width, expert_width):
    inputs = layer_inputs(tokens=9, width=width, expert_width=expert_width, num_experts=3)
    assert_close(*ours_and_truth(inputs, backend="torch"), BOUND)


@pytest.mark.parametrize("top_k", [1, 3, 5, 8, 11])
def test_any_number_of_choices(top_k):
    assert_close(*ours_and_truth(layer_inputs(tokens=13, num_experts=11, top_k=top_k), backend="torch"), BOUND)


def test_every_count_of_tokens_up_to_128():
    for tokens in range(1, 129):
        x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=tokens, num_experts=7, top_k=3)
        loop, *others = (experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=b)) for b in BACKENDS)
        assert all(relative_error(other, loop) <= BOUND for other in others), tokens


@pytest.mark.parametrize("width", [4, 20, 64, 192])
@pytest.mark.portable
def test_slots_are_added_in_the_order_of_the_choices(width):
    """In numbers of very unequal size any other order shows."""
    generator = torch.Generator().manual_seed(0)
    for top_k in range(1, 20):
        x_ND, indices_NK, _, weights = layer_inputs(tokens=7, width=width, num_experts=20, expert_width=8, top_k=top_k)
        weights_NK = 10 ** (6 * torch.rand(7, top_k, generator=generator) - 3)
        call = ExpertCall(x_ND, indices_NK, weights_NK, weights)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for part in (call, ExpertCall(x_ND[:1], indices_NK[:1], weights_NK[:1], weights)):
                    assert torch.equal(sum_slots(experts_traced(part).slot_NKD), experts(part)), top_k


def test_winners_above_id_255_are_used():
    x_ND, _, _, weights = layer_inputs(tokens=6, num_experts=288, top_k=8)
    logits_NE = torch.arange(288.0).expand(6, 288) / 100
    indices_NK, weights_NK, *_ = route(logits_NE, 8, router="softmax", renormalise=True)
    assert indices_NK.min() == 280
    assert_close(*ours_and_truth((x_ND, indices_NK, weights_NK, weights), backend="torch"), BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_tokens_on_one_expert_leave_the_others_exactly_zero_gradients(backend):
    x_ND, _, weights_NK, weights = layer_inputs(tokens=21, top_k=1)
    inputs = (x_ND, torch.full((21, 1), 3), weights_NK, weights)
    ours, truth = ours_and_truth(inputs, backend=backend)
    assert_close(ours, truth, BOUND)
    for name in ("w_in", "w_out"):
        assert torch.count_nonzero(ours[name][[0, 1, 2, 4]]) == 0


def test_one_expert_alone_is_an_ordinary_mlp():
    assert_close(*ours_and_truth(layer_inputs(tokens=8, num_experts=1, top_k=1), backend="torch"), BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_may_choose_one_expert_twice(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=10)
    indices_NK[4:] = indices_NK[4:, :1]
    assert_close(*ours_and_truth((x_ND, indices_NK, weights_NK, weights), backend=backend), BOUND)


def test_the_comparison_catches_sixteen_columns_set_to_zero():
    ours, truth = ours_and_truth(layer_inputs(tokens=33, width=1056, num_experts=2), backend="torch")
    assert_close(ours, truth, BOUND)
    for name in ("out", "x", "w_in", "w_out"):
        broken = {**ours, name: ours[name].clone()}
        broken[name].flatten(0, -2)[:, :16] = 0
        with pytest.raises(AssertionError, match=name):
            assert_close(broken, truth, BOUND)


def test_the_comparison_catches_gate_and_up_exchanged():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=33)
    exchanged = ExpertWeights(weights.w_in.roll(20, dims=1), weights.w_out)
    right, wrong = (
        with_gradients(lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m)), x_ND, weights_NK, each)
        for each in (weights, exchanged)
    )
    with pytest.raises(AssertionError, match="out"):
        assert_close(wrong, right, BOUND)


@pytest.mark.portable
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_may_come_in_any_order(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    straight = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=backend))
    shuffled = experts(ExpertCall(x_ND[order], indices_NK[order], weights_NK[order], weights, backend=backend))
    assert relative_error(shuffled, straight[order]) <= BOUND


@pytest.mark.portable
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_may_be_relabelled(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=40)
    new_label = torch.tensor([3, 0, 4, 1, 2])
    renamed = ExpertWeights(*(matrix[new_label.argsort()] for matrix in weights))
    straight = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=backend))
    relabelled = experts(ExpertCall(x_ND, new_label[indices_NK], weights_NK, renamed, backend=backend))
    assert relative_error(relabelled, straight) <= BOUND


def test_the_output_is_linear_in_the_expert_weights():
    x_ND, indices_NK, first_NK, weights = layer_inputs(tokens=12, dtype=torch.float64)
    second_NK = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    mixed, one, two = (
        experts(ExpertCall(x_ND, indices_NK, weight, weights))
        for weight in (2 * first_NK - 3 * second_NK, first_NK, second_NK)
    )
    torch.testing.assert_close(mixed, 2 * one - 3 * two)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_is_the_same_pass_to_the_bit(backend, gated):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=19, gated=gated, num_experts=7, top_k=3)
    plain, traced, through_slots = (
        with_gradients(
            lambda x, w, m, run=run: run(ExpertCall(x, indices_NK, w, m, gated=gated, backend=backend)),
            x_ND, weights_NK, weights,
        )
        for run in (experts, lambda c: experts_traced(c).out_ND, lambda c: sum_slots(experts_traced(c).slot_NKD))
    )  # fmt: skip
    assert_equal_bits(traced, plain)
    assert_equal_bits(through_slots, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_edited_in_place_leaves_the_only_slot_alone(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=4, top_k=1)
    trace = experts_traced(ExpertCall(x_ND.requires_grad_(), indices_NK, weights_NK, weights, backend=backend))
    slot_ND = trace.slot_NKD[:, 0].detach().clone()
    trace.out_ND.mul_(2)
    assert torch.equal(trace.slot_NKD[:, 0], slot_ND)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_holds_what_its_fields_say(backend, gated):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=19, gated=gated, num_experts=7, top_k=3)
    trace = experts_traced(ExpertCall(x_ND, indices_NK, weights_NK, weights, gated=gated, backend=backend))
    chosen_R = indices_NK.flatten()[trace.order_R]
    assert chosen_R.tolist() == sorted(indices_NK.flatten().tolist())
    assert trace.counts_E.tolist() == [int((indices_NK == expert).sum()) for expert in range(7)]
    inputs_RD = x_ND[trace.order_R // 3]
    pre_RG = torch.einsum("rgd,rd->rg", weights.w_in[chosen_R], inputs_RD)
    torch.testing.assert_close(trace.pre_activation_RG, pre_RG)
    act_RF = torch.nn.functional.silu(pre_RG[:, :20]) * (pre_RG[:, 20:] if gated else 1)
    torch.testing.assert_close(trace.activation_RF, act_RF)
    out_RD = torch.einsum("rdf,rf->rd", weights.w_out[chosen_R], act_RF) * weights_NK.flatten()[trace.order_R, None]
    torch.testing.assert_close(trace.slot_NKD.flatten(0, 1)[trace.order_R], out_RD)


@pytest.mark.portable
def test_replayed_routing_gives_the_live_output_to_the_bit():
    x_ND, _, _, weights = layer_inputs(tokens=50, num_experts=16)
    logits_NE = torch.randn(50, 16, generator=torch.Generator().manual_seed(8))
    indices_NK, live_NK, scores_NE, _ = route(logits_NE, 4, router="softmax", renormalise=True)
    replayed_NK = gather_weights(scores_NE, indices_NK.clone(), renormalise=True)
    live, replayed = (experts(ExpertCall(x_ND, indices_NK, w, weights)) for w in (live_NK, replayed_NK))
    assert torch.equal(live, replayed)


@pytest.mark.parametrize("threads", [1, 2])
def test_two_calls_agree_to_the_bit(threads):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=300, num_experts=16, top_k=4, width=64)
    torch.set_num_threads(threads)
    try:
        first, second = (
            with_gradients(lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m)), x_ND, weights_NK, weights)
            for _ in range(2)
        )
    finally:
        torch.set_num_threads(1)
    assert_equal_bits(first, second)


def test_a_nan_in_one_token_stays_in_that_token():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=20)
    clean = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights))
    x_ND[7] = float("nan")
    out_ND = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights))
    assert out_ND[7].isnan().all()
    others = torch.arange(20) != 7
    assert relative_error(out_ND[others], clean[others]) <= BOUND
