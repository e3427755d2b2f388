"""Nothing takes a hook away in silence: not compiled code, not an iterator, not a part that was replaced."""

import contextlib
import threading

import pytest
import torch
from torch import Tensor

from model.hooks.looped_model import LoopedModel
from model.step import Block, LayerRef
from smelt_interp.errors import UserError
from tests.support.networks import random_tokens, tiny_network

TOKENS_BT = random_tokens()
NAME = "blocks.5.hook_resid_post"


def silence(x: Tensor, hook: object) -> Tensor:
    return 0 * x


# Compiled code


def compile_network(network: LoopedModel) -> LoopedModel:
    network.compile(backend="eager")
    return network


def compile_layer(network: LoopedModel) -> LoopedModel:
    network.layers[2].compile(backend="eager")
    return network


def wrap_layer(network: LoopedModel) -> LoopedModel:
    network.layers[2] = torch.compile(network.layers[2], backend="eager")
    return network


def compile_forward(network: LoopedModel) -> LoopedModel:
    network.forward = torch.compile(network.forward, backend="eager")
    return network


COMPILED = {
    "model.compile()": (compile_network, "itself"),
    "layer.compile()": (compile_layer, r"module layers\.2"),
    "a wrapped layer": (wrap_layer, r"module layers\.2"),
    "a compiled forward": (compile_forward, "itself"),
}


@pytest.mark.parametrize("way", COMPILED)
def test_a_network_with_compiled_parts_refuses_hooks(way):
    compiled, which = COMPILED[way]
    network = compiled(tiny_network())
    message = rf"a network with {which} compiled must run without hooks; got one on .*; call the network uncompiled"
    for ask in (
        lambda: network.run_with_hooks(TOKENS_BT, fwd_hooks=[(NAME, silence)]),
        lambda: network.run_with_cache(TOKENS_BT),
        lambda: network.run_with_hooks(TOKENS_BT, bwd_hooks=[(NAME, silence)]),
    ):
        with pytest.raises(UserError, match=message):
            ask()
    network.add_hook(NAME, silence)
    for ask in (network, network.loss):
        with pytest.raises(UserError, match=message):
            ask(TOKENS_BT)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_wrapper_runs_as_the_network_and_refuses_hooks():
    """Before hooks are set and after: what was traced without them is not used with them, nor the reverse."""
    network = tiny_network()
    plain = network(TOKENS_BT)
    wrapped = torch.compile(network, backend="eager")
    traced = torch.compile(lambda tokens_BT: network.loss(tokens_BT).next_token, backend="eager")
    message = rf"a compiled network must run without hooks; got one on '{NAME}'"
    torch.testing.assert_close(wrapped(TOKENS_BT), plain)
    for _ in range(2):
        with network.hooks(fwd_hooks=[(NAME, silence)]):
            for compiled in (wrapped, traced):
                with pytest.raises(UserError, match=message):
                    compiled(TOKENS_BT)
        torch.testing.assert_close(wrapped(TOKENS_BT), plain)
    edited = wrapped.run_with_hooks(TOKENS_BT, fwd_hooks=[(NAME, silence)])  # the network's own method: not compiled
    assert not edited.any()


# Iterators


def named(kind: str) -> object:
    """One hook, as an iterable that can be read once."""
    pairs = [(NAME, silence)]
    return {
        "list": pairs,
        "tuple": tuple(pairs),
        "generator": (pair for pair in pairs),
        "zip": zip([NAME], [silence], strict=True),
        "map": map(tuple, [[NAME, silence]]),
        "dict": dict(pairs).items(),
    }[kind]


@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "zip", "map", "dict"])
def test_hooks_in_any_iterable_are_set(kind):
    network = tiny_network()
    expected = 0 * network(TOKENS_BT)
    assert torch.equal(network.run_with_hooks(TOKENS_BT, fwd_hooks=named(kind)), expected)
    out, cache = network.run_with_cache(TOKENS_BT, fwd_hooks=named(kind), names_filter=(each for each in [NAME]))
    assert torch.equal(out, expected)
    assert not cache[NAME].any()
    with network.hooks(fwd_hooks=named(kind)):
        assert torch.equal(network(TOKENS_BT), expected)
    _, cache = network.run_with_cache(TOKENS_BT, names_filter="blocks.2.hook_mlp_out", incl_bwd=True)
    assert cache["blocks.2.hook_mlp_out_grad"].any()
    _, cache = network.run_with_cache(
        TOKENS_BT, names_filter="blocks.2.hook_mlp_out", incl_bwd=True, bwd_hooks=named(kind)
    )
    assert not cache["blocks.2.hook_mlp_out_grad"].any()
    kept, fwd_hooks, _ = network.get_caching_hooks(each for each in [NAME])
    network.run_with_hooks(TOKENS_BT, fwd_hooks=iter(fwd_hooks))
    assert list(kept) == [NAME]


@pytest.mark.parametrize("hook", [NAME, (NAME,), (NAME, 3), (3, silence), None])
def test_what_is_no_hook_is_refused(hook):
    with pytest.raises(UserError, match="a hook must be a pair of a name and a function; got "):
        tiny_network().run_with_hooks(TOKENS_BT, fwd_hooks=[hook])


# Parts that were replaced


def test_hooks_are_on_a_block_that_was_put_in_the_place_of_another():
    network = tiny_network()
    network.blocks[5] = Block(5, LayerRef(network.layers, 3), 1.0)
    assert not network.run_with_hooks(TOKENS_BT, fwd_hooks=[(NAME, silence)]).any()
    network.blocks[5] = Block(5, LayerRef(network.layers, 3), 1.0)
    network.blocks[5].hook_resid_post.register_forward_hook(lambda *_: None)
    assert network.hooked() == [NAME]


def test_a_block_whose_points_are_not_those_of_the_architecture_is_refused():
    network = tiny_network()
    network.blocks[5] = torch.nn.Identity()
    with pytest.raises(TypeError, match=r"must be those of architecture\.sites at every step; differing: blocks\.5\."):
        network(TOKENS_BT)


# What an exception leaves


def fail(x: Tensor, hook: object) -> None:
    raise RuntimeError("inside")


def is_free(lock: object) -> bool:
    """Whether another thread can take it: this one always could."""
    taken = []

    def take() -> None:
        with lock:
            taken.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(timeout=5)
    return bool(taken)


@pytest.mark.parametrize("stay", [False, True], ids=["temporary", "to stay"])
def test_an_exception_in_a_hook_leaves_no_hook_and_no_lock(stay):
    network = tiny_network()
    before = network(TOKENS_BT)
    asks = {
        "forward": lambda: network.run_with_hooks(TOKENS_BT, fwd_hooks=[(NAME, fail)], reset_hooks_end=not stay),
        "cache": lambda: network.run_with_cache(TOKENS_BT, fwd_hooks=[(NAME, fail)]),
        "backward": lambda: network.run_with_cache(TOKENS_BT, incl_bwd=True, bwd_hooks=[(NAME, fail)]),
        "metric": lambda: network.run_with_cache(TOKENS_BT, incl_bwd=True, metric=lambda logits: fail(logits, None)),
        "in the block": lambda: inside(network, stay),
    }
    for ask in asks.values():
        with pytest.raises(RuntimeError, match="inside"):
            ask()
        assert not network.hooked()
        assert network.context_level == 0
        assert is_free(network.lock)
    assert torch.equal(network(TOKENS_BT), before)


def inside(network: LoopedModel, stay: bool) -> None:
    with network.hooks(fwd_hooks=[(NAME, silence)], reset_hooks_end=not stay):
        network(TOKENS_BT)
        raise RuntimeError("inside")


def test_hooks_that_are_to_stay_stay_when_nothing_fails():
    network = tiny_network()
    network.run_with_hooks(TOKENS_BT, fwd_hooks=[(NAME, silence)], reset_hooks_end=False)
    assert network.hooked() == [NAME]
    with contextlib.suppress(RuntimeError):  # takes away its own, not those that were there
        network.run_with_hooks(TOKENS_BT, fwd_hooks=[("hook_embed", fail)], reset_hooks_end=False)
    assert network.hooked() == [NAME]
    network.run_with_cache(TOKENS_BT)
    assert network.hooked() == [NAME]
    network.reset_hooks()
    assert not network.hooked()
