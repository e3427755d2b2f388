"""Training: a run that is stopped at any moment and goes on is the run that was never stopped."""

import csv
import json
import os
import re
import resource
import signal
import struct
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboardX.proto.event_pb2 import Event

from model.network import LoopedMoE
from model.training import train as training
from model.training.optimizers import Optimizers
from model.training.options import TrainOptions
from model.training.run_folder import locked
from model.training.schedule import decay_start, rate
from model.training.state import load_state, states
from model.training.tensorboard import Events
from model.training.train import Training, train
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from tests.support.configs import TINY
from tests.support.forked import Child

MIXTURE = MixtureOptions(
    context=32, dyck_episode=0, dyck_standard=0, code=2, prose=0, math=0, backcopy=1, source="excerpts"
)
OPTIONS = TrainOptions(
    config="small.json", out=Path("run"), steps=6, warmup=2, decay=0.5, save_every=2, keep_every=3, evaluate_every=3,
    mixture=MIXTURE,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(TINY.to_json()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("small.json").write_text(json.dumps(TINY.to_json()))
        assert train(OPTIONS) == [Path("run/checkpoint")]
    return folder / "run"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoint" / "model.safetensors")


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def drawn(run: Path) -> list[dict[str, float]]:
    """The rows that TensorBoard shows: of its files in turn, each dropping what it writes anew."""
    rows: list[dict[str, float]] = []
    for path in sorted((run / "tensorboard").iterdir(), key=lambda path: path.name.rsplit(".", 1)[-1]):
        records = path.read_bytes()
        while len(records) > 16:
            (size,) = struct.unpack_from("<Q", records)
            event, records = Event.FromString(records[12 : 12 + size]), records[16 + size :]
            if event.HasField("session_log"):
                rows = [row for row in rows if row["step"] < event.step]
            if event.HasField("summary"):
                values = {value.tag.replace("/", "_"): value.simple_value for value in event.summary.value}
                rows.append({"step": event.step} | values)
    return rows


def remembered(run: Path, step: int, options: TrainOptions = OPTIONS) -> dict[str, torch.Tensor]:
    """Everything in a state."""
    network = LoopedMoE(TINY)
    tensors = Training(options, network, Optimizers(network, options)).tensors()
    load_state(states(run)[step], tensors)
    return tensors


def check_same(run: Path, other: Path) -> None:
    for found, expected in ((weights(run), weights(other)), (remembered(run, 6), remembered(other, 6))):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert metrics(run) == metrics(other)
    texts = [(each / "checkpoint/README.md").read_text().splitlines() for each in (run, other)]
    assert [line for line in texts[0] if "wall time" not in line] == [
        line for line in texts[1] if "wall time" not in line
    ]


def killed_at(call: int) -> int:
    """Train in a child that is killed at the n-th file that it opens for writing, renames or removes in the run's
    folder. -> how it ended"""

    def work() -> None:
        left = call

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and "run/" in str(arguments[0]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        train(OPTIONS)

    return Child(work).wait()[0]


def test_a_run_that_was_killed_at_any_call_goes_on_to_the_same_bits(whole):
    calls = 3
    while not Path("run/checkpoint").exists() and killed_at(calls) == -signal.SIGKILL:
        calls += 15  # later each time, since a run that goes on has less to do
        assert calls < 200
    check_same(Path("run"), whole)
    for shown, row in zip(drawn(Path("run")), metrics(whole), strict=True):
        del shown["seconds"]
        assert shown == pytest.approx({name: float(value) for name, value in row.items()}, rel=1e-6, nan_ok=True)


def test_what_was_drawn_before_the_first_state_is_drawn_once():
    Path("run").mkdir()
    for _ in range(2):
        with closing(Events(Path("run"), 0)) as events:
            for step in (1, 2):
                events.write({"step": step, "loss": 0.5})
    assert drawn(Path("run")) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


def test_ctrl_c_while_a_state_is_written_is_ctrl_c_and_the_run_goes_on(whole):
    def work() -> None:
        pressed = False

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal pressed
            if event == "open" and not pressed and ".state-000000004" in str(arguments[0]):
                pressed = True
                raise KeyboardInterrupt

        sys.addaudithook(audit)
        run_command(lambda: print(train(OPTIONS)))

    assert Child(work).wait() == (130, "interrupted\n")
    assert [*states(Path("run"))] == [2, 3]
    assert not list(Path("run").glob(".state-*"))
    train(OPTIONS)
    check_same(Path("run"), whole)


def test_a_folder_is_for_one_training_at_a_time():
    Path("run").mkdir()
    with (
        locked(Path("run")),
        pytest.raises(UserError, match="by one process at a time; another trains in run: wait, or choose another"),
    ):
        train(OPTIONS)
    assert not Path("run/run.json").exists()


def test_a_checkpoint_is_titled_by_its_own_config_and_the_command_that_makes_it(whole):
    lines = (whole / "checkpoint/README.md").read_text().splitlines()
    assert lines[0] == "# small"
    (command,) = [line.split("`")[1] for line in lines if line.startswith("- command: ")]
    assert json.loads((whole / "run.json").read_text())["command"] == command
    program, *arguments = command.removeprefix("python -m ").split()
    parsed = parse(TrainOptions, prog=program, description="", args=arguments)
    assert (program, parsed) == ("model.training.train", replace(OPTIONS, out=Path("runs/small")))


def test_a_run_keeps_its_last_states_and_those_for_branches_and_says_what_it_read(whole):
    assert [*states(whole)] == [3, 4, 6]
    rows = metrics(whole)
    assert [(row["step"], row["tokens"]) for row in rows] == [("3", "288"), ("6", "576")]
    assert {"held_out_code", "held_out_backcopy", "balance", "load_6", "residual_variance_6"} <= rows[0].keys()
    assert all(1 <= float(row[f"load_{step}"]) <= TINY.num_experts for row in rows for step in range(1, 7))
    digest = TrainingMixture(MIXTURE).order_digest(6)
    assert f"- token order: `{digest}`" in (whole / "checkpoint/README.md").read_text().splitlines()


def test_training_lowers_the_loss_of_what_it_reads(whole):
    tokens_BT = torch.from_numpy(TrainingMixture(MIXTURE).batch(5).ids_NT).long()
    with torch.no_grad():
        after = LoopedMoE.from_pretrained(whole / "checkpoint").loss(tokens_BT).next_token
        assert after < LoopedMoE(TINY).loss(tokens_BT).next_token - 0.1


@pytest.mark.parametrize("horizon", [6, 7])
def test_a_branch_is_the_run_of_its_own_number_of_steps(horizon, whole):
    """Until its decay a branch is the trunk, so it ends where a run of that many steps from the start does."""
    branches = replace(OPTIONS, steps=100, branch_from=str(whole), horizons=(horizon,), out=Path("branches"))
    assert train(branches) == [Path("branches") / str(horizon) / "checkpoint"]
    train(replace(OPTIONS, steps=horizon, keep_every=0, out=Path("alone")))
    found, expected = weights(Path("branches") / str(horizon)), weights(Path("alone"))
    assert metrics(Path("branches") / str(horizon))[-1] == metrics(Path("alone"))[-1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_branch_of_another_run_names_the_option(whole):
    branches = replace(OPTIONS, branch_from=str(whole), horizons=(6,), out=Path("branches"))
    with pytest.raises(UserError, match=r"--learning-rate must be that of the run to branch from, 0\.006; got 0\.1"):
        train(replace(branches, learning_rate=0.1))
    with pytest.raises(UserError, match=r"steps must be so few that the decay starts before .*at step 3; got 8, whose"):
        train(replace(branches, horizons=(8,)))
    with pytest.raises(UserError, match=r"run must keep a state of step 2 or before, .*: train it with --keep-every"):
        train(replace(branches, horizons=(4,)))
    trunk = json.loads((whole / "run.json").read_text())
    Path("trunk").mkdir()
    for wrong in ({"steps": None}, {"decay": "x"}):
        Path("trunk/run.json").write_text(json.dumps(trunk | {"options": trunk["options"] | wrong}))
        with pytest.raises(UserError, match=r"trunk/run\.json must say the steps and the decay of its run; got "):
            train(replace(branches, branch_from="trunk", out=Path("others")))


def test_what_lies_where_the_events_go_is_told():
    Path("run").mkdir()
    Path("run/tensorboard").touch()
    with pytest.raises(UserError, match="the output folder must be writable; got run/tensorboard: File exists"):
        train(OPTIONS)


def test_what_differs_from_the_run_that_goes_on_is_named(whole, monkeypatch):
    Path("run").mkdir()
    said = json.loads((whole / "run.json").read_text())
    del said["config"]["qk_norm_over"]  # a run from before there was this field
    Path("run/run.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="--seed must stay that of the run, 0; got 1; choose another --out"):
        train(replace(OPTIONS, seed=1))
    with pytest.raises(UserError, match=r"--mixture\.code must stay that of the run, 2; got 3"):
        train(replace(OPTIONS, mixture=replace(MIXTURE, code=3)))
    Path("small.json").write_text(json.dumps(replace(TINY, tied_unembedding=True).to_json()))
    with pytest.raises(UserError, match="the config's tied_unembedding must stay that of the run, False; got True"):
        train(OPTIONS)
    Path("run/run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json must hold JSON; .*; remove the run to start anew, or choose"):
        train(OPTIONS)


def test_texts_of_ones_own_are_packed_and_a_change_of_them_is_told():
    Path("text").mkdir()
    for number in range(30):
        Path("text", f"{number}.txt").write_text(f"Once upon a time there were {number} bears.")
    options = replace(OPTIONS, text=("text",), rows=4, steps=2, accumulate=2)
    Path("one.txt").write_text("Once upon a time there was one bear.")
    with pytest.raises(UserError, match=r"one\.txt must have documents to train on .*: give a folder of more files"):
        train(replace(options, text=("one.txt",)))
    own = options.read
    assert (own.text_rows, own.code, own.backcopy) == (4, 0, 0)
    assert (TrainingMixture(own).batch(0).segment_start_NT > 0).any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "card", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(options)
    for number in range(10):
        Path("text", f"{number}.txt").write_text("Another text, which was not there before.")
    with pytest.raises(UserError, match="the texts of file:text must be those that the run read; they changed"):
        train(options)


def test_parts_of_a_step_add_up_to_its_gradient():
    """Packed rows, so that the parts have different numbers of targets; no balance, which is no mean over tokens."""
    Path("text").mkdir()
    for number in range(12):
        Path("text", f"{number}.txt").write_text("a b c " * (number + 1))
    found = []
    for parts in (1, 3):
        options = replace(OPTIONS, text=("text",), rows=6, balance=0.0, accumulate=parts)
        network = LoopedMoE(TINY)
        numbers = Training(options, network, Optimizers(network, options)).step(
            0, TrainingMixture(options.read).batch(0)
        )
        found.append((numbers["loss"], numbers["gradient_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_run_that_leaves_the_finite_numbers_says_the_step_and_keeps_the_last_state():
    with pytest.raises(
        UserError, match=r"stay finite; step 1: the gradient's norm is (nan|inf), .*no state yet: lower"
    ):
        train(replace(OPTIONS, balance=1e38, router_z=1e6, clip=1e30, learning_rate=1e-3))
    with pytest.raises(
        UserError, match=r"stay finite; step \d: .* must be finite; got nan.*; .*: lower --learning-rate"
    ):
        train(replace(OPTIONS, out=Path("other"), learning_rate=1e18, warmup=0))


@pytest.mark.parametrize(
    ("room", "full", "left"),
    [
        (10, "run/run.json", [".lock"]),
        (20, "run/tensorboard", [".lock", "run.json", "tensorboard"]),
        (4_000, "not written whole, as on a full disk .*: run/state-000000002", [".lock", "run.json", "tensorboard"]),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_no_partial_state(room, full, left, monkeypatch):
    if room == 20:
        monkeypatch.setattr(training, "write_or_compare", lambda options, *_: (options.out / "run.json").touch())

    def train_on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        run_command(lambda: print(train(OPTIONS)))

    code, said = Child(train_on_a_full_disk).wait()
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("error: ")
    assert re.search(full, said)
    assert sorted(path.name for path in Path("run").iterdir()) == left


def test_a_damaged_state_is_named_with_the_way_on(whole):
    interrupted = {"place.json": b"{}", "__0_0.distcp": b"", ".metadata": b""}
    for name, data in interrupted.items():
        copy = Path(name.strip(".") + "-run")
        for source in whole.rglob("*"):
            if source.is_file() and "checkpoint" not in source.parts:
                target = copy / source.relative_to(whole)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
        (copy / "state-000000006" / name).write_bytes(data)
        with pytest.raises(UserError, match=r"state-000000006.* must .*remove state-000000006 to go on from the state"):
            train(replace(OPTIONS, out=copy))


def test_muon_takes_each_experts_matrix_by_itself_and_goes_on_to_the_same_bits():
    options = replace(OPTIONS, optimizer="muon", steps=2, save_every=1, keep_every=1)
    train(options)
    after = remembered(Path("run"), 2, options)
    assert "momentum_buffer/layers.0.mlp.w_in" in after
    assert "exp_avg/embed.weight" in after
    for path in sorted(Path("run").rglob("*"), reverse=True):
        if "checkpoint" in path.parts or "state-000000002" in path.parts:
            path.rmdir() if path.is_dir() else path.unlink()
    train(options)
    again = remembered(Path("run"), 2, options)
    assert all(torch.equal(again[name], after[name]) for name in after)
    start = dict(LoopedMoE(TINY).named_parameters())
    assert all(not torch.equal(after[f"weight/{name}"], start[name]) for name in start)


def test_the_learning_rate_warms_up_stays_and_falls_along_a_cosine():
    options = replace(OPTIONS, steps=1000, warmup=10, decay=0.2, learning_rate=1.0)
    assert decay_start(options) == 800
    assert [rate(options, step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert {rate(options, step) for step in range(9, 801)} == {1.0}
    assert [rate(options, step) for step in (850, 900, 1000)] == pytest.approx([0.5 + 0.5**1.5, 0.5, 0.0])


def test_gains_do_not_decay():
    matrices, gains = Optimizers(LoopedMoE(TINY), OPTIONS).adamw.param_groups
    assert (matrices["weight_decay"], gains["weight_decay"]) == (0.1, 0.0)
    assert all(weight.ndim >= 2 for weight in matrices["params"])
    assert len(gains["params"]) == 2 * 4 + 1


def test_a_finished_run_is_left_alone(whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    with pytest.raises(UserError, match="a run must not be finished already; run/checkpoint exists"):
        train(OPTIONS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number; got nan"),
        ({"clip": 0.0}, "clip must be above 0; got 0.0"),
        ({"seed": -1}, "seed must be at least 0; got -1"),
        ({"decay": 1.5}, "decay must be at most 1; got 1.5"),
        ({"config": ""}, "one of --preset and --config must be given; got neither"),
        ({"preset": "demo-smelt"}, "one of --preset and --config must be given; got both demo-smelt and small.json"),
        ({"config": "", "preset": "demo"}, "preset must be one of .*; got 'demo'"),
        ({"accumulate": 4}, "accumulate must be at most the 3 rows of a step; got 4"),
        ({"horizons": (3,)}, "horizons must come with --branch-from"),
        ({"text": ("a", "b"), "rows": 3}, "rows must be a multiple of the 2 texts; got 3"),
    ],
)
def test_bad_options_are_named(changed, message):
    with pytest.raises(UserError, match=message):
        replace(OPTIONS, **changed)


def test_what_does_not_fit_the_network_is_refused_before_a_folder_is_made():
    with pytest.raises(UserError, match=r"mixture\.context must be at most the network's context of 64 tokens; got 65"):
        train(replace(OPTIONS, mixture=replace(MIXTURE, context=65)))
    with pytest.raises(UserError, match="device must be one of this machine; got 'quantum'"):
        train(replace(OPTIONS, device="quantum"))
    assert not Path("run").exists()
