"""Patching: batched, restarted passes give what one pass a patch gives, and rows are what they say."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.patching import batched, looped
from cache.record import run_batches
from model.hooks import interventions
from model.hooks.interventions import Target
from model.hooks.looped_model import LoopedModel
from model.network import LoopedMoE
from probes import patching
from probes.running.patches import Patch, PatchedRuns
from probes.running.probe import Result, run
from probes.running.source import SampleSet
from smelt_interp.data.dyck import DyckOptions, DyckPairs, dyck_pairs
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, hook_name
from tests.support.commands import Command
from tests.support.configs import TINY
from tests.support.dense import DenseNested
from tests.support.families import SPAN, hooked
from tests.support.networks import tiny_network
from tests.support.planted import pick

NETWORKS: dict[str, LoopedModel] = {
    "ours": tiny_network(), "dense": DenseNested().eval(), "llama": hooked("llama", SPAN), "gpt2": hooked("gpt2", SPAN),
}  # fmt: skip
ALL = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "attn.hook_z", "attn.hook_v", "attn.hook_pattern")


def pairs_of(model: LoopedModel, num: int = 3) -> DyckPairs:
    options = DyckOptions(shots=(1,), max_total=6, min_total=4)
    return dyck_pairs(options, num, seed=1, length=48, tokenizer=model.tokenizer, swap="opener")


PAIRS = {name: pairs_of(model) for name, model in NETWORKS.items()}


def measure(model: LoopedModel, pairs: DyckPairs, *, batch_size: int = 2, **options: object) -> Result:
    asked = {"patching": (patching, patching.Options(swap="opener", **options))}
    data = SampleSet(name="dyck", samples=pairs.clean, corrupted=pairs.corrupted)
    batches = run_batches(model, pairs.clean, (), batch_size=batch_size)
    return run(batches, asked, network=model, data=data, by_sample=True)["patching"]


@pytest.mark.parametrize("suffix", ALL)
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_patches_in_batches_are_patches_one_by_one(name: str, suffix: str):
    model, pairs = NETWORKS[name], PAIRS[name]
    runs = PatchedRuns(model, pairs.clean, pairs.corrupted, ALL)
    generator = np.random.default_rng(0)
    shape, heads = pairs.clean.ids_NT.shape, suffix.startswith("attn.")
    patches = [Patch(generator.random(shape) < share, head) for share in (0.05, 0.5, 1)
               for head in ((0, 1) if heads else (None,))]  # fmt: skip
    steps = (3, 1)
    found_LPB = runs.scores(suffix, {step: runs.values(suffix, step) for step in steps}, patches, most_rows=9)
    tokens_BT = torch.from_numpy(pairs.corrupted.ids_NT[:, : runs.length].astype(np.int64))
    for (step, patch), found_B in zip(product(steps, patches), found_LPB.flatten(0, 1), strict=True):
        target = Target(suffix, (step,), () if patch.head is None else (patch.head,))
        values = {hook_name(step, suffix): runs.values(suffix, step)}
        edit = interventions.put(target, values, torch.from_numpy(patch.where_BT[:, : runs.length]))
        logits_BTW = model.run_with_hooks(tokens_BT, fwd_hooks=edit.hooks(interventions.Sources(
            samples=pairs.clean, sample_ids=np.arange(3))))  # fmt: skip
        torch.testing.assert_close(found_B, runs._score(logits_BTW, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_itself_changes_nothing_and_all_of_the_clean_stream_is_the_clean_run(name: str):
    model, pairs = NETWORKS[name], PAIRS[name]
    runs = PatchedRuns(model, pairs.clean, pairs.corrupted, ["hook_resid_pre"])
    patches = [Patch(np.ones(pairs.clean.ids_NT.shape, np.bool_))]
    itself = runs._corrupted[1][hook_name(2, "hook_resid_pre")]
    assert torch.equal(runs.scores("hook_resid_pre", {2: itself}, patches)[0, 0], runs.corrupted_B)
    if name == "ours":  # the stream is all that a step hands on
        whole_B = runs.scores("hook_resid_pre", {2: runs.values("hook_resid_pre", 2)}, patches)[0, 0]
        torch.testing.assert_close(whole_B, runs.clean_B, rtol=1e-4, atol=1e-5)


def test_the_grid_is_transformer_lenss(capsys: pytest.CaptureFixture[str]):
    pairs = pairs_of(NETWORKS["ours"], 2)
    torch.testing.assert_close(batched(NETWORKS["ours"], pairs), looped(NETWORKS["ours"], pairs), rtol=1e-5, atol=1e-5)
    capsys.readouterr()


def test_attributions_are_directional_derivatives_and_leave_no_gradient():
    model, pairs = NETWORKS["ours"], PAIRS["ours"]
    runs = PatchedRuns(model, pairs.clean, pairs.corrupted, ["hook_mlp_out", "attn.hook_z"])
    found = runs.attributions(["hook_mlp_out", "attn.hook_z"])
    assert all(weight.grad is None for weight in model.parameters())
    everywhere = [Patch(np.ones(pairs.clean.ids_NT.shape, np.bool_))]
    for suffix, axes in (("hook_mlp_out", 1), ("attn.hook_z", 2)):
        was, clean = runs._corrupted[1][hook_name(3, suffix)], runs.values(suffix, 3)
        small = 1e-2
        moved_B = runs.scores(suffix, {3: was + small * (clean - was)}, everywhere)[0, 0] - runs.corrupted_B
        assert found[suffix, 3].ndim == 1 + axes
        torch.testing.assert_close(found[suffix, 3].flatten(1).sum(-1), moved_B / small, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_recovery_is_a_ratio_of_sums_and_does_not_depend_on_the_batches(name: str):
    model, pairs = NETWORKS[name], PAIRS[name]
    result = measure(model, pairs)
    rows = result.rows()
    runs = PatchedRuns(model, pairs.clean, pairs.corrupted, ["hook_mlp_out"])
    groups = patching.token_groups(pairs.clean, patching.Options())
    assert list(groups) == ["demonstration input", "demonstration answer", "query", "last token"]
    found_B = runs.scores("hook_mlp_out", {3: runs.values("hook_mlp_out", 3)}, [Patch(groups["query"])])[0, 0]
    recovery = float((found_B - runs.corrupted_B).sum() / (runs.clean_B - runs.corrupted_B).sum())
    layer, visit = model.plan[3]
    where = {"site": "hook_mlp_out", "tokens": "query", "layers": str(layer + 1), "visit": visit + 1}
    assert pick(rows, quantity="recovery", **where)["value"] == pytest.approx(recovery, rel=1e-3, abs=1e-5)
    assert pick(rows, quantity="clean score")["value"] == pytest.approx(float(runs.clean_B.mean()), rel=1e-4)
    assert -1 <= pick(rows, quantity="correlation", site="hook_mlp_out")["value"] <= 1
    before = pick(rows, quantity="recovery", **{**where, "tokens": "demonstration input"})
    assert before["value"] == pytest.approx(0, abs=1e-3), "nothing differs there but the last bits"
    for one, other in zip(rows, measure(model, pairs, batch_size=3).rows(), strict=True):
        if one["value"] is not None:
            assert one["value"] == pytest.approx(other["value"], rel=1e-3, abs=1e-5)
    assert len(result.by_sample) == 3


def test_heads_and_positions_are_patched_alone():
    model, pairs = NETWORKS["ours"], PAIRS["ours"]
    result = measure(model, pairs, by="head", tokens="position", last=2, sites=("attn.hook_z", "attn.hook_v"))
    rows = [row for row in result.rows() if row["quantity"] == "recovery" and row["level"] == "head"]
    assert len(rows) == 2 * 6 * (4 + 2)
    assert {row["tokens"] for row in rows} == {"1 before", "2 before"}


def test_what_cannot_be_patched_is_one_line():
    ours, pairs = NETWORKS["ours"], PAIRS["ours"]
    assert SITES["mlp.hook_expert_indices"].integer
    for options, message in (
        (
            {"sites": ("mlp.hook_expert_indices",)},
            "a site to patch must hold real numbers; got mlp.hook_expert_indices",
        ),
        ({"sites": ("attn.hook_result",)}, "heads to patch must be those of a site that every pass has"),
        ({"sites": ("hook_mlp_out",), "by": "head"}, "sites must have heads with --by head; got hook_mlp_out"),
    ):
        with pytest.raises(UserError, match=message):
            measure(ours, pairs, **options)
    with pytest.raises(UserError, match="a hook must be on a site that a network of family dense-nested has"):
        measure(NETWORKS["dense"], PAIRS["dense"], sites=("mlp.hook_router_logits",))
    with pytest.raises(UserError, match="a network to patch must predict the next token; albert fills in others"):
        measure(hooked("albert"), pairs)
    with pytest.raises(UserError, match="samples to patch must be pairs; got none that are corrupted"):
        patching.start_with(ours, SampleSet(name="dyck", samples=pairs.clean), patching.Options())


def test_the_command_makes_its_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    LoopedMoE(TINY, seed=1).save_pretrained(tmp_path / "looped", readme="")
    command = Command(monkeypatch, capsys)
    words = ("--ckpt", tmp_path / "looped", "--samples", 2, "--shots", 1, "--max-total", 6, "--length", 48)
    document = command.json(patching.main, *words, "--no-untrained", "--sites", "hook_mlp_out")
    result = document["results"][0]
    assert result["documents"] == 2
    assert pick(result["rows"], quantity="recovery", tokens="last token", layers="looped 2-3", visit=2)["value"]
    said = command.refusal(patching.main, "--ckpt", tmp_path / "never-opened", "--data", "code")
    assert "data to patch must be dyck, which has pairs; got code" in said
