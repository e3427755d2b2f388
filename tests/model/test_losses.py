"""Losses: what is averaged, and that padding and the borders of documents never are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.hooks.looped_model import LoopedModel
from smelt_interp.errors import UserError
from tests.support.networks import TINY, random_tokens, tiny_network

INDICES = "mlp.hook_expert_indices"
LONG = replace(TINY, context=200)


def test_the_loss_is_the_mean_over_all_tokens_but_the_first():
    network, tokens_BT = tiny_network(), random_tokens()
    with torch.no_grad():
        logprobs_BTW = network(tokens_BT, attention="fast").log_softmax(-1)
    loss_BT = -logprobs_BTW[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0]
    torch.testing.assert_close(network.loss(tokens_BT).next_token, loss_BT.mean())


def test_the_loss_of_packed_documents_counts_no_target_across_their_border():
    network, (a_T, b_T) = tiny_network(), random_tokens(2, 10)
    start_BT = torch.tensor([[0] * 10 + [10] * 10])
    packed = network.loss(torch.cat((a_T, b_T))[None], segment_start_BT=start_BT)
    apart = [network.loss(each[None]).next_token for each in (a_T, b_T)]
    torch.testing.assert_close(packed.next_token, sum(apart) / 2)


def test_the_balance_loss_is_the_mean_over_steps():
    """Worked from what the hooks see."""
    network, tokens_BT = tiny_network(), random_tokens()
    _, cache = network.run_with_cache(tokens_BT, attention="fast")
    losses = []
    for step in range(6):
        share_E = torch.zeros(6)
        for expert in cache[INDICES, step].flatten().tolist():
            share_E[expert] += 1 / (3 * 12 * 2)
        losses.append(6 * (cache["mlp.hook_router_logits", step].softmax(-1).mean((0, 1)) * share_E).sum())
    torch.testing.assert_close(network.loss(tokens_BT).balance, torch.stack(losses).mean())


def test_a_loss_needs_something_to_predict():
    with pytest.raises(UserError, match="rows of at least 2 tokens"):
        tiny_network().loss(random_tokens(2, 1))


def test_a_loss_over_documents_of_one_token_each_is_refused():
    """Every token is the first of its document, so none is a target: a mean over nothing would be not-a-number."""
    network, tokens_BT = tiny_network(), random_tokens(2, 6)
    start_BT = torch.arange(6).repeat(2, 1)
    with pytest.raises(
        UserError, match=r"a loss must have a token to predict: one that is neither padding nor the first .*; got 0"
    ):
        network.loss(tokens_BT, segment_start_BT=start_BT)
    start_BT[1, 5] = 4  # one target
    expected = -network(tokens_BT, segment_start_BT=start_BT)[1, 4].log_softmax(-1)[tokens_BT[1, 5]]
    torch.testing.assert_close(network.loss(tokens_BT, segment_start_BT=start_BT).next_token, expected)


def test_a_backward_pass_without_a_metric_needs_something_to_predict():
    with pytest.raises(UserError, match="a loss must have rows of at least 2 tokens, one to predict; got 1"):
        tiny_network().run_with_cache(random_tokens(2, 1), incl_bwd=True)


def padded(text_BT: Tensor, left: int, right: int) -> tuple[Tensor, Tensor, Tensor]:
    """The text with padding on both sides, its attention mask, and its segments as packing writes them: a position of
    padding is a segment of its own."""
    batch, length = text_BT.shape
    total = left + length + right
    tokens_BT, mask_BT = torch.full((batch, total), 258), torch.zeros(batch, total, dtype=torch.long)
    start_BT = torch.arange(total).repeat(batch, 1)
    tokens_BT[:, left : left + length], mask_BT[:, left : left + length] = text_BT, 1
    start_BT[:, left : left + length] = left
    return tokens_BT, mask_BT, start_BT


@pytest.mark.parametrize("attention", ["eager", "fast"])
@pytest.mark.parametrize(("left", "right"), [(20, 0), (0, 20), (7, 9)])
def test_padding_changes_no_loss_and_no_gradient(left, right, attention):
    """By attention mask, by segments, and by both."""
    text_BT = random_tokens(2, 30)
    tokens_BT, mask_BT, start_BT = padded(text_BT, left, right)
    plain = tiny_network(LONG)
    expected = plain.loss(text_BT, attention=attention)
    sum(expected).backward()
    ways = [{"attention_mask_BT": mask_BT}, {"segment_start_BT": start_BT}]
    for masks in (*ways, ways[0] | ways[1]):
        network = tiny_network(LONG)
        loss = network.loss(tokens_BT, attention=attention, **masks)
        torch.testing.assert_close(loss, expected)
        sum(loss).backward()
        for weight, other in zip(network.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, other.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("masked_by", ["attention_mask_BT", "segment_start_BT"])
def test_the_default_metric_gives_real_tokens_the_gradients_they_have_without_padding(masked_by):
    text_BT = random_tokens(2, 30)
    tokens_BT, mask_BT, start_BT = padded(text_BT, 20, 0)
    masks = {"attention_mask_BT": mask_BT, "segment_start_BT": start_BT}
    names = ["hook_embed", "blocks.3.hook_resid_post", "blocks.1.attn.hook_q"]
    _, plain = tiny_network(LONG).run_with_cache(text_BT, names_filter=names, incl_bwd=True)
    _, cache = tiny_network(LONG).run_with_cache(
        tokens_BT, names_filter=names, incl_bwd=True, **{masked_by: masks[masked_by]}
    )
    for name in names:
        torch.testing.assert_close(cache[f"{name}_grad"][:, 20:], plain[f"{name}_grad"], atol=1e-7, rtol=1e-4)
        assert not cache[f"{name}_grad"][:, :20].any()


def test_one_text_has_one_balance_however_long_its_row_is():
    network, text_BT, found = tiny_network(LONG), random_tokens(1, 50), []
    for length in (55, 110, 160):
        tokens_BT, mask_BT, start_BT = padded(text_BT, 0, length - 50)
        for masks in ({"segment_start_BT": start_BT}, {"segment_start_BT": start_BT, "attention_mask_BT": mask_BT}):
            found.append(network.loss(tokens_BT, **masks))
    for loss in found[1:]:
        torch.testing.assert_close(loss, found[0])
    assert not torch.isclose(found[0].balance, network.loss(tokens_BT).balance, rtol=0.01)


@torch.no_grad()
def test_routing_losses_are_means_or_sums_over_steps_as_asked():
    network, tokens_BT = tiny_network(), random_tokens()
    mean, total = network.loss(tokens_BT), network.loss(tokens_BT, over_steps="sum")
    torch.testing.assert_close(total.balance, 6 * mean.balance)
    torch.testing.assert_close(total.router_z, 6 * mean.router_z)
    assert total.next_token == mean.next_token
    with pytest.raises(UserError, match="over_steps must be 'mean' or 'sum'; got 'max'"):
        network.loss(tokens_BT, over_steps="max")


@torch.no_grad()
def test_the_router_z_loss_is_worked_from_what_the_hooks_see():
    network, tokens_BT = tiny_network(), random_tokens()
    _, cache = network.run_with_cache(tokens_BT, attention="fast")
    squares = [cache["mlp.hook_router_logits", step].exp().sum(-1).log().square().mean() for step in range(6)]
    torch.testing.assert_close(network.loss(tokens_BT).router_z, torch.stack(squares).mean())


def test_a_loss_of_padding_alone_is_refused():
    network: LoopedModel = tiny_network()
    mask_BT = torch.tensor([[0, 0, 1]])
    for ask in (
        lambda: network.loss(random_tokens(1, 3), attention_mask_BT=mask_BT),
        lambda: network.run_with_cache(random_tokens(1, 3), attention_mask_BT=mask_BT, incl_bwd=True),
    ):
        with pytest.raises(UserError, match="neither padding nor the first of its document; got 0"):
            ask()
