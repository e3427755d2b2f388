"""The cache by visit: its keys, its copies, and its gradients."""

import pytest
import torch
from torch import Tensor

from model.hooks.activation_cache import VisitCache
from model.losses import next_token_loss
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, hook_name
from tests.support.networks import random_tokens, tiny_network

NETWORK = tiny_network()
TOKENS_BT = random_tokens()
EVERYTHING = {"head_results": True, "expert_results": True}


@pytest.fixture(scope="module")
def cache() -> VisitCache:
    with torch.no_grad():
        return NETWORK.run_with_cache(TOKENS_BT, **EVERYTHING)[1]


@pytest.mark.parametrize("suffix", SITES)
def test_a_suffix_is_read_by_step_by_visit_and_by_name(cache, suffix):
    for step, (layer, visit) in enumerate(NETWORK.plan):
        by_name = cache[hook_name(step, suffix)]
        assert cache[suffix, step] is by_name
        assert cache[suffix, (layer, visit)] is by_name
        assert cache[suffix, step - 6] is by_name


def test_transformer_lens_names_take_a_visit_too(cache):
    step = NETWORK.step(2, 1)
    assert cache["resid_pre", (2, 1)] is cache["hook_resid_pre", step]
    assert cache["pattern", (2, 1)] is cache["attn.hook_pattern", step]
    assert cache["scale", (2, 1), "ln2"] is cache["ln2.hook_scale", step]
    assert cache["result", step, "attn"] is cache["attn.hook_result", step]
    assert cache["q", -1] is cache["attn.hook_q", 5]
    assert cache["embed"] is cache["hook_embed"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "blocks.1.hook_resid_prx",
            r"must be one that was recorded; got 'blocks\.1\.hook_resid_prx'; nearest: .*resid_pre",
        ),
        (("hook_resid_prx", 1), r"must be one that was recorded; got .*; nearest: "),
        (("resid_pre", 17), r"a step must be an index below 6 or a \(layer, visit\) of the plan; got 17"),
        (("hook_resid_pre", 6), "a step must be an index below 6"),
        (("hook_resid_pre", -7), "a step must be an index below 6"),
        (("hook_resid_pre", (2, 2)), r"got \(2, 2\); layer 2 has visits \[0, 1\]"),
        (("resid_pre", (0, 1)), r"got \(0, 1\); layer 0 has visits \[0\]"),
        (("resid_pre", (9, 0)), r"got \(9, 0\); layers are 0 to 3"),
        (("hook_resid_pre", (1, 0, 0)), "a step must be an index below 6"),
        (("hook_resid_pre", "1"), "a step must be an index below 6"),
        (("post", 1, "mlp"), r"got 'blocks\.1\.mlp\.hook_post'; nearest: blocks"),
        (3, "must be one that was recorded; got '3'"),
    ],
)
def test_an_unknown_key_raises_with_the_nearest(cache, key, message):
    with pytest.raises(UserError, match=message):
        cache[key]


def test_a_name_that_was_not_kept_raises():
    _, few = NETWORK.run_with_cache(TOKENS_BT, names_filter=["blocks.1.hook_resid_pre", "hook_embed"])
    assert list(few) == ["hook_embed", "blocks.1.hook_resid_pre"]
    with pytest.raises(UserError, match=r"got 'blocks\.2\.hook_resid_pre'; nearest: blocks\.1\.hook_resid_pre"):
        few["hook_resid_pre", 2]


@torch.no_grad()
def test_entries_are_copies():
    """An edit in place further on, by a hook or by the caller, leaves them as they were."""

    def spoil(x: Tensor, hook: object) -> Tensor:
        return x.zero_()

    plain, cache = NETWORK.run_with_cache(TOKENS_BT)
    names = ["blocks.2.hook_resid_post"]
    _, kept = NETWORK.run_with_cache(
        TOKENS_BT, names_filter=names, fwd_hooks=[("blocks.3.hook_resid_pre", spoil)]
    )  # the next step's input is the very tensor that was kept
    assert torch.equal(kept[names[0]], cache[names[0]])
    storages = [value.untyped_storage().data_ptr() for value in cache.values()]
    assert len(set(storages)) == len(storages)
    cache["hook_resid_pre", 0].zero_()
    assert torch.equal(NETWORK(TOKENS_BT), plain)


@torch.no_grad()
def test_edits_come_before_what_is_kept():
    _, cache = NETWORK.run_with_cache(TOKENS_BT, fwd_hooks=[("blocks.4.hook_mlp_out", lambda x, hook: 0 * x)])
    assert not cache["hook_mlp_out", 4].any()
    assert torch.equal(cache["hook_resid_post", 4], cache["hook_resid_mid", 4])


@torch.no_grad()
def test_one_row_without_its_batch_axis_and_plain_dictionaries():
    logits_BTW, cache = NETWORK.run_with_cache(TOKENS_BT[:1])
    _, row = NETWORK.run_with_cache(TOKENS_BT[:1], remove_batch_dim=True)
    assert not row.has_batch_dim
    assert all(torch.equal(row[name], cache[name][0]) for name in cache)
    _, plain = NETWORK.run_with_cache(TOKENS_BT[:1], return_cache_object=False)
    assert type(plain) is dict
    assert plain.keys() == cache.cache_dict.keys()
    assert logits_BTW.shape == (1, 12, 259)
    with pytest.raises(UserError, match="remove_batch_dim must come with a batch of one row; got 3"):
        NETWORK.run_with_cache(TOKENS_BT, remove_batch_dim=True)


def test_a_slice_of_the_batch_still_knows_visits(cache):
    row = cache.apply_slice_to_batch_dim(1)
    assert torch.equal(row["hook_resid_pre", (2, 1)], cache["hook_resid_pre", 4][1])


# Gradients


@pytest.mark.parametrize("options", [EVERYTHING, {"attention": "fast"}], ids=["eager, all results", "fast"])
def test_gradients_are_autograds_at_every_site(options):
    """By hand: keep each tensor of the graph itself and differentiate the metric with respect to it."""
    network = tiny_network()
    kept: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: torch.nn.Module) -> None:
        kept[hook.name] = x

    def metric(logits_BTW: Tensor) -> Tensor:
        return logits_BTW[:, -1, 7].sum() - logits_BTW[:, 5, 3].sum()

    _, cache = network.run_with_cache(TOKENS_BT, incl_bwd=True, metric=metric, **options)
    names = [name for name in cache if not name.endswith("_grad")]
    differentiable = [name for name in names if cache[name].is_floating_point()]
    assert {f"{name}_grad" for name in differentiable} == {name for name in cache if name.endswith("_grad")}
    assert len(names) - len(differentiable) == 6
    logits_BTW = network.run_with_hooks(TOKENS_BT, fwd_hooks=[(name, keep) for name in differentiable], **options)
    gradients = torch.autograd.grad(metric(logits_BTW), [kept[name] for name in differentiable])
    for name, gradient in zip(differentiable, gradients, strict=True):
        torch.testing.assert_close(cache[f"{name}_grad"], gradient, atol=1e-7, rtol=1e-5, msg=name)
        assert cache[f"{name}_grad"].any(), name


def test_the_metric_is_the_next_token_loss_unless_given():
    network = tiny_network()
    _, cache = network.run_with_cache(TOKENS_BT, names_filter="hook_embed", incl_bwd=True)
    network.zero_grad()
    next_token_loss(TOKENS_BT, network(TOKENS_BT)).backward()
    by_token_WD = torch.zeros_like(network.W_E).index_add_(
        0, TOKENS_BT.flatten(), cache["hook_embed_grad"].flatten(0, 1)
    )
    torch.testing.assert_close(network.W_E.grad, by_token_WD)
    torch.testing.assert_close(next_token_loss(TOKENS_BT, network(TOKENS_BT)), network.loss(TOKENS_BT).next_token)


def test_gradients_need_a_metric_and_a_graph():
    network = tiny_network()
    with pytest.raises(UserError, match="a metric must come with incl_bwd=True; got incl_bwd=False"):
        network.run_with_cache(TOKENS_BT, metric=lambda logits: logits.sum())
    with pytest.raises(UserError, match="incl_bwd must come with a metric when start_at or stop_at is given"):
        network.run_with_cache(TOKENS_BT, incl_bwd=True, stop_at=(3, 0))
    with torch.no_grad(), pytest.raises(UserError, match="incl_bwd must run with gradients on"):
        network.run_with_cache(TOKENS_BT, incl_bwd=True)
    assert not network.list_hooks()


def test_an_edit_at_visit_2_is_seen_by_the_gradients_of_visit_1():
    """With an update of visit 2 removed, the gradients of visit 1 change; that of the update itself is still kept."""
    network, name = tiny_network(), hook_name(4, "hook_mlp_out")
    _, plain = network.run_with_cache(TOKENS_BT, incl_bwd=True)
    _, edited = network.run_with_cache(TOKENS_BT, incl_bwd=True, fwd_hooks=[(name, lambda x, hook: 0 * x)])
    assert edited[f"{name}_grad"].any()
    assert not torch.equal(edited["blocks.2.hook_mlp_out_grad"], plain["blocks.2.hook_mlp_out_grad"])
