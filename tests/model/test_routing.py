"""Routing: the chosen experts, their weights, and what is refused."""

import math

import numpy as np
import pytest
import torch

from model.routing import Routing, balance_loss, gather_weights, route, router_z_loss
from smelt_interp.errors import UserError

pytestmark = pytest.mark.portable


def test_two_tokens_worked_by_hand():
    routing = route(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, -1.0]]), 2, router="softmax", renormalise=True)
    assert routing.expert_indices_NK.tolist() == [[1, 2], [0, 1]]
    share = 1 / (1 + np.exp(-1.0))
    torch.testing.assert_close(routing.expert_weights_NK, torch.tensor([[share, 1 - share], [0.5, 0.5]]).float())


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (11, 2), (16, 16), (288, 8), (37, 5)])
def test_ties_go_to_the_lowest_id(router, num_experts, top_k):
    """Against a sort of (-logit, id) pairs in plain Python, on logits of which many are equal."""
    generator = torch.Generator().manual_seed(0)
    logits_NE = torch.randint(-2, 3, (40, num_experts), generator=generator).float()
    routing = route(logits_NE, top_k, router=router, renormalise=False)
    for row, chosen in zip(logits_NE.tolist(), routing.expert_indices_NK.tolist(), strict=True):
        assert chosen == sorted(range(num_experts), key=lambda expert: (-row[expert], expert))[:top_k]


def test_all_logits_equal_choose_the_first_experts():
    routing = route(torch.zeros(3, 288), 8, router="softmax", renormalise=True)
    assert routing.expert_indices_NK.tolist() == [list(range(8))] * 3


def test_winners_above_id_255_are_found():
    logits_NE = torch.zeros(2, 288)
    logits_NE[0, 287], logits_NE[1, 256] = 5.0, 5.0
    routing = route(logits_NE, 1, router="softmax", renormalise=True)
    assert routing.expert_indices_NK.tolist() == [[287], [256]]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_half_precision_logits_are_scored_in_float32(router):
    logits_NE = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    half = route(logits_NE, 4, router=router, renormalise=True)
    full = route(logits_NE.float(), 4, router=router, renormalise=True)
    assert half.scores_NE.dtype == half.expert_weights_NK.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(half, full, strict=True))


def test_gathering_the_chosen_indices_again_gives_the_same_weights_to_the_bit():
    logits_NE = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))
    for renormalise in (False, True):
        routing = route(logits_NE, 3, router="softmax", renormalise=renormalise)
        again = gather_weights(routing.scores_NE, routing.expert_indices_NK, renormalise=renormalise)
        assert torch.equal(again, routing.expert_weights_NK)


def test_edited_indices_take_their_own_scores():
    routing = route(torch.tensor([[0.0, 2.0, 1.0]]), 1, router="softmax", renormalise=False)
    edited = gather_weights(routing.scores_NE, torch.tensor([[2]]), renormalise=False)
    assert edited.item() == routing.scores_NE[0, 2].item()


def test_weights_carry_the_gradient_of_the_scores():
    logits_NE = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weights = lambda logits: route(logits, 2, router="softmax", renormalise=True).expert_weights_NK
    assert torch.autograd.gradcheck(weights, logits_NE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_not_finite_is_named(value):
    logits_NE = torch.zeros(4, 5)
    logits_NE[2, 3] = value
    with pytest.raises(UserError, match=rf"router logits must be finite; got {value} at index \(2, 3\)"):
        route(logits_NE, 2, router="softmax", renormalise=True)
    with pytest.raises(UserError, match="router logits must be finite"):
        route(torch.full((1, 5), value), 2, router="sigmoid", renormalise=True)


@pytest.mark.parametrize("top_k", [0, 6])
def test_top_k_outside_the_experts_is_refused(top_k):
    with pytest.raises(UserError, match=rf"top_k must be in 1\.\.5.*got {top_k}"):
        route(torch.zeros(1, 5), top_k, router="softmax", renormalise=True)


@pytest.mark.parametrize("index", [-1, 5])
def test_edited_indices_outside_the_experts_are_refused(index):
    with pytest.raises(UserError, match=rf"expert indices must lie in 0\.\.4; got {index}"):
        gather_weights(torch.ones(1, 5), torch.tensor([[index]]), renormalise=False)


def test_edited_indices_must_be_integers():
    with pytest.raises(UserError, match=r"expert indices must be int64 or int32; got torch\.float32"):
        gather_weights(torch.ones(1, 5), torch.tensor([[2.0]]), renormalise=False)


def test_no_tokens_route_to_no_experts():
    routing = route(torch.zeros(0, 5), 2, router="softmax", renormalise=True)
    assert routing.expert_indices_NK.shape == routing.expert_weights_NK.shape == (0, 2)


def routed(scores_NE: torch.Tensor, indices_NK: torch.Tensor) -> Routing:
    return Routing(indices_NK, scores_NE.gather(-1, indices_NK), scores_NE, scores_NE.log())


ALL = torch.ones(4, dtype=torch.bool)


def test_balance_loss_is_one_when_uniform_and_num_experts_when_collapsed():
    uniform = balance_loss(routed(torch.full((4, 4), 0.25), torch.tensor([[0], [1], [2], [3]])), ALL)
    collapsed = balance_loss(routed(torch.eye(4)[[2, 2, 2, 2]], torch.tensor([[2], [2], [2], [2]])), ALL)
    assert uniform.item() == 1.0
    assert collapsed.item() == 4.0


def test_balance_loss_pushes_the_busiest_expert_down():
    logits_NE = torch.randn(64, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with torch.no_grad():
        logits_NE[:, 5] += 3
    routing = route(logits_NE, 2, router="softmax", renormalise=True)
    balance_loss(routing, torch.ones(64)).backward()
    assert logits_NE.grad.mean(0).argmax() == 5


def test_router_z_loss_is_the_mean_square_of_the_log_of_the_sum():
    """Worked by hand: logits of ln 1, ln 3 sum to 4 in the exponential; those of zeros to 2."""
    routing = route(torch.tensor([[0.0, 0.0], [0.0, math.log(3)]]), 1, router="sigmoid", renormalise=False)
    assert router_z_loss(routing, torch.ones(2)).item() == pytest.approx((math.log(2) ** 2 + math.log(4) ** 2) / 2)


@pytest.mark.parametrize("loss", [balance_loss, router_z_loss])
def test_a_token_that_does_not_count_changes_no_routing_loss(loss):
    logits_NE = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
    whole = route(logits_NE, 2, router="softmax", renormalise=True)
    part = route(logits_NE[1:4], 2, router="softmax", renormalise=True)
    counts_N = torch.tensor([False, True, True, True, False, False])
    torch.testing.assert_close(loss(whole, counts_N), loss(part, torch.ones(3)))
    assert not torch.isclose(loss(whole, torch.ones(6)), loss(part, torch.ones(3)))
