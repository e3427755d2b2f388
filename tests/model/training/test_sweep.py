"""Pairs and sweeps: members are sized like their Baseline, read the same tokens, and go on after an interruption."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from model.network import LoopedMoE
from model.training import members
from model.training.members import Trained
from model.training.options import TrainOptions
from model.training.pair import PairOptions, train_pair
from model.training.sweep import SweepOptions, configs, sweep
from smelt_interp.costs.budget import PAPER_TOLERANCE, budget, mismatch
from smelt_interp.costs.matching import MatchRequest
from smelt_interp.costs.presets import DEMO_BASELINE, causal_mean
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.errors import UserError
from smelt_interp.scaling.command import read_grids

SMALL = replace(
    DEMO_BASELINE, num_layers=4, width=24, num_heads=2, num_kv_heads=1, head_width=12, expert_width=32, num_experts=12,
    loop_start=1, loop_stop=3,
)  # fmt: skip
MIXTURE = MixtureOptions(context=16, dyck_episode=1, dyck_standard=0, code=0, prose=0, math=0, backcopy=1, max_total=4)
MATCH = MatchRequest(
    query_heads="scores", experts_multiple=1, expert_width_multiple=1, width_multiple=1, least_expert_width=8
)
SWEEP = SweepOptions(
    axis="scale", values=("1",), baseline="small.json", out=Path("sweep"), seeds=(3, 4), match=MATCH,
    mixture=MIXTURE, steps=2, warmup=1, learning_rate=1e-3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(SMALL.to_json()))


def test_a_pair_is_a_baseline_and_its_twin_on_the_same_tokens():
    options = PairOptions(
        baseline="small.json", out=Path("pair"), seed=5, match=MATCH, mixture=MIXTURE, steps=1, warmup=1
    )
    baseline, looped = train_pair(options)
    configs = [LoopedMoE.from_pretrained(each.checkpoint).config for each in (baseline, looped)]
    assert configs[0] == SMALL
    assert (configs[1].num_visits, configs[1].loop_start, configs[1].loop_stop) == (2, 1, 3)
    assert mismatch(*(budget(config, causal_mean(160)) for config in reversed(configs))).within(PAPER_TOLERANCE)
    assert baseline.digest == looped.digest == TrainingMixture(MIXTURE).order_digest(1)
    assert baseline.loss_nats.keys() == {"dyck", "backcopy"}


def test_a_sweep_goes_on_where_it_was_and_ends_in_a_table_and_the_files_that_fits_read(monkeypatch):
    train, trained = members.train, list[str]()

    def stopped(options: TrainOptions) -> list[Path]:
        trained.append(options.out.name)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train(options)

    monkeypatch.setattr(members, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep(SWEEP)
    table, files = sweep(SWEEP)
    assert trained == ["baseline-seed-3", "baseline-seed-4", *["scale-1-seed-3"] * 2, "scale-1-seed-4"]
    (_, *_, loss, _, _, _), (name, shape, *_, looped_loss, over, half, _) = table.rows
    assert (name, shape) == ("scale-1", "4 layers, width 20, heads 2/1 x 8, 18 experts x 26")
    assert isinstance(loss, float)
    assert isinstance(looped_loss, float)
    assert over == pytest.approx(looped_loss - loss) != 0
    assert isinstance(half, float)
    assert half > 0
    rows = list(csv.DictReader(files["runs.csv"].decode().splitlines()))
    assert len(rows) == 2 * 2 * 2
    assert {row["tokens"] for row in rows} == {"64"}
    assert {float(row["flops_per_token"]) for row in rows if row["architecture"] == "baseline"} == {
        budget(SMALL, causal_mean(160)).flops.training
    }
    weights = budget(SMALL).parameters.total
    assert (int(rows[0]["once"]), int(rows[0]["repeated"])) == (weights - (weights - 24) // 2, (weights - 24) // 2)
    Path("runs.csv").write_bytes(files["runs.csv"])
    with pytest.raises(UserError, match="baseline, domain dyck must have at least 2 different sparsity levels"):
        read_grids(Path("runs.csv"))
    assert files["scores.csv"].decode().splitlines()[0] == "architecture,loss,score,pair"
    with pytest.raises(UserError, match="--steps must stay that of the run, 2; got 3; choose another --out"):
        sweep(replace(SWEEP, steps=3))
    for damaged in (b"", b"step,tokens\n1", b"step,tokens,held_out_code\n1,2,x\n"):
        Path("sweep/baseline-seed-3/metrics.csv").write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"the last line of sweep/baseline-seed-3/metrics\.csv must be whole; .*anew"
        ):
            sweep(SWEEP)
    for path in (*Path("sweep").glob("*/checkpoint"), Path("sweep/baseline-seed-3")):
        shutil.rmtree(path)
    trained.clear()
    with pytest.raises(UserError, match="--steps must stay that of the run, 2; got 3; choose another --out"):
        sweep(replace(SWEEP, steps=3))
    assert not trained, "another run's state is found before any trains"


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("span", "0.75", r"^span-0\.75 cannot be matched: all budgets must be met; the nearest .* has KV cache -12\.5"),
        ("visits", "two", "a value of the axis must be a whole number; got 'two'"),
        ("scale", "x", "a value of the axis must be a number; got 'x'"),
        ("repeats", "1", "values must give networks that differ; repeats-1 is the same as baseline: leave one out"),
        ("controls", "loops", "a control must be parameters or experts; got 'loops'"),
    ],
)
def test_a_member_that_cannot_be_is_refused_before_anything_trains(axis, value, message):
    with pytest.raises(UserError, match=message):
        sweep(replace(SWEEP, axis=axis, values=(value,)))
    assert not Path("sweep").exists()


def test_controls_have_more_parameters_or_more_experts_and_no_loop():
    found = configs(replace(SWEEP, axis="controls", values=("parameters", "experts")))
    baseline, parameters, experts = (budget(config) for config in found.values())
    assert all(config.num_visits == 1 for config in found.values())
    assert parameters.parameters.experts == 2 * baseline.parameters.experts == 2 * experts.parameters.experts
    assert parameters.flops.experts == baseline.flops.experts == experts.flops.experts


def test_repeats_are_the_baseline_itself_with_more_visits():
    found = configs(replace(SWEEP, axis="repeats", values=("2", "3")))
    assert found["repeats-3"] == replace(SMALL, num_visits=3, loop_scale=1 / 3)


def test_networks_that_read_other_tokens_are_told(monkeypatch):
    def read(member: members.Member, options: TrainOptions) -> Trained:
        return Trained(
            member=member, checkpoint=options.out, tokens=1, loss_nats={}, exact_match={}, digest=member.name
        )

    monkeypatch.setattr(members, "train", lambda options: [options.out])
    monkeypatch.setattr(members, "_read", read)
    with pytest.raises(UserError, match="in sweep must have read the same tokens in the same order; they have not"):
        sweep(SWEEP)


@pytest.mark.parametrize("page", ["README.md", "docs/experiments.md", "model/training/sweep.py"])
def test_the_members_of_a_line_that_a_page_prints_can_be_matched(page: str) -> None:
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    lines = re.findall(r"training\.sweep (\w+) ([\w. ]+?) --baseline demo (?:--seeds [\d ]+)?--out", text)
    assert lines
    for axis, values in lines:
        asked = replace(SWEEP, axis=axis, values=tuple(values.split()), baseline="demo", match=MatchRequest())
        assert len(configs(asked)) == 1 + len(values.split())
