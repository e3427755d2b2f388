"""transformer-lens's own tools on a looped network: its layers are our steps, one row a visit."""

import pytest
import torch
from torch import Tensor
from transformer_lens import ActivationCache, patching
from transformer_lens.model_protocol import TransformerLensModelWithWeights

from model.hooks.activation_cache import VisitCache
from smelt_interp.data.tokenizer import BOS
from smelt_interp.errors import UserError
from tests.support.configs import TINY, VARIANTS
from tests.support.networks import random_tokens, tiny_network

TOKENS_BT = random_tokens()
NETWORK = tiny_network()
LABELS = [f"{step}_{part}" for step in range(6) for part in ("attn_out", "mlp_out")]


@pytest.fixture(scope="module")
def run() -> tuple[Tensor, VisitCache]:
    with torch.no_grad():
        return NETWORK.run_with_cache(TOKENS_BT, head_results=True)


@pytest.fixture
def cache(run) -> VisitCache:
    return run[1]


def test_the_network_is_what_the_tools_ask_for(cache):
    assert isinstance(NETWORK, TransformerLensModelWithWeights)
    assert isinstance(cache, ActivationCache)
    cfg = NETWORK.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads, cfg.d_model, cfg.d_head) == (6, 4, 2, 16, 8)
    assert (cfg.n_ctx, cfg.d_vocab, cfg.num_experts, cfg.experts_per_token) == (64, 259, 6, 2)
    assert cfg.positional_embedding_type == "rotary"
    assert tiny_network(VARIANTS["no RoPE"]).cfg.positional_embedding_type == "none"
    with pytest.raises(AttributeError):
        NETWORK.cfg = cfg
    cfg.n_layers = 99  # a copy
    assert NETWORK.cfg.n_layers == 6
    assert NETWORK.W_E.shape == NETWORK.W_U.T.shape == (259, 16)
    assert not NETWORK.b_U.any()


def test_accumulated_resid_is_the_stream_after_each_step(cache):
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == [f"{step}_{part}" for step in range(6) for part in ("pre", "mid")] + ["final_post"]
    for step in range(6):
        assert torch.equal(stack[2 * step], cache["hook_resid_pre", step])
        assert torch.equal(stack[2 * step + 1], cache["hook_resid_mid", step])
    assert torch.equal(stack[-1], cache["hook_resid_post", 5])


def test_decompose_resid_sums_to_the_stream_with_factor_one_half(cache):
    stack, labels = cache.decompose_resid(return_labels=True)
    assert labels == ["embed", *LABELS]
    summed_BTD = stack[0]
    for part_BTD in stack[1:]:
        summed_BTD = summed_BTD + part_BTD
    assert torch.equal(summed_BTD, cache["hook_resid_post", 5])
    torch.testing.assert_close(cache.decompose_resid(layer=3).sum(0), cache["hook_resid_pre", 3])


@torch.no_grad()
def test_head_results_sum_to_the_update_with_factor_one_half(cache):
    """Those the pass computed, and those that transformer-lens makes from hook_z and W_O."""
    stack, labels = cache.stack_head_results(return_labels=True)
    assert labels == [f"L{step}H{head}" for step in range(6) for head in range(4)]
    for step in range(6):
        heads_QBTD = stack[4 * step : 4 * step + 4]
        torch.testing.assert_close(heads_QBTD.sum(0), cache["hook_attn_out", step], atol=1e-6, rtol=0)
    _, without = NETWORK.run_with_cache(TOKENS_BT)
    torch.testing.assert_close(without.stack_head_results(), stack, atol=1e-6, rtol=0)
    raw_QCD = NETWORK.layers[1].attn.o_proj.weight.T.reshape(4, 8, 16)
    for step, factor in ((1, 0.5), (3, 0.5)):
        assert torch.equal(NETWORK.blocks[step].attn.W_O, raw_QCD * factor)


@pytest.mark.parametrize("name", ["as the paper", "three visits", "Baseline"])
@torch.no_grad()
def test_the_full_decomposition_sums_to_the_stream(name):
    network = tiny_network(VARIANTS[name])
    _, cache = network.run_with_cache(TOKENS_BT)
    num_steps = len(network.plan)
    stack, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    assert len(stack) == len(labels) == num_steps * 4 + num_steps + 2  # heads, experts, embedding and a zero bias
    assert labels[-2:] == ["embed", "bias"]
    torch.testing.assert_close(stack.sum(0), cache["hook_resid_post", num_steps - 1], atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"must be one that was recorded; got 'blocks\.0\.mlp\.hook_post'"):
        cache.get_full_resid_decomposition(expand_neurons=True)


@pytest.mark.parametrize("name", ["as the paper", "three visits", "tied unembedding", "Baseline"])
@torch.no_grad()
def test_logit_attributions_of_all_steps_and_the_embedding_sum_to_the_logit(name):
    network = tiny_network(VARIANTS[name])
    logits_BTW, cache = network.run_with_cache(TOKENS_BT)
    targets_BT = TOKENS_BT.roll(-1, 1)
    parts = cache.logit_attrs(cache.decompose_resid(), targets_BT)
    assert len(parts) == 1 + 2 * len(network.plan)
    true_BT = logits_BTW.gather(-1, targets_BT[..., None])[..., 0]
    torch.testing.assert_close(parts.sum(0), true_BT, atol=1e-5, rtol=0)
    difference = cache.logit_attrs(cache.decompose_resid(), 40, incorrect_tokens=41).sum(0)
    torch.testing.assert_close(difference, logits_BTW[..., 40] - logits_BTW[..., 41], atol=1e-5, rtol=0)
    heads = cache.logit_attrs(cache.get_full_resid_decomposition(expand_neurons=False), "A")
    torch.testing.assert_close(heads.sum(0), logits_BTW[..., ord("A")], atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_logit_lens_is_the_readout_of_each_step(run):
    logits_BTW, cache = run
    lens = cache.logit_lens(positions=None)
    assert lens.labels == [f"{step}_pre" for step in range(6)] + ["final_post"]
    torch.testing.assert_close(lens.values[-1], logits_BTW, atol=1e-5, rtol=0)
    for step in range(6):
        readout = NETWORK.unembed(NETWORK.ln_final(cache["hook_resid_pre", step]))
        torch.testing.assert_close(lens.values[step], readout, atol=1e-5, rtol=0)
    stack = cache.accumulated_resid(apply_ln=True)
    torch.testing.assert_close(stack @ NETWORK.W_U, lens.values, atol=1e-5, rtol=0)
    own = cache.logit_lens(positions=None, targets="A")
    torch.testing.assert_close(own.values[-1, ..., 0], logits_BTW[..., ord("A")], atol=1e-5, rtol=0)


def last_logit(logits_BTW: Tensor) -> Tensor:
    return logits_BTW[0, -1, 65]


PATCHES = {
    "resid_pre": (patching.get_act_patch_resid_pre, (6, 4)),
    "resid_mid": (patching.get_act_patch_resid_mid, (6, 4)),
    "attn_out": (patching.get_act_patch_attn_out, (6, 4)),
    "mlp_out": (patching.get_act_patch_mlp_out, (6, 4)),
    "z": (patching.get_act_patch_attn_head_out_all_pos, (6, 4)),
    "q": (patching.get_act_patch_attn_head_q_all_pos, (6, 4)),
    "k": (patching.get_act_patch_attn_head_k_all_pos, (6, 2)),
    "v": (patching.get_act_patch_attn_head_v_all_pos, (6, 2)),
    "pattern": (patching.get_act_patch_attn_head_pattern_all_pos, (6, 4)),
}


@pytest.mark.parametrize("name", PATCHES)
@torch.no_grad()
def test_patching_gives_one_row_a_step(name):
    """Each entry against our own patch of that step; and patching a run with itself changes nothing."""
    patch, shape = PATCHES[name]
    clean_BT, corrupted_BT = random_tokens(1, 4, seed=1), random_tokens(1, 4, seed=2)
    _, clean_cache = NETWORK.run_with_cache(clean_BT)
    rows = patch(NETWORK, corrupted_BT, clean_cache, last_logit)
    assert rows.shape == shape
    for step in (2, 4):  # both visits of layer 2

        def first_entry(x: Tensor, hook: torch.nn.Module) -> Tensor:
            x, index = x.clone(), (slice(None),) * (2 if name in "zqkv" else 1) + (0,)
            x[index] = clean_cache[hook.name][index]
            return x

        site = {"z": "attn.hook_z", "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v"}.get(name)
        site = site or ("attn.hook_pattern" if name == "pattern" else f"hook_{name}")
        logits = NETWORK.run_with_hooks(corrupted_BT, fwd_hooks=[(f"blocks.{step}.{site}", first_entry)])
        assert rows[step, 0] == last_logit(logits)
    _, own_cache = NETWORK.run_with_cache(corrupted_BT)
    unchanged = patch(NETWORK, corrupted_BT, own_cache, last_logit)
    assert (unchanged == last_logit(NETWORK(corrupted_BT))).all()


def test_text_is_tokens_and_back():
    tokens_BT = NETWORK.to_tokens(["ab", "c\n"])
    assert tokens_BT.tolist() == [[BOS, 97, 98], [BOS, 99, 10]]
    assert NETWORK.to_string(tokens_BT[1]) == "c\n"
    with pytest.raises(UserError, match="tokens to write as text must be one row; got 2 axes: give one row at a time"):
        NETWORK.to_string(tokens_BT)
    assert NETWORK.to_str_tokens("a\n") == ["<bos>", "a", "\\n"]
    assert NETWORK.to_tokens("a", prepend_bos=False).tolist() == [[97]]
    assert NETWORK.to_single_token("(") == 40
    with pytest.raises(UserError, match="a single token must be one token; got 'ab' of 2"):
        NETWORK.to_single_token("ab")
    with pytest.raises(UserError, match=r"the same number of tokens; got \[2, 3\]"):
        NETWORK.to_tokens(["a", "bc"])
    with pytest.raises(UserError, match="a text must hold at least one token"):
        NETWORK.to_tokens("", prepend_bos=False)
    assert TINY.vocab_size == 259
