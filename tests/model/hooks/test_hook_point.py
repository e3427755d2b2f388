"""What a hook returns is what its site holds: one rule for every site, direction, type, and way to set it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.hooks.looped_model import LoopedModel
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, TOP_LEVEL_SITES, hook_name
from tests.support.configs import TINY
from tests.support.networks import random_tokens, tiny_network

TOKENS_BT = random_tokens()
EVERYTHING = {"head_results": True, "expert_results": True}
NAMES = [*TOP_LEVEL_SITES, *(hook_name(1, suffix) for suffix in SITES)]
FLOATS = [name for name in NAMES if not name.endswith("hook_expert_indices")]

RETURNS = {
    "one token": lambda x: x[:, :1],
    "one row": lambda x: x[0],
    "another axis": lambda x: x[None],
    "another type": lambda x: x.double() if x.is_floating_point() else x.float(),
    "a number": lambda x: 3,
    "a list": lambda x: [x],
    "an array": lambda x: x.detach().float().numpy(),
    "another device": lambda x: x.detach().to("meta"),
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def network(request) -> LoopedModel:
    """A layer visited twice, and one after it."""
    return tiny_network(replace(TINY, num_layers=2, loop_start=0, loop_stop=1)).to(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_hook_returns_what_its_site_holds(network, name):
    held = network.run_with_cache(TOKENS_BT, names_filter=name, **EVERYTHING)[1][name]
    holds = rf"{str(held.dtype).removeprefix('torch.')} {tuple(held.shape)} on cpu; got ".replace("(", r"\(")
    for wrong in RETURNS.values():
        with pytest.raises(UserError, match=rf"a hook on '{name}' must return None or what its site holds, ") as told:
            network.run_with_hooks(TOKENS_BT, fwd_hooks=[(name, lambda x, hook, wrong=wrong: wrong(x))], **EVERYTHING)
        assert holds.replace(r"\(", "(") in str(told.value)
        assert "\n" not in str(told.value)
    assert not network.list_hooks()


@pytest.mark.parametrize("name", FLOATS)
def test_a_backward_hook_returns_what_its_site_holds(network, name):
    for wrong in RETURNS.values():
        hook = (name, lambda gradient, hook, wrong=wrong: wrong(gradient))
        with pytest.raises(UserError, match=rf"a backward hook on '{name}' must return None or what its site holds, "):
            network.run_with_cache(TOKENS_BT, names_filter=name, incl_bwd=True, bwd_hooks=[hook], **EVERYTHING)
    assert not network.list_hooks()
    network.zero_grad()


def test_the_wrong_tensor_is_told_before_the_next_hook_sees_it():
    network, name = tiny_network(), "blocks.3.hook_resid_mid"
    with pytest.raises(UserError, match=r"must return .*; got int"):
        network.run_with_cache(TOKENS_BT, names_filter=name, fwd_hooks=[(name, lambda x, hook: 3)])


WAYS = {
    "add_hook": lambda network, point, f: network.add_hook(point.name, lambda x, hook: f(x)),
    "the point's add_hook": lambda network, point, f: point.add_hook(lambda x, hook: f(x)),
    "torch": lambda network, point, f: point.register_forward_hook(lambda module, inputs, output: f(output)),
    "torch, before": lambda network, point, f: point.register_forward_pre_hook(lambda module, inputs: f(inputs[0])),
    "torch, backward": lambda network, point, f: point.register_full_backward_hook(
        lambda module, grad_inputs, grad_outputs: (f(grad_inputs[0]),)
    ),
    "torch, before backward": lambda network, point, f: point.register_full_backward_pre_hook(
        lambda module, grad_outputs: (f(grad_outputs[0]),)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_way_to_set_a_hook_has_the_rule_and_an_edit_within_it_is_made(way):
    plain = tiny_network()
    plain(TOKENS_BT).sum().backward()
    for change, told in ((lambda x: x[:, :1], True), (lambda x: 2 * x, False)):
        network = tiny_network()
        way(network, network.blocks[2].hook_mlp_out, change)
        assert network.hooked() == ["blocks.2.hook_mlp_out"]
        if told:
            with pytest.raises(
                UserError, match=r"hook on 'blocks\.2\.hook_mlp_out' must return .* float32 \(3, 12, 16\)"
            ):
                network(TOKENS_BT).sum().backward()
        else:
            network(TOKENS_BT).sum().backward()
            assert not torch.allclose(network.layers[2].mlp.w_out.grad, plain.layers[2].mlp.w_out.grad)


def test_hooks_one_after_another_each_see_what_the_one_before_returned():
    network, seen = tiny_network(), []

    def double(x: Tensor, hook: object) -> Tensor:
        seen.append(x.detach().abs().sum().item())
        return 2 * x

    network.run_with_hooks(TOKENS_BT, fwd_hooks=[("hook_embed", double), ("hook_embed", double)])
    assert seen[1] == pytest.approx(2 * seen[0])
