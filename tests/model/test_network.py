"""The network against transformers, against a plain loop, and against itself computed other ways."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from model.inputs import Inputs
from model.kv_cache import KVCache
from model.network import LoopedMoE
from smelt_interp.config import ModelConfig
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from smelt_interp.plan import plan, step_scale
from smelt_interp.sites import hook_name
from tests.support.agreement import agreements
from tests.support.configs import TINY, TINY_BASELINE, VARIANTS
from tests.support.networks import plain_logits, random_tokens, tiny_network
from tests.support.planted import text_samples

INDICES = "mlp.hook_expert_indices"


# Against other implementations


def foreign_weights(network: LoopedMoE) -> dict[str, torch.Tensor]:
    """The network's weights under the names of transformers' MoE models, whose experts are fused as ours are."""
    names = {
        "ln1.weight": "input_layernorm.weight",
        "ln2.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.w_in": "mlp.experts.gate_up_proj",
        "mlp.w_out": "mlp.experts.down_proj",
    }
    weights = {
        "model.embed_tokens.weight": network.W_E,
        "model.norm.weight": network.ln_final.weight,
        "lm_head.weight": network.unembed.weight,
    }
    for name, weight in network.layers.named_parameters():
        layer, own = name.split(".", 1)
        weights[f"model.layers.{layer}.{names.get(own, own.replace('attn.', 'self_attn.'))}"] = weight
    return {name: weight.detach() for name, weight in weights.items()}


def foreign_fields(config: ModelConfig) -> dict[str, object]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "num_experts_per_tok": config.top_k,
        "tie_word_embeddings": config.tied_unembedding,
        "attn_implementation": "eager",
        "sliding_window": None,
    }


def qwen3_moe(config: ModelConfig) -> torch.nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **foreign_fields(config),
            num_experts=config.num_experts,
            moe_intermediate_size=config.expert_width,
            norm_topk_prob=config.renormalise_top_k,
        )
    )


def mixtral(config: ModelConfig) -> torch.nn.Module:
    """No QK-norm; its experts' width is the field for a dense layer's."""
    return MixtralForCausalLM(
        MixtralConfig(
            **foreign_fields(config), num_local_experts=config.num_experts, intermediate_size=config.expert_width
        )
    )


ONE_VISIT = replace(TINY_BASELINE, rope_base=5_000.0)


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (qwen3_moe, replace(ONE_VISIT, qk_norm=True)),
        (qwen3_moe, replace(ONE_VISIT, qk_norm=True, renormalise_top_k=False, tied_unembedding=True)),
        (mixtral, ONE_VISIT),
    ],
    ids=["Qwen3-MoE", "Qwen3-MoE, not renormalised, tied", "Mixtral, no QK-norm"],
)
@torch.no_grad()
def test_one_visit_equals_transformers(build, config):
    network, foreign = tiny_network(config), build(config).eval()
    left_out = foreign.load_state_dict(foreign_weights(network), strict=False)
    assert not left_out.unexpected_keys
    assert set(left_out.missing_keys) <= {"lm_head.weight"}
    routed = []
    for layer in foreign.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, output: routed.append(output))
    tokens_BT = random_tokens(3, 20)
    logits_BTW, cache = network.run_with_cache(tokens_BT, names_filter=lambda name: ".mlp.hook" in name)
    torch.testing.assert_close(logits_BTW, foreign(tokens_BT).logits, atol=1e-5, rtol=0)
    assert len(routed) == config.num_layers
    for layer, (router_logits_NE, weights_NK, indices_NK) in enumerate(routed):
        ours = [cache[f"mlp.hook_{name}", layer].flatten(0, 1) for name in ("router_logits", "expert_weights")]
        torch.testing.assert_close(ours, [router_logits_NE, weights_NK], atol=1e-5, rtol=0)
        assert torch.equal(cache[INDICES, layer].flatten(0, 1), indices_NK)


@pytest.mark.portable
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_every_variant_equals_a_plain_loop(config):
    """Logits and every chosen expert, against float64 loops over heads, tokens and experts."""
    network, tokens_BT = tiny_network(config), random_tokens(2, 7)
    logits_BTW, cache = network.run_with_cache(tokens_BT)
    for row, tokens_T in enumerate(tokens_BT):
        expected_TW, chosen = plain_logits(config, network.stored_weights(), tokens_T)
        torch.testing.assert_close(logits_BTW[row].double(), expected_TW, atol=1e-5, rtol=0)
        for step, chosen_TK in enumerate(chosen):
            assert torch.equal(cache[INDICES, step][row], chosen_TK)


# Against itself


def unrolled(network: LoopedMoE) -> LoopedMoE:
    """The same network written out: a layer with weights of its own for each step, each visited once."""
    config = network.config
    looped = (config.loop_stop - config.loop_start) * config.num_visits
    flat = LoopedMoE(replace(config, num_layers=len(network.plan), loop_stop=config.loop_start + looped, num_visits=1))
    for name in ("embed", "ln_final", "unembed"):
        getattr(flat, name).load_state_dict(getattr(network, name).state_dict())
    for step, (layer, _) in enumerate(network.plan):
        flat.layers[step] = deepcopy(network.layers[layer])
    return flat.eval()


@pytest.mark.portable
@pytest.mark.parametrize("name", ["as the paper", "three visits", "all layers looped", "QK-norm"])
@pytest.mark.parametrize("attention", ["eager", "fast"])
@torch.no_grad()
def test_a_loop_is_its_copies_written_out_to_the_bit(name, attention):
    network, tokens_BT = tiny_network(VARIANTS[name]), random_tokens()
    flat = unrolled(network)
    assert len(flat.layers) == len(network.plan)
    assert torch.equal(network(tokens_BT, attention=attention), flat(tokens_BT, attention=attention))


def test_a_shared_weight_gets_the_sum_of_the_gradients_of_its_copies():
    network, tokens_BT = tiny_network(replace(TINY, num_visits=3)), random_tokens()
    flat = unrolled(network)
    for each in (network, flat):
        loss = each.loss(tokens_BT)
        (loss.next_token + loss.balance).backward()
    for layer, module in enumerate(network.layers):
        steps = [step for step, (of, _) in enumerate(network.plan) if of == layer]
        for name, weight in module.named_parameters():
            summed = sum(flat.layers[step].get_parameter(name).grad for step in steps)
            torch.testing.assert_close(weight.grad, summed, atol=1e-7, rtol=1e-5)
            assert weight.grad.abs().max() > 0


@pytest.mark.parametrize("num_visits", [1, 2, 3, 4])
@torch.no_grad()
def test_the_loop_scale_stays_as_configured_whatever_the_number_of_visits(num_visits):
    """Read off the network: every update is the scale times what the layer gives on the same input."""
    built = tiny_network()
    network = LoopedMoE(replace(TINY, num_visits=num_visits))
    network.load_state_dict(built.state_dict())
    _, cache = network.run_with_cache(random_tokens())
    raw = LoopedMoE(replace(TINY, num_visits=num_visits, loop_scale=1.0))
    raw.load_state_dict(built.state_dict())
    assert len(network.plan) == 2 + 2 * num_visits
    for step, (layer, visit) in enumerate(network.plan):
        expected = 0.5 if layer in (1, 2) else 1.0
        assert step_scale(network.config, network.plan[step]) == expected
        _, unscaled = raw.run_with_cache(cache["hook_resid_pre", step], start_at=(layer, visit))
        attn_out = unscaled["hook_attn_out", step] * expected
        torch.testing.assert_close(cache["hook_attn_out", step], attn_out, atol=0, rtol=0)
        assert torch.equal(cache["hook_resid_mid", step], cache["hook_resid_pre", step] + cache["hook_attn_out", step])
        assert torch.equal(cache["hook_resid_post", step], cache["hook_resid_mid", step] + cache["hook_mlp_out", step])


def mixed_samples(num_each: int, context: int) -> tuple:
    options = DyckOptions(pairing="standard", shots=(2,), max_total=8)
    dyck = dyck_samples(options, num_each, seed=1, length=context, tokenizer=BYTES)
    return dyck, text_samples(num_each, context, seed=1, padding=5)


@pytest.mark.portable
@pytest.mark.parametrize("name", ["as the paper", "no RoPE", "QK-norm", "QK-norm over all heads"])
def test_every_way_of_computing_agrees_with_the_first(name):
    """Batches, fused attention, left padding, cached generation, packed documents: 2e-6 of the largest logit."""
    network = tiny_network(VARIANTS[name])
    for samples in mixed_samples(4, network.config.context):
        for agreement in agreements(network, samples):
            print(agreement)
            assert agreement.replayed <= 2e-6, agreement
            assert agreement.rerouted <= agreement.routed // 100, agreement


@torch.no_grad()
def test_a_pass_in_two_parts_is_the_whole_pass():
    network, tokens_BT = tiny_network(), random_tokens()
    whole = network(tokens_BT)
    for layer, visit in network.plan:
        resid_BTD = network(tokens_BT, stop_at=(layer, visit))
        assert resid_BTD.shape == (3, 12, TINY.width)
        assert torch.equal(network(resid_BTD, start_at=(layer, visit)), whole)


@torch.no_grad()
def test_a_token_sees_nothing_after_it():
    network, tokens_BT = tiny_network(), random_tokens()
    changed_BT = tokens_BT.clone()
    changed_BT[:, 8] = (changed_BT[:, 8] + 1) % 259
    for attention in ("eager", "fast"):
        before, after = (network(each, attention=attention) for each in (tokens_BT, changed_BT))
        torch.testing.assert_close(before[:, :8], after[:, :8], atol=1e-6, rtol=0)
        assert not torch.allclose(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize("attention", ["eager", "fast"])
@torch.no_grad()
def test_half_precision_stays_near_single(attention):
    network, tokens_BT = tiny_network(), random_tokens()
    single = network(tokens_BT, attention=attention)
    half = deepcopy(network).bfloat16()(tokens_BT, attention=attention)
    assert half.dtype == torch.bfloat16
    assert (half - single).abs().median() < 0.05 * single.abs().max()


def test_seeds_give_their_own_weights_and_the_meta_device_none():
    first, again, other = LoopedMoE(TINY, seed=1), LoopedMoE(TINY, seed=1), LoopedMoE(TINY, seed=2)
    assert torch.equal(first.layers[2].mlp.w_in, again.layers[2].mlp.w_in)
    assert not torch.equal(first.layers[2].mlp.w_in, other.layers[2].mlp.w_in)
    with torch.device("meta"):
        assert all(weight.is_meta for weight in LoopedMoE(TINY).parameters())


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_torch_does_not_take_is_refused(seed):
    with pytest.raises(UserError, match=rf"seed must be from 0 to 2\^63 - 1; got {seed}"):
        LoopedMoE(TINY, seed=seed)


# Many devices


def test_checks_on_a_gpu_wait_for_nothing():
    """Fake tensors have no values: whatever looks at one raises."""
    request = tiny_network().request()
    with FakeTensorMode():
        for device, waits in (("cuda", nullcontext()), ("cpu", pytest.raises(DataDependentOutputException))):
            tokens_BT = torch.zeros(2, 5, dtype=torch.long, device=device)
            inputs = Inputs(values=tokens_BT, segment_start_BT=tokens_BT)
            with waits:
                inputs.check(TINY, request)


# Bad input


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (torch.zeros(2, 3), {}, r"tokens must be int64 or int32 of shape \(B, T\); got float32 \(2, 3\)"),
        (torch.zeros(2, 3).byte(), {}, r"tokens must be int64 or int32 of shape \(B, T\); got uint8 \(2, 3\)"),
        (torch.zeros(3, dtype=torch.long), {}, r"tokens must be int64 or int32 of shape \(B, T\); got int64 \(3,\)"),
        ("text", {}, "tokens must be a tensor of integers; got str; network.to_tokens"),
        (torch.zeros(2, 0, dtype=torch.long), {}, "inputs must hold at least one token"),
        (torch.zeros(1, 65, dtype=torch.long), {}, "a row must be at most the context of 64 tokens; got 65"),
        (torch.tensor([[0, 259]]), {}, "token ids must be from 0 to 258; got 259"),
        (torch.tensor([[0, -1]]), {}, "token ids must be from 0 to 258; got -1"),
        (random_tokens(), {"attention": "flash"}, "attention must be 'eager' or 'fast'; got 'flash'"),
        (random_tokens(), {"stop_at": 3}, r"start_at and stop_at must each be a pair \(layer, visit\); got 3"),
        (
            random_tokens(),
            {"attention_mask_BT": [[1] * 12] * 3},
            "attention_mask_BT must be a tensor where .*; got list",
        ),
        (
            random_tokens(),
            {"segment_start_BT": torch.zeros(3, 12, device="meta")},
            "segment_start_BT must be a tensor where the inputs are, cpu; got one on meta",
        ),
        (random_tokens(), {"stop_at": (1, 2)}, r"in the plan; got \(1, 2\); layer 1 has visits \[0, 1\]"),
        (random_tokens(), {"stop_at": (4, 0)}, r"in the plan; got \(4, 0\); layers are 0 to 3"),
        (random_tokens(), {"start_at": (1, 0)}, r"a residual stream must have shape \(B, T, 16\)"),
        (torch.zeros(1, 2, 16), {"start_at": (1, 1), "stop_at": (1, 0)}, "start_at must not lie after stop_at"),
        (random_tokens(), {"segment_start_BT": torch.zeros(3, 11)}, r"segment_start_BT must have the shape \(3, 12\)"),
        (random_tokens(), {"segment_start_BT": torch.ones(3, 12).long()}, "to each token's own position"),
        (random_tokens(), {"attention_mask_BT": torch.ones(3, 11)}, r"attention_mask_BT must have shape \(3, 12\)"),
        (
            random_tokens(),
            {"kv_cache": KVCache(6), "segment_start_BT": torch.zeros(3, 12).long()},
            "segment_start_BT must come without a kv_cache",
        ),
        (
            random_tokens(),
            {"attention_mask_BT": torch.zeros(3, 12).fill_(-torch.inf)},
            "attention_mask_BT must be 0 on padding and 1 elsewhere; got -inf",
        ),
        (random_tokens(), {"kv_cache": KVCache(4)}, r"a kv_cache must have one slot a step \(6\); got 4"),
        (random_tokens(), {"kv_cache": KVCache(6), "stop_at": (3, 0)}, "a kv_cache must come without stop_at"),
        (torch.zeros(1, 2, 16), {"kv_cache": KVCache(6), "start_at": (3, 0)}, "or hold tokens and come with start_at"),
    ],
)
def test_bad_input_is_named(inputs, options, message):
    with pytest.raises(UserError, match=message):
        tiny_network()(inputs, **options)


@pytest.mark.parametrize("step", [0, 3, 5])
@torch.no_grad()
def test_a_pass_that_fails_leaves_the_kv_cache_as_it_was(step):
    """Ctrl-C or an error in any step, at the first pass and at a later one: going on is as if it had not been tried."""

    def stop(x_BTD: torch.Tensor, hook: object) -> None:
        raise KeyboardInterrupt

    network, tokens_BT, cache = tiny_network(), random_tokens(2, 8), KVCache(6)
    for read_BT in (tokens_BT[:, :5], tokens_BT[:, 5:]):
        with pytest.raises(KeyboardInterrupt):
            network.run_with_hooks(read_BT, fwd_hooks=[(f"blocks.{step}.hook_resid_post", stop)], kv_cache=cache)
        logits_BTW = network(read_BT, kv_cache=cache)
    torch.testing.assert_close(logits_BTW, network(tokens_BT)[:, 5:], rtol=1e-4, atol=1e-4)
    assert cache.length == 8


@torch.no_grad()
def test_a_kv_cache_goes_on_with_its_batch_and_up_to_the_context():
    network, cache = tiny_network(), KVCache(6)
    network(random_tokens(2, 60), kv_cache=cache)
    with pytest.raises(UserError, match="must go on with the batch of 2 it has read; got 3"):
        network(random_tokens(3, 1), kv_cache=cache)
    with pytest.raises(UserError, match="at most the context of 64 tokens; got 65"):
        network(random_tokens(2, 5), kv_cache=cache)


def test_the_plan_is_the_networks():
    assert tiny_network().plan == plan(TINY)
    assert tiny_network().step(2, 1) == 4
    assert hook_name(4, INDICES) in tiny_network().hook_dict
    assert [block.attn.step_index for block in tiny_network().blocks] == list(range(6))
