"""Steps over shared layers: replaced, copied, pickled, compiled and sharded, it stays one network."""

import io
import pickle
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from model import ranks
from model.layer import Layer
from model.network import LoopedMoE
from model.training.sharding import shard
from smelt_interp.errors import UserError
from tests.support.configs import TINY, VARIANTS
from tests.support.dense import DenseNested
from tests.support.networks import random_tokens, tiny_network
from tests.support.ranked import under_ranks


@torch.no_grad()
def test_a_replaced_layer_is_used_at_every_visit():
    network, other, tokens_BT = tiny_network(), tiny_network(seed=5), random_tokens()
    expected = deepcopy(network)
    expected.layers[2].load_state_dict(other.layers[2].state_dict())
    before = network(tokens_BT)  # nothing is remembered of the layer that ran here
    network.layers[2] = other.layers[2]
    assert not torch.equal(network(tokens_BT), before)
    assert torch.equal(network(tokens_BT), expected(tokens_BT))
    assert network.blocks[2].layer is network.blocks[4].layer is other.layers[2]
    assert torch.equal(network.blocks[4].attn.W_O, other.layers[2].attn.output_weight() / 2)
    _, cache = network.run_with_cache(tokens_BT)
    _, expected_cache = expected.run_with_cache(tokens_BT)
    assert all(torch.equal(cache[name], expected_cache[name]) for name in expected_cache)


@torch.no_grad()
def test_a_replaced_embedding_of_a_tied_network_is_its_unembedding_too():
    network, other, tokens_BT = tiny_network(VARIANTS["tied unembedding"]), tiny_network(seed=5), random_tokens()
    expected = deepcopy(network)
    expected.embed.load_state_dict(other.embed.state_dict())
    network.embed = other.embed
    assert network.unembed.weight is network.W_E is other.embed.weight
    assert torch.equal(network(tokens_BT), expected(tokens_BT))
    assert torch.equal(network.W_U, other.embed.weight.T)


def test_a_replaced_layer_leaves_nothing_behind():
    """Neither saved nor pickled with the network."""
    network = tiny_network()
    for layer in range(4):
        network.layers[layer] = Layer(TINY)
    weights = sum(weight.numel() * 4 for weight in network.parameters())
    assert len(pickle.dumps(network)) < 1.5 * weights


@pytest.mark.parametrize("name", ["as the paper", "three visits", "ungated experts"])
@torch.no_grad()
def test_weights_by_step_give_what_the_hooks_see(name):
    """What reads the stream is the layer's weight as it is; what writes to it has the loop factor inside."""
    network = tiny_network(VARIANTS[name])
    config = network.config
    _, cache = network.run_with_cache(random_tokens())
    for step, block in enumerate(network.blocks):
        normed_BTD = cache["ln1.hook_normalized", step] * block.layer.ln1.weight
        for which, weight in (("q", block.attn.W_Q), ("k", block.attn.W_K), ("v", block.attn.W_V)):
            made = torch.einsum("btd,hdc->bthc", normed_BTD, weight)
            torch.testing.assert_close(made, cache[f"attn.hook_{which}", step], atol=1e-5, rtol=1e-4)
        out_BTD = torch.einsum("btqc,qcd->btd", cache["attn.hook_z", step], block.attn.W_O)
        torch.testing.assert_close(out_BTD, cache["hook_attn_out", step], atol=1e-5, rtol=1e-4)
        normed_BTD = cache["ln2.hook_normalized", step] * block.layer.ln2.weight
        hidden_BTEF = torch.einsum("btd,edf->btef", normed_BTD, block.mlp.W_in)
        if config.gated_experts:
            gate_BTEF = torch.einsum("btd,edf->btef", normed_BTD, block.mlp.W_gate)
            hidden_BTEF = torch.nn.functional.silu(gate_BTEF) * hidden_BTEF
        else:
            hidden_BTEF = torch.nn.functional.silu(hidden_BTEF)
            with pytest.raises(UserError, match="W_gate must be asked of gated experts"):
                block.mlp.W_gate  # noqa: B018  # asked for
        weight_BTE = torch.zeros(3, 12, config.num_experts).scatter(
            -1, cache["mlp.hook_expert_indices", step], cache["mlp.hook_expert_weights", step]
        )
        out_BTD = torch.einsum("btef,efd,bte->btd", hidden_BTEF, block.mlp.W_out, weight_BTE)
        torch.testing.assert_close(out_BTD, cache["hook_mlp_out", step], atol=1e-5, rtol=1e-4)


def copied(network: LoopedMoE) -> LoopedMoE:
    return deepcopy(network)


def pickled(network: LoopedMoE) -> LoopedMoE:
    return pickle.loads(pickle.dumps(network))


def saved(network: LoopedMoE) -> LoopedMoE:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copied, pickled, saved])
@pytest.mark.parametrize("name", ["as the paper", "tied unembedding"])
@torch.no_grad()
def test_a_copy_is_a_network_of_its_own_with_its_own_loop(again, name):
    network, tokens_BT = tiny_network(VARIANTS[name]), random_tokens()
    before = network(tokens_BT)
    copy = again(network)
    assert torch.equal(copy(tokens_BT), before)
    assert copy.blocks[1].layer is copy.blocks[3].layer is copy.layers[1]
    for weight in copy.parameters():
        weight.mul_(1.5)
    assert torch.equal(network(tokens_BT), before)
    changed = copy(tokens_BT)
    _, cache = copy.run_with_cache(tokens_BT, names_filter="blocks.3.attn.hook_z")  # its hooks are its own too
    assert not torch.equal(changed, before)
    assert len(cache) == 1
    assert not network.list_hooks()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_state_dict_holds_each_weight_once(config):
    network = tiny_network(config)
    state = network.state_dict()
    assert len({weight.data_ptr() for weight in state.values()}) == len(state)
    assert sum(weight.numel() for weight in state.values()) == sum(weight.numel() for weight in network.parameters())
    assert set(state) == set(network.stored_weights())
    assert not [name for name in state if name.startswith("blocks.")]
    other = tiny_network(config, seed=3)
    other.load_state_dict(state)
    tokens_BT = random_tokens()
    assert torch.equal(other(tokens_BT), network(tokens_BT))


@torch.no_grad()
def test_one_compiled_graph_equals_the_network(monkeypatch):
    """`fullgraph` fails at any break. The graph is traced whole and run by ATen: generating code for it is torch's."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    network, tokens_BT = tiny_network(replace(TINY, num_layers=2, loop_start=0, loop_stop=1)), random_tokens()
    compiled = network.compiled()
    torch.testing.assert_close(compiled(tokens_BT), network(tokens_BT, attention="fast"), atol=1e-5, rtol=0)


def test_a_compiled_network_refuses_hooks_and_bad_tokens():
    network = tiny_network()
    compiled = network.compiled()  # compiles at its first run, which never comes
    with (
        network.hooks(fwd_hooks=[("blocks.3.hook_resid_pre", lambda x, hook: None)]),
        pytest.raises(UserError, match=r"must run without hooks; got one on 'blocks\.3\.hook_resid_pre'"),
    ):
        compiled(random_tokens())
    with pytest.raises(UserError, match="token ids must be from 0 to 258; got 300"):
        compiled(torch.tensor([[300]]))


def test_layers_that_are_computed_again_in_the_backward_pass_give_the_same_gradients():
    """Activation checkpointing wraps each layer; every visit is recomputed, to the bit."""
    network, recomputed, tokens_BT = tiny_network(), tiny_network(), random_tokens()
    runs = Counter()
    for index, layer in enumerate(recomputed.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
        recomputed.layers[index] = checkpoint_wrapper(layer)
    for each in (network, recomputed):
        loss = each.loss(tokens_BT)
        (loss.next_token + loss.balance).backward()
    assert runs == {0: 2, 1: 4, 2: 4, 3: 2}
    for weight, again in zip(network.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(weight.grad, again.grad)


def test_two_ranks_of_shards_equal_one_network():
    """Logits, caches of every visit, and gradients; each rank reads its own rows."""
    tokens_BT = random_tokens(4, 12)

    @ranks.joined()
    def check(rank: int) -> None:
        own_BT = tokens_BT.chunk(2)[rank]
        whole, sharded = tiny_network(), tiny_network()
        shard(sharded, "cpu", 1)
        assert isinstance(sharded.layers[1].attn.q_proj.weight, DTensor)
        expected_BTW, expected = whole.run_with_cache(own_BT, head_results=True, expert_results=True)
        logits_BTW, cache = sharded.run_with_cache(own_BT, head_results=True, expert_results=True)
        assert torch.equal(logits_BTW, expected_BTW)
        assert len(expected) == 6 * 22 + 3
        for name in expected:
            assert torch.equal(cache[name], expected[name]), name

        whole.loss(tokens_BT).next_token.backward()
        (sharded.loss(own_BT).next_token / 2).backward()
        gradients = dict(sharded.named_parameters())
        for name, weight in whole.named_parameters():
            gradient = gradients[name].grad.full_tensor()
            torch.testing.assert_close(gradient, weight.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
            assert gradient.abs().max() > 0

    assert under_ranks(2, check) == [(0, "")] * 2


@pytest.mark.parametrize(("loop_scale", "factor"), [("kept", 0.5), ("1/r", 1 / 3), (1.0, 1.0)])
def test_another_number_of_visits_runs_the_same_weights(loop_scale, factor):
    network, tokens_BT = tiny_network(), random_tokens()
    more = network.with_visits(3, loop_scale=loop_scale)
    built = tiny_network(replace(TINY, num_visits=3, loop_scale=factor))
    built.load_state_dict(network.state_dict())
    assert torch.equal(more(tokens_BT), built(tokens_BT))
    assert all(one is other for one, other in zip(more.parameters(), network.parameters(), strict=True))
    assert not more.training
    more.add_hook("blocks.7.hook_attn_out", lambda x, hook: x * 0)
    assert torch.equal(network.with_visits(2)(tokens_BT), network(tokens_BT)), "hooks are each network's own"
    assert not network.hooked()


def test_visits_of_a_network_without_a_loop_are_refused():
    once = tiny_network(VARIANTS["nothing looped"])
    with pytest.raises(UserError, match="a span of at least one layer must be looped when num_visits is 2"):
        once.with_visits(2)
    with pytest.raises(UserError, match="visits must be those that the code of family dense-nested runs"):
        DenseNested().with_visits(2)
    for loop_scale in ("kept", "1/r"):
        with pytest.raises(UserError, match="num_visits must be at least 1; got 0"):
            tiny_network().with_visits(0, loop_scale=loop_scale)
    with pytest.raises(UserError, match="num_visits must be a whole number; got '3'"):
        tiny_network().with_visits("3", loop_scale="1/r")


def test_weights_that_are_frozen_stay_so_when_another_network_shares_them():
    network = tiny_network()
    network.layers[1].requires_grad_(False)
    frozen = [not weight.requires_grad for weight in network.parameters()]
    more = network.with_visits(3)
    assert [not weight.requires_grad for weight in network.parameters()] == frozen
    assert all(one is other for one, other in zip(more.parameters(), network.parameters(), strict=True))
