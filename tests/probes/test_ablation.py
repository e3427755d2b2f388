"""Ablation: effects are those of the edits that it names, paired by sample, with their nulls beside them."""

from pathlib import Path

import numpy as np
import pytest

from cache.record import record, run_batches
from model.hooks import interventions
from model.hooks.interventions import Target
from model.hooks.looped_model import LoopedModel
from model.network import LoopedMoE
from probes import ablation
from probes.running import compare
from probes.running.probe import Result, accumulate, run
from probes.running.source import SampleSet
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from tests.support.commands import Command
from tests.support.configs import TINY, TINY_BASELINE
from tests.support.dense import DenseNested
from tests.support.networks import tiny_network
from tests.support.planted import pick, text_samples

OURS = tiny_network()
TEXT = text_samples(5, 12, padding=2)
DYCK = load_samples(DataOptions(samples=3, shots=(1,), length=40, max_total=6), 64, BYTES)


def measure(model: LoopedModel, samples: Samples = TEXT, *, batch_size: int = 2, **options: object) -> Result:
    asked = {"ablation": (ablation, ablation.Options(**options))}
    batches = run_batches(model, samples, (), batch_size=batch_size)
    return run(batches, asked, network=model, data=SampleSet(name="text", samples=samples), by_sample=True)["ablation"]


def effects(result: Result, **where: object) -> list[dict[str, object]]:
    return [row for row in result.rows() if row["quantity"] == "loss (nats), effect" and where.items() <= row.items()]


def test_a_visit_is_the_edit_of_its_looped_layers_together():
    rows = measure(OURS, how="mean", sites=("hook_mlp_out",)).rows()
    for visit, steps in ((1, (1, 2)), (2, (3, 4))):
        row = pick(rows, quantity="loss (nats), effect", layers="looped 2-3", visit=visit)
        edit = interventions.mean(Target("hook_mlp_out", steps))
        edits = {"edit": edit, "random": interventions.at_random(edit), "others": interventions.mean(
            Target("hook_mlp_out", (0, 5)))}  # fmt: skip
        told = compare.compare(OURS, TEXT, edits, compare.loss).table.set_index("edit")
        assert row["value"] == pytest.approx(told["effect"]["edit"], rel=1e-4)
        assert [row["low"], row["high"]] == pytest.approx(told.loc["edit", ["low", "high"]].tolist(), rel=1e-4)
        assert row["null_random_direction"] == pytest.approx(told["effect"]["random"], rel=1e-3)
        assert row["null_other_layers"] == pytest.approx(told["effect"]["others"], rel=1e-3)
    assert pick(rows, quantity="loss (nats)")["value"] == pytest.approx(told["unedited"]["edit"], rel=1e-5)


def test_a_layer_and_a_head_are_each_replaced_alone_and_the_headline_is_their_mean():
    result = measure(OURS, by="head", how="zero", sites=("attn.hook_z", "attn.hook_k"))
    found = effects(result, level="head", site="attn.hook_z", layers="2", visit=2)
    edits = {str(head): interventions.zero(Target("attn.hook_z", (3,), (head,))) for head in range(4)}
    told = compare.compare(OURS, TEXT, edits, compare.loss).table["effect"]
    assert [row["value"] for row in found] == pytest.approx(told.tolist(), rel=1e-3, abs=1e-7)
    (layer,) = effects(result, level="layer", site="attn.hook_z", layers="2", visit=2)
    assert layer["value"] == pytest.approx(told.mean(), rel=1e-3)
    assert len(effects(result, level="head", site="attn.hook_k")) == 6 * 2, "its own two heads"
    headline = effects(result, level="headline", site="attn.hook_k", visit=1)[0]["value"]
    inside = [effects(result, level="layer", site="attn.hook_k", layers=layer, visit=1)[0] for layer in "23"]
    assert headline == pytest.approx(np.mean([row["value"] for row in inside]))
    outside = [effects(result, level="layer", site="attn.hook_k", layers=layer)[0]["value"] for layer in "14"]
    assert [row["null_other_layers"] for row in inside] == pytest.approx([np.mean(outside)] * 2)


@pytest.mark.parametrize("model", [OURS, DenseNested().eval()], ids=["ours", "dense"])
def test_visits_are_swapped_or_clamped_to_the_first(model: LoopedModel):
    swapped = effects(measure(model, by="layer", how="swap", sites=("attn.hook_z",)), level="layer")
    revisited = [step for step in model.plan if step.visit]
    assert [(row["layers"], row["visit"]) for row in swapped] == [
        (str(step.layer + 1), f"1 vs {step.visit + 1}") for step in revisited
    ]
    step = model.plan.index(revisited[0])
    edit = interventions.swap(model, "attn.hook_z", layer=revisited[0].layer)
    told = compare.compare(model, TEXT, {"edit": edit}, compare.loss).table["effect"][0]
    assert swapped[0]["value"] == pytest.approx(told, rel=1e-3)
    clamped = effects(measure(model, by="layer", how="clamp", sites=("attn.hook_pattern",)), level="layer")
    edit = interventions.clamp(model, "attn.hook_pattern", [step])
    told = compare.compare(model, TEXT, {"edit": edit}, compare.loss).table["effect"][0]
    assert [row["visit"] for row in clamped] == [step.visit + 1 for step in revisited]
    assert clamped[0]["value"] == pytest.approx(told, rel=1e-3)


def test_answers_are_scored_where_every_row_asks_and_each_sample_has_its_own_effect():
    result = measure(OURS, DYCK, how="zero", nulls=False)
    names = {row["quantity"] for row in result.rows()}
    scores = ("loss (nats)", "answer loss (nats)", "exact match")
    assert names == {*scores, *(f"{score}, effect" for score in scores)}
    assert not [name for name in result.table.columns if name.startswith("null_")]
    assert len(result.by_sample) == 3
    (column,) = (
        name for name in result.by_sample if name.startswith("loss (nats), effect, looped 2-3, visit 2, hook_a")
    )
    row = effects(result, site="hook_attn_out", visit=2)[0]
    assert result.by_sample[column].mean() == pytest.approx(row["value"], rel=1e-5)


def test_parts_of_the_samples_merge_to_the_whole():
    asked, data = {"x": (ablation, ablation.Options(how="resample"))}, SampleSet(name="text", samples=TEXT)
    parts = [accumulate(run_batches(OURS, TEXT, (), rows=rows), asked, network=OURS, data=data)["x"]
             for rows in ([0, 3], [1, 2, 4])]  # fmt: skip
    parts[0].merge(parts[1])
    whole = effects(measure(OURS, how="resample"))
    for one, other in zip(effects(ablation.result(parts[0])), whole, strict=True):
        assert [one[name] for name in ("value", "low", "high")] == pytest.approx(
            [other[name] for name in ("value", "low", "high")], rel=1e-4
        )


def test_what_cannot_be_ablated_is_one_line():
    for options, message in (
        ({"sites": ("hook_mlp_out",), "by": "head"}, "sites must have heads with --by head; got hook_mlp_out"),
        ({"sites": ("hook_mpl_out",)}, "got 'hook_mpl_out'; nearest: hook_mlp_out"),
        ({"layers": (4,)}, "layers must be 1 to 4; got 5"),
        ({"how": "swap", "layers": (0,)}, "layers to ablate with --how swap must be visited again; got none"),
        ({"sites": ("attn.hook_pattern",)}, "a mean must be taken of a site without an axis of keys"),
        ({"sites": ("mlp.hook_expert_indices",), "how": "zero"}, "must not be set to 0"),
    ):
        with pytest.raises(UserError, match=message):
            measure(OURS, **options)
    with pytest.raises(UserError, match="that a network of family dense-nested has; got 'blocks"):
        measure(DenseNested().eval(), sites=("mlp.hook_router_logits",))
    with pytest.raises(UserError, match="Ablation must be given all samples; got batches alone: pass data="):
        run(run_batches(OURS, TEXT, ()), {"x": (ablation, ablation.Options())}, network=OURS)
    with pytest.raises(UserError, match="Ablation must be given the network that it runs; got batches alone"):
        run(run_batches(OURS, TEXT, ()), {"x": (ablation, ablation.Options())})


def test_the_command_measures_checkpoints_side_by_side_and_refuses_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, config in (("looped", TINY), ("once", TINY_BASELINE)):
        LoopedMoE(config, seed=1).save_pretrained(tmp_path / name, readme="")
    command = Command(monkeypatch, capsys)
    data = ("--samples", 3, "--shots", 0, "--max-total", 6, "--length", 40)
    document = command.json(ablation.main, "--ckpt", tmp_path / "looped", "--against", tmp_path / "once", *data,
                            "--how", "zero", "--out", tmp_path / "out")  # fmt: skip
    rows = document["results"][0]["rows"]
    row = pick(rows, quantity="loss (nats), effect", site="hook_mlp_out", visit=2)
    assert None not in (row["in_once"], row["in_untrained"])
    assert (tmp_path / "out" / "ablation.html").exists()
    record(OURS, DYCK, tmp_path / "capture", suffixes=())
    said = command.refusal(ablation.main, "--capture", tmp_path / "capture")
    assert "Ablation cannot be measured; capture: a capture holds no weights to run" in said
    beside = ("--against", tmp_path / "never-opened")
    said = command.refusal(ablation.main, "--ckpt", tmp_path / "once", *beside, *data, "--how", "swap")
    assert "must be visited again" in said
