"""Edits are what they are called, on our network and on a dense nested one, and leave what ran before them alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.hooks import interventions
from model.hooks.interventions import Edit, Sources, Target
from model.hooks.looped_model import LoopedModel
from model.hooks.names import NamesFilter
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from smelt_interp.plan import visits_of
from smelt_interp.sites import hook_name
from tests.support.dense import DenseNested
from tests.support.networks import tiny_network
from tests.support.planted import text_samples

NETWORKS: dict[str, LoopedModel] = {"ours": tiny_network(), "dense": DenseNested().eval()}
LATER = {"ours": 3, "dense": 8}
"""A step of a later visit: layer 1 visit 1 of ours; layer 2 visit 3 of the nested one."""
SAMPLES = text_samples(3, 12)


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def run(
    model: LoopedModel, edit: Edit | None = None, samples: Samples = SAMPLES, names: NamesFilter = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and cache, as the network is or under an edit."""
    own = run(model)[1] if edit is not None else {}
    mean = {key: torch.full(x.shape[2:], 0.25) for key, x in own.items()}
    other = run(model, samples=SAMPLES.rows(np.array([1, 2, 0])))[1] if edit is not None else {}
    sources = Sources(samples=samples, sample_ids=np.arange(3), own=own, other=other, mean=mean)
    tokens_BT = torch.from_numpy(samples.ids_NT.astype(np.int64))
    hooks = edit.hooks(sources) if edit is not None else []
    return model.run_with_cache(tokens_BT, fwd_hooks=hooks, return_cache_object=False, names_filter=names)


def content(samples: Samples) -> np.ndarray:
    return np.broadcast_to(np.arange(samples.ids_NT.shape[1]) % 3 == 1, samples.ids_NT.shape)  # read alone


def edits(model: LoopedModel, step: int) -> dict[str, Edit]:
    return {
        "skip": interventions.skip([step]),
        "again": interventions.again(model, [step]),
        "clamped scores": interventions.clamp(model, "attn.hook_attn_scores", [step]),
        "clamped pattern": interventions.clamp(model, "attn.hook_pattern", [step]),
        "zero": interventions.zero(Target("hook_mlp_out", (step,))),
        "mean": interventions.mean(Target("attn.hook_z", (step,), (1, 3))),
        "resample": interventions.resample(Target("attn.hook_v", (step,))),
        "start mass": interventions.move_start_mass([step], content),
        "random": interventions.at_random(interventions.zero(Target("hook_resid_post", (step,)))),
        "random pattern": interventions.at_random(interventions.clamp(model, "attn.hook_pattern", [step])),
        "random skip": interventions.at_random(interventions.skip([step])),
    }


@pytest.mark.parametrize("edit", edits(NETWORKS["ours"], 3))
def test_an_edit_at_a_later_visit_leaves_what_ran_before_to_the_bit_and_changes_what_follows(name, edit):
    model, step = NETWORKS[name], LATER[name]
    plain, before = run(model)
    edited, after = run(model, edits(model, step)[edit])
    for index in range(len(model.plan)):
        same = [torch.equal(before[at], after[at]) for at in before if at.startswith(f"blocks.{index}.")]
        assert all(same) == (index < step), index
    assert not torch.equal(plain, edited)
    assert not model.hooked()


def test_putting_back_what_was_there_changes_nothing(name):
    model, step = NETWORKS[name], LATER[name]
    plain, cache = run(model)
    for suffix in ("hook_resid_pre", "attn.hook_q", "attn.hook_pattern", "attn.hook_z", "hook_mlp_out"):
        where_BT = torch.arange(12) % 2 == torch.zeros(3, 1)
        for where in (None, where_BT):
            assert torch.equal(run(model, interventions.put(Target(suffix, (step,)), cache, where))[0], plain), suffix
    first = {hook_name(0, "attn.hook_pattern"): hook_name(0, "attn.hook_pattern")}
    assert torch.equal(run(model, interventions._copied("itself", first))[0], plain)


def test_a_skipped_visit_is_a_plan_without_it(name):
    model, step = NETWORKS[name], LATER[name]
    cache = run(model, interventions.skip([step]))[1]
    assert torch.equal(cache[hook_name(step, "hook_resid_post")], cache[hook_name(step, "hook_resid_pre")])


def test_skipping_all_second_visits_is_the_network_that_visits_once():
    model = NETWORKS["ours"]
    once = type(model)(replace(model.config, num_visits=1))
    once.load_state_dict(model.state_dict())
    assert torch.equal(run(model, interventions.skip([3, 4]))[0], run(once.eval())[0])


def test_a_visit_again_adds_what_the_first_added(name):
    model, step = NETWORKS[name], LATER[name]
    first = visits_of(model.plan, model.plan[step].layer)[0]
    _, cache = run(model, interventions.again(model, [step]))
    for suffix in interventions.UPDATES:
        assert torch.equal(cache[hook_name(step, suffix)], cache[hook_name(first, suffix)])


def test_a_clamped_site_is_the_first_visits(name):
    model, step = NETWORKS[name], LATER[name]
    first = visits_of(model.plan, model.plan[step].layer)[0]
    sites = ("attn.hook_attn_scores", "attn.hook_pattern", *(["mlp.hook_router_logits"] if name == "ours" else []))
    for suffix in sites:
        _, cache = run(model, interventions.clamp(model, suffix, [step]))
        assert torch.equal(cache[hook_name(step, suffix)], cache[hook_name(first, suffix)]), suffix
    _, scored = run(model, interventions.clamp(model, "attn.hook_attn_scores", [step]))
    pattern = (hook_name(s, "attn.hook_pattern") for s in (step, first))
    assert torch.equal(*(scored[at] for at in pattern))
    if name == "ours":
        assert torch.equal(*(cache[hook_name(s, "mlp.hook_expert_indices")] for s in (step, first)))
        assert torch.equal(*(cache[hook_name(s, "mlp.hook_expert_weights")] for s in (step, first)))


def test_swapped_visits_have_each_others(name):
    model, step = NETWORKS[name], LATER[name]
    layer, visit = model.plan[step]
    plain, cache = run(model), run(model, interventions.swap(model, "hook_mlp_out", layer=layer, visits=(0, visit)))
    one, two = hook_name(model.step(layer, 0), "hook_mlp_out"), hook_name(step, "hook_mlp_out")
    assert torch.equal(cache[1][one], plain[1][two])
    assert torch.equal(cache[1][two], plain[1][one])


def test_ablated_heads_are_zero_the_mean_or_anothers_and_other_heads_stay(name):
    model, step = NETWORKS[name], LATER[name]
    target = Target("attn.hook_z", (step,), (0, 2))
    at = target.names[0]
    plain, other = run(model)[1][at], run(model, samples=SAMPLES.rows(np.array([1, 2, 0])))[1][at]
    given = {"zero": torch.zeros_like(plain), "mean": torch.full_like(plain, 0.25), "resample": other}
    for how, values in given.items():
        found = run(model, getattr(interventions, how)(target))[1][at]
        assert torch.equal(found[:, :, [0, 2]], values[:, :, [0, 2]]), how
        assert torch.equal(found[:, :, [1, 3]], plain[:, :, [1, 3]]), how


def test_start_mass_moves_to_content_and_rows_keep_their_sum(name):
    model, step = NETWORKS[name], LATER[name]
    at = hook_name(step, "attn.hook_pattern")
    before = run(model)[1][at]
    after = run(model, interventions.move_start_mass([step], content))[1][at]
    torch.testing.assert_close(after.sum(-1), before.sum(-1))
    content_S = torch.arange(12) % 3 == 1
    other_S = ~content_S & (torch.arange(12) > 0)
    assert torch.equal(after[..., 0, :], before[..., 0, :]), "the start's own row"
    assert not after[..., 1:, 0].any()
    assert torch.equal(after[..., other_S], before[..., other_S])
    gained = after[..., 1:, content_S].sum(-1) - before[..., 1:, content_S].sum(-1)
    torch.testing.assert_close(gained, before[..., 1:, 0])
    ratio = after[..., 4:, [1, 4]] / before[..., 4:, [1, 4]]
    torch.testing.assert_close(ratio[..., 0], ratio[..., 1])  # in proportion


def test_a_random_change_is_as_large_and_does_not_depend_on_the_batch(name):
    model, step = NETWORKS[name], LATER[name]
    at = hook_name(step, "hook_attn_out")
    plain = run(model)[1][at]
    edit = interventions.at_random(interventions.zero(Target("hook_attn_out", (step,))), seed=3)
    found = run(model, edit)[1][at]
    torch.testing.assert_close((found - plain).norm(dim=-1), plain.norm(dim=-1))
    cosine = torch.cosine_similarity(found - plain, plain, dim=-1)
    assert cosine.abs().mean() < 0.5
    changes = [
        interventions.random_like(plain[rows], plain[rows], np.array(rows), 3, keys=False) for rows in ([0, 1, 2], [2])
    ]
    assert torch.equal(changes[0][2], changes[1][0])
    at = hook_name(step, "attn.hook_pattern")
    before = run(model)[1][at]
    after = run(model, interventions.at_random(interventions.clamp(model, "attn.hook_pattern", [step])))[1][at]
    torch.testing.assert_close(after.sum(-1), before.sum(-1))
    assert not after.triu(1).any(), "keys that are not seen get nothing"


def test_scores_without_anything_in_them_are_even_over_the_keys_that_are_seen(name: str):
    model, at = NETWORKS[name], hook_name(3, "attn.hook_pattern")
    before, after = run(model)[1][at], run(model, interventions.zero(Target("attn.hook_attn_scores", (3,))))[1][at]
    seen = (before > 0).float()
    torch.testing.assert_close(after, seen / seen.sum(-1, keepdim=True))


def test_several_edits_are_one():
    model = NETWORKS["ours"]
    both = [interventions.zero(Target("hook_mlp_out", (3,))), interventions.zero(Target("hook_attn_out", (4,)))]
    cache = run(model, interventions.together("both", both))[1]
    assert not cache[hook_name(3, "hook_mlp_out")].any()
    assert not cache[hook_name(4, "hook_attn_out")].any()
    with pytest.raises(UserError, match=r"edits of one pass must change different sites; got 'blocks\.3"):
        interventions.together("twice", [both[0], both[0]])


def test_what_cannot_be_edited_is_one_line():
    ours, dense = NETWORKS.values()
    for model, edit, message in (
        (dense, interventions.clamp(dense, "mlp.hook_router_logits", [8]), "a network of family dense-nested has; got"),
        (dense, interventions.zero(Target("ln1.hook_normalized", (8,))), "a network of family dense-nested has; got"),
        (ours, interventions.zero(Target("attn.hook_z", (3,), (4,))), r"heads of attn.hook_z must be 0 to 3; got 4"),
        (ours, interventions.zero(Target("hook_mlp_out", (17,))), r"a hook name must be one of the network's"),
    ):
        with pytest.raises(UserError, match=message):
            run(model, edit)
    here = Target("hook_mlp_out", (1,))
    for edit, message in (
        (interventions.put(here, {}), "those of every site of the target; got none of 'blocks.1.hook_mlp_out'"),
        (
            interventions.put(here, {here.names[0]: torch.zeros(1)}, torch.ones(3, 4, dtype=torch.bool)),
            r"places must be given for each token, \(.*\); got shape \(3, 4\)",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(ours, edit)
    refused = {
        "an edit must have at least one step; got none: skip": lambda: interventions.skip([]),
        "an edit must have at least one step; got none: both": lambda: interventions.together("both", []),
        "a step must be a later visit of its layer .* got layer 1, visit 1": lambda: interventions.again(ours, [0]),
        "to be given the first one's; got step 99 of 6": lambda: interventions.clamp(ours, "attn.hook_pattern", [99]),
        r"must be in the plan; got \(0, 1\)": lambda: interventions.swap(ours, "hook_mlp_out", layer=0),
        "an edit must have at least one step": lambda: Target("hook_mlp_out", ()),
        "heads must be those of a site that has some; got hook_mlp_out": lambda: Target("hook_mlp_out", (1,), (0,)),
        "got 'hook_mpl_out'; nearest: hook_mlp_out": lambda: Target("hook_mpl_out", (1,)),
        "must not be set to 0; got mlp.hook_expert_indices": lambda: interventions.zero(
            Target("mlp.hook_expert_indices", (1,))
        ),
        "a mean must be taken of a site without an axis of keys": lambda: interventions.mean(
            Target("attn.hook_pattern", (1,))
        ),
        "a random direction must be one of real numbers": lambda: interventions.at_random(
            interventions.resample(Target("mlp.hook_expert_indices", (1,)))
        ),
    }
    for message, make in refused.items():
        with pytest.raises(UserError, match=message):
            make()
