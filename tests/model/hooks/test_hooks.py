"""Hooks by visit: they change nothing unless told to, only what comes after, and are never silent."""

import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor

from model.generate import Sampling, generate
from model.hooks.names import Request
from model.network import LoopedMoE
from model.routing import gather_weights
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, TOP_LEVEL_SITES, hook_name
from tests.support.configs import TINY, VARIANTS
from tests.support.networks import random_tokens, tiny_network

EVERYTHING = {"head_results": True, "expert_results": True}
PATHS = {
    "eager": {},
    "fast": {"attention": "fast"},
    "head results": {"head_results": True},
    "expert results": {"expert_results": True},
    "fast, all results": {"attention": "fast", **EVERYTHING},
    "eager, all results": EVERYTHING,
}
WAY_OUT = {"eager": "attention='eager'", "head_results": "head_results=True", "expert_results": "expert_results=True"}
NETWORK = tiny_network()
TOKENS_BT = random_tokens()
VISIT_2 = NETWORK.step(2, 1)


def offered(name: str, options: dict[str, object]) -> bool:
    """Written out here: which of a network's names a path computes."""
    if name.endswith(("hook_attn_scores", "hook_pattern")):
        return options.get("attention") != "fast"
    for suffix, option in (("hook_result", "head_results"), ("hook_expert_result", "expert_results")):
        if name.endswith(f".{suffix}"):
            return option in options
    return True


# What there is


def test_the_names_are_the_table_of_sites_for_every_step():
    names = {hook_name(step, suffix) for step in range(6) for suffix in SITES} | set(TOP_LEVEL_SITES)
    assert set(NETWORK.hook_dict) == names
    assert len(names) == 6 * 22 + 3


@torch.no_grad()
def test_every_site_has_the_axes_of_the_table():
    _, cache = NETWORK.run_with_cache(TOKENS_BT, **EVERYTHING)
    size = {"B": 3, "T": 12, "S": 12, "D": 16, "Q": 4, "G": 2, "C": 8, "E": 6, "K": 2, "1": 1}
    for name, value in cache.items():
        site = (SITES | TOP_LEVEL_SITES)[name.split(".", 2)[-1] if name.startswith("blocks") else name]
        assert value.shape == tuple(size[axis] for axis in site.axes), name
        assert value.is_floating_point() != site.integer, name


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS.keys())
@torch.no_grad()
def test_each_name_fires_once_on_the_path_that_offers_it(options):
    fired: Counter[str] = Counter()
    names = [name for name in NETWORK.hook_dict if offered(name, options)]
    hooks = [(name, lambda x, hook: fired.update([hook.name])) for name in names]
    NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=hooks, **options)
    assert fired == dict.fromkeys(names, 1)
    assert list(fired) == list(NETWORK.run_with_cache(TOKENS_BT, **options)[1])


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS.keys())
def test_the_other_names_raise_with_the_way_out(options):
    for name in NETWORK.hook_dict:
        if offered(name, options):
            continue
        message = rf"this pass computes; got '{name}'; pass {WAY_OUT[SITES[name.split('.', 2)[-1]].computed]}"
        with pytest.raises(UserError, match=message):
            NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=[(name, lambda x, hook: None)], **options)
        with pytest.raises(UserError, match=message):
            NETWORK.run_with_cache(TOKENS_BT, names_filter=[name], **options)
    assert not NETWORK.list_hooks()


@pytest.mark.parametrize(
    "name", ["hook_embed", "blocks.2.hook_resid_pre", "blocks.5.attn.hook_z", "ln_final.hook_scale"]
)
def test_a_name_outside_start_and_stop_raises(name):
    resid_BTD = torch.zeros(1, 3, TINY.width)
    with pytest.raises(UserError, match=rf"got '{name}'; it lies outside start_at and stop_at"):
        NETWORK.run_with_cache(resid_BTD, names_filter=name, start_at=(1, 1), stop_at=(3, 0))


def test_a_hook_that_stays_is_checked_at_every_pass():
    network = tiny_network()
    network.add_hook("blocks.1.attn.hook_pattern", lambda x, hook: None)
    network(TOKENS_BT)
    with pytest.raises(UserError, match="pass attention='eager'"):
        network(TOKENS_BT, attention="fast")
    with pytest.raises(UserError, match="pass attention='eager'"):
        network.loss(TOKENS_BT)
    network.reset_hooks()
    network.loss(TOKENS_BT)


def test_a_hook_of_torch_s_own_is_checked_too():
    network = tiny_network()
    handle = network.blocks[1].attn.hook_pattern.register_forward_hook(lambda point, inputs, output: None)
    with pytest.raises(UserError, match=r"got 'blocks\.1\.attn\.hook_pattern'; pass attention='eager'"):
        network(TOKENS_BT, attention="fast")
    with pytest.raises(UserError, match=r"must run without hooks; got one on 'blocks\.1\.attn\.hook_pattern'"):
        network.compiled()(TOKENS_BT)
    handle.remove()
    network(TOKENS_BT, attention="fast")


def ignore(x: Tensor, hook: object) -> None:
    return None


UNKNOWN = {
    "blocks.1.attn.hook_patern": r"blocks\.1\.attn\.hook_pattern",
    "blocks.6.hook_resid_pre": r"blocks\.\d\.hook_resid_pre",
    "layers.1.attn.q_proj": "blocks",
    "blocks.1.attn": r"blocks\.1\.attn\.hook",
    "embed": "hook_embed",
}


@pytest.mark.parametrize(("name", "nearest"), UNKNOWN.items())
def test_an_unknown_name_raises_with_the_nearest(name, nearest):
    message = rf"a hook name must be one of the network's; got '{name}'; nearest: .*{nearest}"
    asks = {
        "run_with_hooks": lambda: NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=[(name, ignore)]),
        "backward": lambda: NETWORK.run_with_hooks(TOKENS_BT, bwd_hooks=[(name, ignore)]),
        "hooks": lambda: NETWORK.hooks(fwd_hooks=[(name, ignore)]).__enter__(),
        "add_hook": lambda: NETWORK.add_hook(name, ignore),
        "add_perma_hook": lambda: NETWORK.add_perma_hook(name, ignore),
        "run_with_cache": lambda: NETWORK.run_with_cache(TOKENS_BT, names_filter=name),
        "run_with_cache, list": lambda: NETWORK.run_with_cache(TOKENS_BT, names_filter=["hook_embed", name]),
        "run_with_cache, edits": lambda: NETWORK.run_with_cache(TOKENS_BT, fwd_hooks=[(name, ignore)]),
        "add_caching_hooks": lambda: NETWORK.add_caching_hooks(name),
        "get_caching_hooks": lambda: NETWORK.get_caching_hooks([name]),
    }
    for ask in asks.values():
        with pytest.raises(UserError, match=message):
            ask()
    assert not NETWORK.list_hooks()


def test_a_predicate_that_matches_nothing_raises():
    def nothing(name: str) -> bool:
        return "hook_mlp_pre" in name

    for ask in (
        lambda: NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=[(nothing, ignore)]),
        lambda: NETWORK.add_hook(nothing, ignore),
        lambda: NETWORK.run_with_cache(TOKENS_BT, names_filter=nothing),
        lambda: NETWORK.run_with_cache(TOKENS_BT, names_filter=lambda n: "pattern" in n, attention="fast"),
    ):
        with pytest.raises(UserError, match=r"a name predicate must match a hook name.*it matched none"):
            ask()


def test_the_way_out_is_for_the_name_that_was_asked():
    request = Request(architecture=NETWORK.architecture, attention="fast", head_results=True, stop_step=6)
    assert "blocks.0.attn.hook_result" in request.names()
    with pytest.raises(UserError, match="pass expert_results=True"):
        request.check(["blocks.0.mlp.hook_expert_result"])


# What they do not change


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("name", ["as the paper", "QK-norm", "no RoPE", "sigmoid, not renormalised"])
@torch.no_grad()
def test_hooks_on_is_hooks_off_to_the_bit(options, name):
    network = tiny_network(VARIANTS[name])
    plain = network(TOKENS_BT, **options)
    cached, cache = network.run_with_cache(TOKENS_BT, **options)
    assert len(cache) == sum(offered(each, options) for each in network.hook_dict)
    assert torch.equal(plain, cached)
    assert torch.equal(plain, network(TOKENS_BT, **options))


@pytest.mark.parametrize("suffix", SITES)
@torch.no_grad()
def test_putting_a_tensor_back_changes_nothing_to_the_bit(suffix):
    plain, cache = NETWORK.run_with_cache(TOKENS_BT, **EVERYTHING)
    put_back = [
        (hook_name(step, suffix), lambda x, hook, saved=cache[suffix, step]: saved.clone()) for step in range(6)
    ]
    patched, again = NETWORK.run_with_cache(TOKENS_BT, fwd_hooks=put_back, **EVERYTHING)
    assert torch.equal(patched, plain)
    assert all(torch.equal(again[name], cache[name]) for name in cache)


@pytest.mark.parametrize("suffix", SITES)
@torch.no_grad()
def test_an_edit_at_visit_2_leaves_visit_1_alone_and_reaches_the_logits(suffix):
    plain, cache = NETWORK.run_with_cache(TOKENS_BT, **EVERYTHING)
    generator = torch.Generator().manual_seed(0)

    def edit(x: Tensor, hook: object) -> Tensor:
        if not x.is_floating_point():
            return (x + 1) % TINY.num_experts
        return x * (0.5 + torch.rand(x.shape, generator=generator))

    edited, after = NETWORK.run_with_cache(TOKENS_BT, fwd_hooks=[(hook_name(VISIT_2, suffix), edit)], **EVERYTHING)
    earlier = [name for name in cache if name == "hook_embed" or name < f"blocks.{VISIT_2}"]
    assert len(earlier) == 1 + 4 * 22  # visit 1 of both looped layers, and visit 2 of the one before
    assert all(torch.equal(after[name], cache[name]) for name in earlier)
    assert not torch.equal(after[suffix, VISIT_2], cache[suffix, VISIT_2])
    assert not torch.equal(edited, plain)


# What an edit does


@torch.no_grad()
def test_editing_the_router_logits_routes_again():
    def prefer_expert_3(logits_BTE: Tensor, hook: object) -> Tensor:
        edited_BTE = logits_BTE.clone()
        edited_BTE[..., 3] = 50.0
        return edited_BTE

    name = hook_name(VISIT_2, "mlp.hook_router_logits")
    _, cache = NETWORK.run_with_cache(TOKENS_BT, fwd_hooks=[(name, prefer_expert_3)])
    assert (cache["mlp.hook_expert_indices", VISIT_2][..., 0] == 3).all()
    torch.testing.assert_close(cache["mlp.hook_expert_weights", VISIT_2][..., 0], torch.ones(3, 12))


@pytest.mark.parametrize("name", ["as the paper", "sigmoid router", "not renormalised"])
@torch.no_grad()
def test_editing_the_indices_gathers_their_weights_again(name):
    network, site = tiny_network(VARIANTS[name]), hook_name(VISIT_2, "mlp.hook_expert_indices")
    chosen_BTK = torch.tensor([4, 1]).expand(3, 12, 2)
    _, cache = network.run_with_cache(TOKENS_BT, fwd_hooks=[(site, lambda x, hook: chosen_BTK)])
    logits_BTE = cache["mlp.hook_router_logits", VISIT_2]
    scores_BTE = logits_BTE.sigmoid() if network.config.router == "sigmoid" else logits_BTE.softmax(-1)
    expected_BTK = gather_weights(scores_BTE, chosen_BTK, renormalise=network.config.renormalise_top_k)
    assert torch.equal(cache["mlp.hook_expert_weights", VISIT_2], expected_BTK)


@torch.no_grad()
def test_edited_weights_are_used_as_given():
    """Ten times the weights, ten times the update: they are not renormalised again."""
    _, cache = NETWORK.run_with_cache(TOKENS_BT)
    _, edited = NETWORK.run_with_cache(
        TOKENS_BT, fwd_hooks=[(hook_name(VISIT_2, "mlp.hook_expert_weights"), lambda x, hook: 10 * x)]
    )
    torch.testing.assert_close(edited["hook_mlp_out", VISIT_2], 10 * cache["hook_mlp_out", VISIT_2])


def test_an_index_outside_the_experts_is_named():
    with pytest.raises(UserError, match=r"expert indices must lie in 0\.\.5; got 6"):
        NETWORK.run_with_hooks(
            TOKENS_BT, fwd_hooks=[(hook_name(1, "mlp.hook_expert_indices"), lambda x, hook: torch.full_like(x, 6))]
        )


@pytest.mark.parametrize(
    ("result", "total", "axis"),
    [("attn.hook_result", "hook_attn_out", 2), ("mlp.hook_expert_result", "hook_mlp_out", 2)],
)
@pytest.mark.parametrize("name", ["as the paper", "three visits", "ungated experts"])
@torch.no_grad()
def test_results_sum_to_the_update_with_the_loop_factor_inside(result, total, axis, name):
    """To the bit on the pass that computes them; within rounding on the pass that does not."""
    network = tiny_network(VARIANTS[name])
    _, cache = network.run_with_cache(TOKENS_BT, **EVERYTHING)
    for step in range(len(network.plan)):
        assert torch.equal(cache[result, step].sum(axis), cache[total, step])
    _, plain = network.run_with_cache(cache["hook_resid_pre", 1], start_at=(1, 0), stop_at=(2, 0))
    torch.testing.assert_close(cache[result, 1].sum(axis), plain[total, 1], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_editing_one_head_result_removes_that_head():
    """Against zeroing its input to the output matrix."""

    def silence(x_BTQ: Tensor, hook: object) -> Tensor:
        kept_BTQ = x_BTQ.clone()
        kept_BTQ[:, :, 3] = 0
        return kept_BTQ

    edited = [
        NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=[(hook_name(VISIT_2, site), silence)], head_results=True)
        for site in ("attn.hook_result", "attn.hook_z")
    ]
    assert torch.equal(*edited)
    assert not torch.equal(edited[0], NETWORK(TOKENS_BT, head_results=True))


@torch.no_grad()
def test_editing_scores_changes_the_pattern_and_pattern_the_output():
    def mask_first_key(scores_BQTS: Tensor, hook: object) -> Tensor:
        masked = scores_BQTS.clone()
        masked[:, :, 1:, 0] = float("-inf")
        return masked

    _, cache = NETWORK.run_with_cache(
        TOKENS_BT, fwd_hooks=[(hook_name(VISIT_2, "attn.hook_attn_scores"), mask_first_key)]
    )
    pattern_BQTS = cache["attn.hook_pattern", VISIT_2]
    assert (pattern_BQTS[:, :, 1:, 0] == 0).all()
    torch.testing.assert_close(pattern_BQTS.sum(-1), torch.ones(3, 4, 12))
    v_BSQC = cache["attn.hook_v", VISIT_2].repeat_interleave(2, 2)
    z_BTQC = torch.einsum("bqts,bsqc->btqc", pattern_BQTS, v_BSQC)
    torch.testing.assert_close(cache["attn.hook_z", VISIT_2], z_BTQC)


def test_backward_hooks_see_the_gradient_after_the_call():
    seen = []
    logits = NETWORK.run_with_hooks(
        TOKENS_BT, bwd_hooks=[("blocks.3.hook_resid_post", lambda gradient, hook: seen.append(gradient.shape))]
    )
    logits.sum().backward()
    assert seen == [(3, 12, TINY.width)]
    NETWORK.zero_grad()


@torch.no_grad()
def test_caching_hooks_that_stay_fill_copies_at_each_run():
    network = tiny_network()
    cache = network.add_caching_hooks()
    network(TOKENS_BT)
    _, expected = network.run_with_cache(TOKENS_BT)
    assert cache.keys() == expected.cache_dict.keys()
    first = cache["blocks.3.hook_resid_post"].clone()
    network(random_tokens(seed=1))
    assert not torch.equal(cache["blocks.3.hook_resid_post"], first)
    network.reset_hooks()
    assert not network.list_hooks()
    into, fwd_hooks, bwd_hooks = network.get_caching_hooks(lambda name: name.endswith("hook_result"))
    network.run_with_hooks(TOKENS_BT, fwd_hooks=fwd_hooks, head_results=True)
    assert len(into) == len(fwd_hooks) == 6
    assert not bwd_hooks


def test_an_error_in_a_hook_leaves_no_hook_behind():
    def fail(x: Tensor, hook: object) -> None:
        raise RuntimeError("inside")

    before = NETWORK(TOKENS_BT)
    with pytest.raises(RuntimeError, match="inside"):
        NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=[("blocks.2.hook_resid_post", fail)])
    assert not NETWORK.list_hooks()
    assert torch.equal(NETWORK(TOKENS_BT), before)


# Threads


def add_100(x: Tensor, hook: object) -> Tensor:
    return x + 100


def edited(network: LoopedMoE) -> object:
    return network.run_with_hooks(TOKENS_BT, fwd_hooks=[("blocks.2.hook_resid_post", add_100)]).tolist()


PLAIN_CALLS = {
    "call": lambda network: network(TOKENS_BT).tolist(),
    "cache": lambda network: {name: x.tolist() for name, x in network.run_with_cache(TOKENS_BT)[1].items()},
    "loss": lambda network: network.loss(TOKENS_BT).next_token.item(),
    "generate": lambda network: generate(network, [[1, 2, 3]], Sampling(max_new_tokens=3)),
}


@pytest.mark.parametrize("call", PLAIN_CALLS.values(), ids=PLAIN_CALLS.keys())
def test_a_thread_never_sees_another_threads_hooks(call):
    """One thread stops inside its hook while the other calls: the other must wait, and then see a network without."""
    network, inside, answers = tiny_network(), threading.Event(), {}
    expected = call(network)

    def slow_add_100(x: Tensor, hook: object) -> Tensor:
        inside.set()
        time.sleep(0.2)
        answers["order"] = ["edited"]
        return x + 100

    def run_edited() -> None:
        with torch.no_grad():
            answers["edited"] = network.run_with_hooks(
                TOKENS_BT, fwd_hooks=[("blocks.2.hook_resid_post", slow_add_100)]
            ).tolist()

    def run_plain() -> None:
        inside.wait()
        answers["plain"] = call(network)
        answers["order"].append("plain")

    threads = [threading.Thread(target=each) for each in (run_edited, run_plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["order"] == ["edited", "plain"]
    assert answers["plain"] == expected
    assert answers["edited"] == edited(network)


def test_many_calls_from_two_threads_keep_apart():
    network, wrong = tiny_network(), []
    expected = {each: each(network) for each in (edited, PLAIN_CALLS["call"], PLAIN_CALLS["cache"])}

    def work(each: object) -> None:
        for _ in range(5):
            if each(network) != expected[each]:
                wrong.append(each)

    threads = [threading.Thread(target=partial(work, each)) for each in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_lock_is_re_entrant():
    network = tiny_network()
    with network.hooks(fwd_hooks=[("blocks.2.hook_resid_post", add_100)]):
        twice = network.run_with_hooks(TOKENS_BT, fwd_hooks=[("blocks.2.hook_resid_post", add_100)])
        once = network(TOKENS_BT)
    assert not torch.equal(once, twice)
    assert once.tolist() == edited(network)
