"""nnsight on a looped network: one visit by its path, without counting calls."""

import torch

from tests.support.networks import random_tokens, tiny_network

STEP = 4  # layer 2, visit 2


@torch.no_grad()
def plain_run(network, tokens_BT, **hooks):
    return network.run_with_hooks(tokens_BT, **hooks)


def test_read_edit_skip_and_differentiate_one_visit():
    """All in one function: importing nnsight puts `.save` on every object of the process."""
    from nnsight import NNsight

    network, tokens_BT = tiny_network(), random_tokens()
    looked_at = NNsight(network)
    logits_BTW, cache = network.run_with_cache(tokens_BT)

    with looked_at.trace(tokens_BT):
        before = looked_at.blocks[2].attn.hook_pattern.output.save()
        pattern = looked_at.blocks[STEP].attn.hook_pattern.output.save()
        chosen = looked_at.blocks[STEP].mlp.hook_expert_indices.output.save()
        stream = looked_at.blocks[STEP].output.save()
        out = looked_at.output.save()
    assert torch.equal(before, cache["attn.hook_pattern", (2, 0)])
    assert torch.equal(pattern, cache["attn.hook_pattern", (2, 1)])
    assert torch.equal(chosen, cache["mlp.hook_expert_indices", (2, 1)])
    assert torch.equal(stream, cache["hook_resid_post", (2, 1)])
    assert torch.equal(out, logits_BTW)

    with looked_at.trace(tokens_BT):
        looked_at.blocks[STEP].hook_mlp_out.output = looked_at.blocks[STEP].hook_mlp_out.output * 0
        edited = looked_at.output.save()
    expected = plain_run(network, tokens_BT, fwd_hooks=[("blocks.4.hook_mlp_out", lambda x, hook: x * 0)])
    assert torch.equal(edited, expected)
    assert not torch.equal(edited, logits_BTW)

    with looked_at.trace(tokens_BT):
        looked_at.blocks[STEP].skip(looked_at.blocks[STEP - 1].output)
        skipped = looked_at.output.save()
    resid_BTD = network(tokens_BT, stop_at=(2, 1))
    assert torch.equal(skipped, network(resid_BTD, start_at=(3, 0)))

    _, with_gradients = network.run_with_cache(tokens_BT, incl_bwd=True, metric=lambda logits: logits[:, -1, 7].sum())
    with looked_at.trace(tokens_BT):
        value = looked_at.blocks[STEP].hook_resid_post.output
        metric = looked_at.output[:, -1, 7].sum()
        with metric.backward():
            gradient = value.grad.save()
    torch.testing.assert_close(gradient, with_gradients["blocks.4.hook_resid_post_grad"])
    assert torch.equal(network(tokens_BT), logits_BTW)
