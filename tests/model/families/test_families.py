"""Every family on a tiny random network: hooks change nothing, labels are the authors', edits stay where they are."""

import copy
import logging
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from cache.record import run_batches
from model.families.network import FamilyNetwork
from model.families.opening import REMOTE
from model.families.table import FAMILIES
from model.generate import Sampling, generate
from model.hooks.activation_cache import VisitCache
from model.hooks.names import PassOptions
from model.kv_cache import KVCache
from probes.running.passes import pass_inputs
from smelt_interp.costs.spans import LayerRange
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan
from smelt_interp.plan import Step
from smelt_interp.sites import SITES, hook_name
from tests.support.families import LOOPS, SETTINGS, SPAN, hooked, plain
from tests.support.planted import text_samples

logging.getLogger("transformers").setLevel(logging.ERROR)
TOKENS_BT = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(0))
LOOPABLE = [name for name, family in FAMILIES.items() if family.loopable]
ROUTED = [name for name, family in FAMILIES.items() if family.router]
PATTERN, PRE, MID, POST = "attn.hook_pattern", "hook_resid_pre", "hook_resid_mid", "hook_resid_post"

PARTS: PassOptions = {"head_results": True, "expert_results": True}

every_family = pytest.mark.parametrize("name", SETTINGS)


@cache
def network(name: str) -> FamilyNetwork:
    return hooked(name)


@cache
def looped(name: str) -> FamilyNetwork:
    return hooked(name, SPAN)


@every_family
@torch.no_grad()
def test_hooked_is_plain_and_labels_are_the_authors_own(name: str) -> None:
    """To the bit, but where our arithmetic stands in place of a fused kernel."""
    model, outputs = plain(name), []
    for module in FAMILIES[name].find_layers(model):
        module.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    theirs = model(TOKENS_BT, output_attentions=True, output_hidden_states=True, **FAMILIES[name].options)
    logits_BTW, found = network(name).run_with_cache(TOKENS_BT)
    steps = range(len(network(name).plan))
    exact = {"atol": 1e-5, "rtol": 1e-5} if FAMILIES[name].calls == "fused" else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(logits_BTW, theirs.logits, **exact)
    assert torch.equal(network(name)(TOKENS_BT), logits_BTW)
    assert len(outputs) == len(steps)
    for step in steps:
        torch.testing.assert_close(found[POST, step], outputs[step], **exact)
    if name in REMOTE:  # whose code lists neither
        return
    assert len(theirs.attentions) == len(steps)
    for step in steps:
        assert torch.equal(found[PATTERN, step], theirs.attentions[step])
    for step in steps[:-1]:  # the last one of theirs is behind the final norm
        assert torch.equal(found[POST, step], theirs.hidden_states[step + 1])


@pytest.mark.parametrize("name", ROUTED)
@torch.no_grad()
def test_routing_is_the_authors_own(name: str) -> None:
    model, routed = plain(name), []
    for module in FAMILIES[name].find_layers(model):
        module.get_submodule(FAMILIES[name].router).register_forward_hook(lambda _, __, out: routed.append(out))
    model(TOKENS_BT)
    _, found = network(name).run_with_cache(TOKENS_BT)
    for step, outputs in enumerate(routed):
        for suffix, theirs in zip(("router_logits", "expert_weights", "expert_indices"), outputs, strict=True):
            assert torch.equal(found[f"mlp.hook_{suffix}", step].flatten(0, 1), theirs), suffix


@every_family
@torch.no_grad()
def test_every_name_fires_once_with_the_axes_of_the_table(name: str) -> None:
    model = network(name)
    shape = model.architecture
    size = {"B": 2, "T": 20, "S": 20, "1": 1, "D": shape.width, "Q": shape.num_heads, "G": shape.num_kv_heads,
            "C": shape.head_width, "E": shape.num_experts, "K": shape.top_k}  # fmt: skip
    logits_BTW, found = model.run_with_cache(TOKENS_BT, **PARTS)
    assert set(found) == set(model.request(**PARTS).names())
    torch.testing.assert_close(logits_BTW, model(TOKENS_BT), atol=1e-5, rtol=1e-4)
    for step in range(len(model.plan)):
        for suffix in shape.sites:
            assert found[suffix, step].shape == tuple(size[axis] for axis in SITES[suffix].axes), suffix
        # Scale and value of each norm make up what it read and what it gave.
        for folder, path, read in (("ln1", FAMILIES[name].first_norm, PRE), ("ln2", FAMILIES[name].second_norm, MID)):
            if path and read in shape.sites:
                norm = model.layer_modules()[model.plan[step].layer].get_submodule(path)
                check_norm(norm, found[read, step], found, f"blocks.{step}.{folder}")
    if FAMILIES[name].reads_out:
        check_norm(model.ln_final, found[POST, len(model.plan) - 1], found, "ln_final")


def check_norm(norm: nn.Module, x_BTD: Tensor, found: VisitCache, at: str) -> None:
    value_BTD, scale_BT1 = found[f"{at}.hook_normalized"], found[f"{at}.hook_scale"]
    bias = getattr(norm, "bias", None)
    off = 0 if bias is None else x_BTD.mean(-1, keepdim=True)
    torch.testing.assert_close(value_BTD * scale_BT1 + off, x_BTD, atol=1e-5, rtol=1e-5)
    gained_BTD = value_BTD * getattr(norm, "weight", 1.0) + (0 if bias is None else bias)
    torch.testing.assert_close(gained_BTD, norm(x_BTD), atol=1e-5, rtol=1e-5)


@every_family
@torch.no_grad()
def test_putting_a_tensor_back_changes_nothing_and_halving_it_does(name: str) -> None:
    model, step = network(name), len(network(name).plan) // 2
    model = model if not model.family.loopable else looped(name)
    as_is = model(TOKENS_BT)
    final = [at for at in ("ln_final.hook_scale", "ln_final.hook_normalized") if at in model.hook_dict]
    assert bool(final) == (name != "albert")
    in_parts = model(TOKENS_BT, **PARTS)
    for at in (*(hook_name(step, suffix) for suffix in model.architecture.sites), *final):
        if at.endswith("indices"):
            continue
        whole, parts = (in_parts, PARTS) if at.endswith("result") else (as_is, {})
        back = model.run_with_hooks(TOKENS_BT, fwd_hooks=[(at, lambda x, hook: x.clone())], **parts)
        half = model.run_with_hooks(TOKENS_BT, fwd_hooks=[(at, lambda x, hook: x / 2)], **parts)
        assert torch.equal(back, whole), at
        assert not torch.equal(half, whole) or at.endswith(PRE), at  # a norm may take a factor away


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.heads_apart])
@torch.no_grad()
def test_heads_and_experts_make_up_what_attention_and_mixture_add(name: str) -> None:
    model = looped(name) if name in LOOPABLE else network(name)
    _, found = model.run_with_cache(TOKENS_BT, **PARTS)
    with pytest.raises(UserError, match="must be cached in another family's network: run_with_cache"):
        model.run_with_cache(TOKENS_BT)[1].stack_head_results()
    for step, (layer, _) in enumerate(model.plan):
        joined = model.layer_modules()[step if name in LOOPABLE else layer].get_submodule(FAMILIES[name].heads_out)
        bias = 0 if joined.bias is None else joined.bias * model.architecture.loop_factors[step]
        torch.testing.assert_close(found["attn.hook_result", step].sum(2) + bias, found["hook_attn_out", step])
        if FAMILIES[name].experts:
            torch.testing.assert_close(found["mlp.hook_expert_result", step].sum(2), found["hook_mlp_out", step])


@every_family
@torch.no_grad()
def test_an_edit_at_visit_2_leaves_visit_1_untouched(name: str) -> None:
    model = looped(name) if name in LOOPABLE else network(name)
    (loop, *_) = model.architecture.loops
    step = model.step(loop.layers[0], 1)
    _, before = model.run_with_cache(TOKENS_BT, names_filter=lambda each: each.endswith(POST))
    _, after = model.run_with_cache(
        TOKENS_BT,
        names_filter=lambda each: each.endswith(POST),
        fwd_hooks=[(hook_name(step, "attn.hook_v"), lambda x, hook: x + 1)],
    )
    same = [torch.equal(before[POST, index], after[POST, index]) for index in range(len(model.plan))]
    assert all(same[:step])
    assert not same[step]


@pytest.mark.parametrize("name", LOOPS)
def test_another_loop_count_is_another_plan(name: str) -> None:
    other = hooked(name, **LOOPS[name])
    assert len(other.plan) != len(network(name).plan)
    with torch.no_grad():
        theirs = plain(name, **LOOPS[name])(TOKENS_BT, **FAMILIES[name].options)
        torch.testing.assert_close(other(TOKENS_BT), theirs.logits)


@every_family
@torch.no_grad()
def test_left_padding_is_alone(name: str) -> None:
    alone_BTW = network(name)(TOKENS_BT[:1])
    padded_BT = torch.cat((torch.zeros(1, 5, dtype=torch.int64), TOKENS_BT[:1]), 1)
    mask_BT = (torch.arange(25) >= 5)[None].long()
    torch.testing.assert_close(
        network(name)(padded_BT, attention_mask_BT=mask_BT)[:, 5:], alone_BTW, atol=2e-5, rtol=2e-4
    )


@every_family
@torch.no_grad()
def test_padding_on_the_right_changes_nothing_for_the_tokens_before_it(name: str) -> None:
    samples = text_samples(3, 12, padding=2)
    (batch,) = run_batches(network(name), samples, (PATTERN,), batch_size=3)
    tokens_BT, asked = pass_inputs(network(name), batch)
    logits_BTW = network(name)(tokens_BT, **asked)
    for row, length in enumerate(samples.length_N.tolist()):
        alone_1TW, next_T = network(name)(tokens_BT[row : row + 1, :length]), tokens_BT[row, 1:length, None]
        torch.testing.assert_close(logits_BTW[row, :length], alone_1TW[0], atol=2e-5, rtol=2e-4)
        logprob_T = alone_1TW[0, :-1].log_softmax(-1).gather(-1, next_T)[:, 0]
        torch.testing.assert_close(batch.logprob_BT[row, : length - 1], logprob_T, atol=2e-5, rtol=2e-4)
        assert not batch.sites[0, PATTERN][row, :, :length, length:].any()


@every_family
@torch.no_grad()
def test_a_document_is_alone_in_its_row_or_the_row_is_refused(name: str) -> None:
    start_BT = torch.where(torch.arange(20) < 12, 0, 12).expand(2, -1)
    if FAMILIES[name].whole_rows:
        with pytest.raises(
            UserError, match="a row of a network of family inkling2_loop_text must be one document; got several"
        ):
            network(name)(TOKENS_BT, segment_start_BT=start_BT)
        return
    packed_BTW = network(name)(TOKENS_BT, segment_start_BT=start_BT)
    torch.testing.assert_close(packed_BTW[:, 12:], network(name)(TOKENS_BT[:, 12:]), atol=2e-5, rtol=2e-4)


@every_family
@torch.no_grad()
def test_a_pass_stops_at_any_step_and_starts_there_where_the_stream_is_all_that_is_handed_on(name: str) -> None:
    model = looped(name) if name in LOOPABLE else network(name)
    logits_BTW, found = model.run_with_cache(TOKENS_BT)
    for step, visit in enumerate(model.plan):
        middle_BTD = model(TOKENS_BT, stop_at=tuple(visit))
        assert torch.equal(middle_BTD, found[PRE, step])
        if model.restarts:
            assert torch.equal(model(middle_BTD, start_at=tuple(visit)), logits_BTW)
        else:
            with pytest.raises(
                UserError, match=rf"a network of family {name} must start with tokens, as what it hands on is more"
            ):
                model(middle_BTD, start_at=tuple(visit))
    assert model.restarts == (name in LOOPABLE and name != "gpt_oss")
    last_BTD = found[POST, len(model.plan) - 1]
    if FAMILIES[name].reads_out:
        assert torch.equal(model.readout(last_BTD), logits_BTW)
    else:
        with pytest.raises(UserError, match=rf"head is a norm and a map; got one of {name}, whose head does more"):
            model.readout(last_BTD)


@every_family
@torch.no_grad()
def test_a_cached_pass_is_the_whole_pass_or_refused(name: str) -> None:
    model = looped(name) if name in LOOPABLE else network(name)
    cache, tokens = KVCache(len(model.plan)), TOKENS_BT[0].tolist()
    if not model.remembers:
        assert name in {"gpt_oss", "inkling2_loop_text", "dory", "albert", "huginn_raven", "open_mythos"}
        with pytest.raises(
            UserError,
            match=rf"a network of family {name} must read whole rows, as it reads more of earlier tokens than",
        ):
            model(TOKENS_BT, kv_cache=cache)
        return
    parts = [model(part_BT, kv_cache=cache) for part_BT in TOKENS_BT.split([11, 1, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(TOKENS_BT), atol=2e-5, rtol=2e-4)
    short, long = (generate(model, [prompt], Sampling(max_new_tokens=4))[0] for prompt in (tokens[:7], tokens))
    assert generate(model, [tokens[:7], tokens], Sampling(max_new_tokens=4)) == [short, long], "padded on the left"
    whole = model(torch.tensor([[*tokens, *long]])).argmax(-1)[0, len(tokens) - 1 : -1].tolist()
    assert whole == long


def loops_by_hand(model: nn.Module, name: str) -> Tensor:
    """The layers of a Llama or a mixture one after the other, updates of the looped ones halved."""
    body, family = model.model, FAMILIES[name]
    x_BTD = body.embed_tokens(TOKENS_BT)
    positions = body.rotary_emb(x_BTD, torch.arange(20)[None])
    mask = torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)[None, None]
    for layer in (0, 1, 2, 1, 2, 3):
        module, factor = body.layers[layer], 0.5 if layer in (1, 2) else 1.0
        normed = module.input_layernorm(x_BTD)
        x_BTD = x_BTD + factor * module.self_attn(normed, position_embeddings=positions, attention_mask=mask)[0]
        update = module.get_submodule(family.mlp_out)(module.post_attention_layernorm(x_BTD))
        x_BTD = x_BTD + factor * (update[0] if isinstance(update, tuple) else update)
    return model.lm_head(body.norm(x_BTD))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "olmoe", "mixtral"])
@torch.no_grad()
def test_a_looped_span_is_the_loop_by_hand(name: str) -> None:
    assert [step.layer for step in looped(name).plan] == [0, 1, 2, 1, 2, 3]
    assert torch.equal(looped(name)(TOKENS_BT), loops_by_hand(plain(name), name))


@pytest.mark.parametrize("name", LOOPABLE)
@torch.no_grad()
def test_a_second_visit_with_a_vanishing_factor_is_the_network_without_that_span(name: str) -> None:
    """Visits that add nothing: the stream after the span is that before it."""
    model = hooked(name, LoopedSpan(layers=LayerRange(1, 3), visits=3, factor=1e-30))
    _, found = model.run_with_cache(TOKENS_BT, names_filter=lambda each: each.endswith(("resid_pre", "resid_post")))
    assert len(model.plan) == 8
    assert torch.equal(found[PRE, 1], found[POST, 6])
    assert len(list(model.parameters())) == len(list(network(name).parameters()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_at_every_site_are_those_of_a_finite_difference(name: str) -> None:
    """To a hundredth: the authors' norms are in float32 whatever the weights are."""
    model = copy.deepcopy(looped(name)).double()
    direction = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for suffix in (PRE, MID, POST, "hook_attn_out", "hook_mlp_out", "ln1.hook_normalized"):
        at = hook_name(3, suffix)

        def moved(by: float, at: str = at) -> float:
            hooks = [(at, lambda x, hook: x + by * direction)]
            with torch.no_grad():
                return float(model.run_with_hooks(TOKENS_BT, fwd_hooks=hooks).square().mean())

        _, found = model.run_with_cache(
            TOKENS_BT, names_filter=at, incl_bwd=True, metric=lambda logits: logits.square().mean()
        )
        slope = float((found[f"{at}_grad"] * direction).sum())
        assert slope == pytest.approx((moved(1e-2) - moved(-1e-2)) / 2e-2, rel=1e-2), suffix


@every_family
@torch.no_grad()
def test_the_null_mass_is_what_a_learned_sink_took(name: str) -> None:
    _, found = network(name).run_with_cache(TOKENS_BT)
    for step in range(len(network(name).plan)):
        pattern, scores = found[PATTERN, step], found["attn.hook_attn_scores", step]
        keys, null = scores.logsumexp(-1), 1 - pattern.sum(-1)
        if name not in ("gpt_oss", "inkling2_loop_text"):
            torch.testing.assert_close(null, torch.zeros_like(null), atol=1e-6, rtol=0)
            continue
        sink = (null / (1 - null)).log() + keys  # the logit that takes this share
        assert ((null > 0) & (null < 1)).all()
        if name == "gpt_oss":
            learned_Q = network(name).model.model.layers[step].self_attn.sinks
            torch.testing.assert_close(sink, learned_Q[None, :, None].expand_as(sink), atol=1e-4, rtol=1e-4)


@every_family
@torch.no_grad()
def test_a_plan_that_is_not_what_ran_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = network(name), network(name).architecture
    (layer, visit), num = shape.steps[-1], len(shape.steps)
    for steps, message in (
        (
            shape.steps[:-1],
            rf"family {name} must run its layers.*got layer {layer + 1} as step {num}, where",
        ),
        (
            (*shape.steps, Step(layer, visit + 1)),
            rf"family {name} must run the {num + 1} steps.*; got {num}: ",
        ),
    ):
        planned = replace(shape, steps=steps, loop_factors=(1.0,) * len(steps))
        monkeypatch.setattr(model, "architecture", planned)
        with pytest.raises(UserError, match=message):
            model(TOKENS_BT)


@torch.no_grad()
def test_the_plan_is_checked_when_a_module_runs_more_or_fewer_times() -> None:
    model = hooked("llama")
    layers = model.model.model.layers
    model.model.config.num_hidden_layers = 3
    with pytest.raises(UserError, match=r"family llama must run the 4 steps of its plan; got 3: layer 4, visit 1 did"):
        model(TOKENS_BT)
    model.model.config.num_hidden_layers = 5
    layers.append(layers[1])
    with pytest.raises(UserError, match=r"got layer 2 as step 5, where its end is due"):
        model(TOKENS_BT)
    layers.insert(1, layers[3])
    with pytest.raises(UserError, match=r"got layer 4 as step 2, where layer 2, visit 1 is due"):
        model(TOKENS_BT)


@torch.no_grad()
def test_a_copy_is_a_network_of_its_own_and_theirs_alone_is_theirs() -> None:
    model = looped("llama")
    other = copy.deepcopy(model)
    other.add_hook("blocks.3.hook_mlp_out", lambda x, hook: 0 * x)
    assert not torch.equal(other(TOKENS_BT), model(TOKENS_BT))
    assert not model.hooked()
    assert torch.equal(network("llama").model(TOKENS_BT).logits, plain("llama")(TOKENS_BT).logits)


@torch.no_grad()
def test_the_fast_path_has_no_patterns() -> None:
    torch.testing.assert_close(network("llama")(TOKENS_BT, attention="fast"), network("llama")(TOKENS_BT))
    with pytest.raises(UserError, match="pass attention='eager'"):
        network("llama").run_with_cache(TOKENS_BT, names_filter="blocks.0.attn.hook_pattern", attention="fast")


@pytest.mark.parametrize(
    ("name", "site"),
    [("llama", "mlp.hook_router_logits"), ("dory", "hook_attn_out"), ("gpt2", "attn.hook_rot_q")],
)
def test_a_site_that_a_family_does_not_compute_is_said(name: str, site: str) -> None:
    with pytest.raises(UserError, match=f"a hook must be on a site that a network of family {name} has"):
        network(name).run_with_cache(TOKENS_BT, names_filter=hook_name(1, site))


def test_what_a_family_cannot_do_is_one_line() -> None:
    with pytest.raises(UserError, match=r"--loop must be of a network that runs each layer once; got one of dory"):
        hooked("dory", SPAN)
    with pytest.raises(UserError, match=r"--loop must lie within layers 1 to 4; got 3-9"):
        hooked("llama", LoopedSpan(layers=LayerRange(2, 9), visits=2, factor=0.5))
    with pytest.raises(UserError, match=r"token ids must be from 0 to 258; got 303"):
        network("llama")(TOKENS_BT * 0 + 303)


def test_every_family_of_the_table_is_tried() -> None:
    assert set(SETTINGS) == set(FAMILIES)
