"""A network that is not ours, with its own plan, tokenizer and forward pass, has everything a looped model has."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from smelt_interp.architecture import Loop
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, hook_name
from tests.support.dense import CONTEXT, DenseNested, tokenizer
from tests.support.dense import SITES as OWN_SITES

NETWORK = DenseNested().eval()
TEXT = "Input: ( [ ) { } ) ]\nOutput: the beautiful and the true\n" * 2
TOKENS_BT = NETWORK.to_tokens(TEXT)
FAST = {"attention": "fast"}


def test_its_loops_are_read_off_its_plan():
    assert NETWORK.architecture.loops == (Loop((0, 1), 2), Loop((2, 3), 6))
    assert [NETWORK.step(2, visit) for visit in range(6)] == [0, 2, 4, 8, 10, 12]
    assert [step.layer for step in NETWORK.plan] == [2, 3, 2, 3, 2, 3, 0, 1] * 2
    with pytest.raises(UserError, match=r"got \(0, 2\); layer 0 has visits \[0, 1\]"):
        NETWORK.step(0, 2)


def test_its_names_are_its_sites_at_every_step():
    steps = {hook_name(step, site) for step in range(16) for site in OWN_SITES}
    assert set(NETWORK.hook_dict) == steps | {"hook_embed"}


@pytest.mark.parametrize("options", [{}, FAST], ids=["eager", "fast"])
@torch.no_grad()
def test_every_name_fires_once_and_caching_changes_nothing(options):
    fired: Counter[str] = Counter()
    names = NETWORK.request(**options).names()
    assert len(names) == 1 + 16 * (len(OWN_SITES) - (2 if options else 0))
    hooks = [(name, lambda x, hook: fired.update([hook.name])) for name in names]
    plain = NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=hooks, **options)
    assert fired == dict.fromkeys(names, 1)
    logits_BTW, cache = NETWORK.run_with_cache(TOKENS_BT, **options)
    assert set(cache) == set(names)
    assert torch.equal(logits_BTW, plain)
    torch.testing.assert_close(plain, NETWORK(TOKENS_BT), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_every_site_has_the_axes_of_the_table():
    length = TOKENS_BT.shape[1]
    size = {"B": 1, "T": length, "S": length, "D": 16, "Q": 4, "G": 4, "C": 4}
    _, cache = NETWORK.run_with_cache(TOKENS_BT)
    for site in OWN_SITES:
        assert cache[site, (3, 5)].shape == tuple(size[axis] for axis in SITES[site].axes), site


@pytest.mark.parametrize(
    "name",
    ["blocks.3.mlp.hook_router_logits", "blocks.0.attn.hook_result", "blocks.15.ln1.hook_scale", "ln_final.hook_scale"],
)
def test_a_site_that_it_does_not_have_is_said_by_name(name):
    message = rf"a hook must be on a site that a network of family dense-nested has; got '{name}'"
    for ask in (
        lambda: NETWORK.run_with_cache(TOKENS_BT, names_filter=name, head_results=True),
        lambda: NETWORK.add_hook(name, lambda x, hook: None),
        lambda: NETWORK.run_with_hooks(TOKENS_BT, fwd_hooks=[(name, lambda x, hook: None)]),
    ):
        with pytest.raises(UserError, match=message):
            ask()
    with pytest.raises(UserError, match=r"must be one of the network's; got 'blocks\.16\.hook_resid_pre'; nearest: "):
        NETWORK.run_with_cache(TOKENS_BT, names_filter="blocks.16.hook_resid_pre")


@torch.no_grad()
def test_an_edit_at_a_visit_leaves_what_ran_before_alone():
    """Low visit 3 (the first of the second high cycle): 8 steps before it, the rest after."""
    step = NETWORK.step(2, 3)

    def halve(x: Tensor, hook: object) -> Tensor:
        return x / 2

    plain, before = NETWORK.run_with_cache(TOKENS_BT)
    edited, after = NETWORK.run_with_cache(TOKENS_BT, fwd_hooks=[(hook_name(step, "attn.hook_v"), halve)])
    for index in range(16):
        same = [torch.equal(before[site, index], after[site, index]) for site in OWN_SITES]
        assert all(same) == (index < step)
    assert not torch.equal(edited, plain)


def test_gradients_of_the_default_metric_leave_padding_out():
    network = DenseNested()
    left_BT = torch.cat((torch.zeros_like(TOKENS_BT), TOKENS_BT), 1)
    length = TOKENS_BT.shape[1]
    mask_BT = (torch.arange(2 * length) >= length)[None]
    _, cache = network.run_with_cache(left_BT, names_filter="hook_embed", incl_bwd=True, attention_mask_BT=mask_BT)
    assert cache["hook_embed_grad"][:, length:-1].any(-1).all()  # the last token predicts nothing
    assert not cache["hook_embed_grad"][:, :length].any()


def test_the_rules_of_hooks_are_its_own_too():
    network = DenseNested()
    with pytest.raises(UserError, match=r"a hook on 'blocks\.3\.hook_mlp_out' must return None or what its site holds"):
        network.run_with_hooks(TOKENS_BT, fwd_hooks=[("blocks.3.hook_mlp_out", lambda x, hook: x[:, :1])])
    with pytest.raises(UserError, match="pass attention='eager'"):
        network.run_with_cache(TOKENS_BT, names_filter="blocks.3.attn.hook_pattern", **FAST)
    with pytest.raises(UserError, match="must run whole; got start_at or stop_at"):
        network(TOKENS_BT, stop_at=(2, 1))
    network.compile(backend="eager")
    with pytest.raises(UserError, match="with itself compiled must run without hooks"):
        network.run_with_cache(TOKENS_BT)


def test_its_text_is_its_tokenizers():
    assert TOKENS_BT.tolist() == [tokenizer().encode(TEXT).ids_T.tolist()]
    assert TOKENS_BT.shape[1] < min(len(TEXT.encode()), CONTEXT)
    assert NETWORK.to_string(TOKENS_BT[0]) == TEXT
    assert NETWORK.to_single_token(" the") == tokenizer().encode(" the").ids_T[0]
    assert NETWORK.to_str_tokens(" the\n") == ["␣the", "\\n"]


@torch.no_grad()
def test_transformer_lens_reads_it():
    assert (NETWORK.cfg.n_layers, NETWORK.cfg.n_heads, NETWORK.cfg.d_vocab) == (16, 4, NETWORK.architecture.vocab_size)
    _, cache = NETWORK.run_with_cache(TOKENS_BT)
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == [f"{step}_{part}" for step in range(16) for part in ("pre", "mid")] + ["final_post"]
    assert torch.equal(stack[-1], cache["hook_resid_post", (1, 1)])
    assert NETWORK.tokens_to_residual_directions(" the").shape == (16,)


@torch.no_grad()
def test_a_copy_is_a_network_of_its_own():
    copy = deepcopy(NETWORK)
    assert torch.equal(copy(TOKENS_BT), NETWORK(TOKENS_BT))
    copy.add_hook("hook_embed", lambda x, hook: 0 * x)
    assert copy.hooked() == ["hook_embed"]
    assert not NETWORK.hooked()
