"""Training: an interrupted run that goes on is the run that was never stopped."""

import json
import os
import re
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.network import LoopedMoE
from model.training import train as training
from model.training.train import METRICS, TrainOptions, train
from smelt_interp.data import mixture as mixture_module
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.data.text import corpus
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from tests.support.configs import TINY
from tests.support.forked import Child

MIXTURE = MixtureOptions(
    context=64, dyck_episode=2, dyck_standard=1, code=1, prose=1, math=1, backcopy=1, max_total=4, source="excerpts"
)
OPTIONS = TrainOptions(
    preset="demo-smelt", out=Path("run"), steps=6, warmup=2, save_every=2, evaluate_every=3, mixture=MIXTURE
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(OPTIONS, TINY) == Path("run/checkpoint")
    return folder / "run"


def metrics(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def readme(run: Path) -> list[str]:
    lines = (run / "checkpoint" / "README.md").read_text().splitlines()
    return [line for line in lines if not line.startswith("- wall time")]


def interrupt(where: object, name: str, when: Callable[..., bool]) -> None:
    """A run in which Ctrl-C is pressed at the call of `where.name` whose arguments say so."""
    original = getattr(where, name)

    def call(*args: object, **kwargs: object) -> object:
        if when(*args):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, call)
        with pytest.raises(KeyboardInterrupt):
            train(OPTIONS, TINY)


STOPS = {
    "in the first step": (TrainingMixture, "batch", lambda mixture, step: step == 0),
    "between two states": (TrainingMixture, "batch", lambda mixture, step: step == 5),
    "after the metrics, before the state": (training, "_save_state", lambda *args: args[-1].step == 6),
    "before the checkpoint": (training, "_readme", lambda *_: True),
}


@pytest.mark.parametrize("where", STOPS)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(where, whole):
    interrupt(*STOPS[where])
    assert not Path("run/checkpoint").exists()
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tok')  # a line that was being written
    train(OPTIONS, TINY)
    for file in ("state.safetensors", "checkpoint/model.safetensors"):
        resumed, expected = load_file(Path("run") / file), load_file(whole / file)
        assert resumed.keys() == expected.keys()
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    places = []
    for run in (Path("run"), whole):
        with safe_open(run / "state.safetensors", framework="pt") as state:
            places.append({key: value for key, value in state.metadata().items() if key != "seconds"})
    assert places[0] == places[1]
    assert metrics(Path("run")) == metrics(whole)
    assert readme(Path("run")) == readme(whole)


def test_a_run_says_what_it_was(whole):
    run = json.loads((whole / "run.json").read_text())
    assert run["config"] == TINY.to_json()
    assert run["options"]["steps"] == 6
    assert run["options"]["mixture"]["source"] == "excerpts"
    assert {corpus["domain"] for corpus in run["corpora"]} == {"code", "prose", "math"}
    assert run["versions"]["torch"] == torch.__version__
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoint", "metrics.jsonl", "run.json", "state.safetensors",
    ]  # fmt: skip


def test_the_readme_names_the_order_of_the_tokens_and_the_metrics_count_them(whole):
    digest = TrainingMixture(MIXTURE).order_digest(6)
    assert f"- token order: `{digest}`" in readme(whole)
    assert [row["step"] for row in metrics(whole)] == [3, 6]
    assert [row["tokens"] for row in metrics(whole)] == [3 * 7 * 64, 6 * 7 * 64]
    assert f"- tokens: {6 * 7 * 64:,} in 6 steps of {7 * 64}" in readme(whole)


def test_training_lowers_the_loss_of_what_it_reads(whole):
    mixture = TrainingMixture(MIXTURE)
    tokens_BT = torch.from_numpy(mixture.batch(5).ids_NT).long()
    trained = LoopedMoE.from_pretrained(whole / "checkpoint")
    with torch.no_grad():
        assert trained.loss(tokens_BT).next_token < LoopedMoE(TINY).loss(tokens_BT).next_token - 0.1


def test_a_folder_of_another_run_is_refused():
    interrupt(*STOPS["between two states"])
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    for other in ({"steps": 7}, {"seed": 1}, {"mixture": replace(MIXTURE, code=2)}):
        with pytest.raises(UserError, match=r"run\.json must be of a run with the same options; it differs"):
            train(replace(OPTIONS, **other), TINY)
    with pytest.raises(UserError, match=r"run\.json must be of a run with the same config; it differs"):
        train(OPTIONS, replace(TINY, num_visits=3))
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before


def test_a_run_goes_on_in_another_place(whole):
    interrupt(*STOPS["between two states"])
    Path("run").rename("moved")
    assert train(replace(OPTIONS, out=Path("moved")), TINY) == Path("moved/checkpoint")
    assert readme(Path("moved")) == readme(whole)


def test_what_is_damaged_is_named():
    interrupt(*STOPS["between two states"])
    Path("run/state.safetensors").write_bytes(b"1234567890")
    with pytest.raises(UserError, match=r"state.safetensors must be a whole state of this run; "):
        train(OPTIONS, TINY)
    Path("run/run.json").write_text("{")
    with pytest.raises(UserError, match=r"run.json must hold JSON; .*; remove the run to start anew, or choose"):
        train(OPTIONS, TINY)


WAY_OUT = "remove the run to start anew, or choose another --out"


@pytest.mark.parametrize(
    ("file", "data", "rule"),
    [
        ("run.json", b"", "must hold JSON; "),
        ("run.json", b'{"options": {"pre', "must hold JSON; "),
        ("run.json", b"\xff", "must hold JSON; "),
        ("run.json", b"[" * 100_000, "must hold JSON; "),
        ("run.json", b"[]", "must hold one JSON object; got list; "),
        ("run.json", b"3", "must hold one JSON object; got int; "),
        ("run.json", b"null", "must hold one JSON object; got NoneType; "),
        ("metrics.jsonl", b"x\n", "must hold JSON on line 2; "),
        ("metrics.jsonl", b"{}\n", "must hold an object with a step on line 2; "),
        ("metrics.jsonl", b"3\n", "must hold an object with a step on line 2; "),
        ("metrics.jsonl", b'{"step": "a"}\n', "must hold an object with a step on line 2; "),
        ("metrics.jsonl", b'{"step": "\xff"}\n', "must hold JSON on line 2; "),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line_with_the_way_out(file, data, rule):
    interrupt(*STOPS["between two states"])
    path = Path("run", file)
    path.write_bytes((path.read_bytes() if file == "metrics.jsonl" else b"") + data)
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    with pytest.raises(UserError) as refused:
        train(OPTIONS, TINY)
    message = str(refused.value)
    assert message.startswith(f"{path} {rule}")
    assert message.endswith(f"; {WAY_OUT}")
    assert "\n" not in message
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        (None, "", "must say the step at which it was written; got ''; "),
        ("digest", None, "must say the digest at which it was written; got ''; "),
        ("digest", "0" * 63, "must say the digest at which it was written; got '000"),
        ("step", "x", "must say the step at which it was written; got 'x'; "),
        ("step", "-5", "must say the step at which it was written; got '-5'; "),
        ("step", "7", "must be of one of the 6 steps of the run, after a finite time; got step 7 after "),
        ("seconds", "nan", "must say the seconds at which it was written; got 'nan'; "),
        ("seconds", "1e999", "must be of one of the 6 steps of the run, after a finite time; got step"),
    ],
)
def test_a_state_without_its_place_is_one_line(name, value, rule):
    interrupt(*STOPS["between two states"])
    path = Path("run/state.safetensors")
    with safe_open(path, framework="pt") as state:
        where = state.metadata() if name else None
    if name:
        where = {key: text for key, text in (where | {name: value}).items() if text is not None}
    save_file(load_file(path), path, where)
    with pytest.raises(UserError, match=re.escape(f"{path} {rule}") + f".*{WAY_OUT}$"):
        train(OPTIONS, TINY)


@pytest.mark.parametrize("kind", ["weight", "step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_of_another_shape_or_type_is_one_line(kind, dtype):
    """A single number would fit everywhere by broadcasting."""
    interrupt(*STOPS["between two states"])
    path, name = Path("run/state.safetensors"), f"{kind}/layers.1.ln1.weight"
    with safe_open(path, framework="pt") as state:
        where = state.metadata()
    save_file(load_file(path) | {name: torch.ones(1, dtype=dtype)}, path, where)
    with pytest.raises(UserError, match=rf"{path}: {name} must be torch.float32 .*; got {dtype} \(1,\); {WAY_OUT}$"):
        train(OPTIONS, TINY)


def test_a_state_without_its_run_is_refused():
    interrupt(*STOPS["between two states"])
    Path("run/run.json").unlink()
    with pytest.raises(
        UserError, match=rf"run.json must say what the run is that wrote state.safetensors; .*{WAY_OUT}"
    ):
        train(OPTIONS, TINY)


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "state.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(file):
    interrupt(*STOPS["between two states"])
    Path("run", file).unlink(missing_ok=True)
    os.mkfifo(Path("run", file))
    with pytest.raises(UserError, match=rf"{file} must be a file of the run; got something else; {WAY_OUT}"):
        train(OPTIONS, TINY)


@pytest.mark.parametrize("room", [10, 4_000, 30_000])
def test_a_full_disk_is_one_line_and_leaves_no_partial_file(room):
    """Full at the run's own description, or at its next state, of which the one before stays."""
    if room > 10:
        interrupt(*STOPS["between two states"])

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.name != METRICS}

    def train_on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        run_command(lambda: print(train(OPTIONS, TINY)))

    before = files()
    full = "run/run.json" if room == 10 else "run/state.safetensors"
    assert Child(train_on_a_full_disk).wait() == (1, f"error: File too large: {full}\n")
    assert files() == before


def test_a_folder_that_cannot_be_made_is_named():
    Path("run").write_text("")
    with pytest.raises(UserError, match="the output folder must be writable; got run: File exists"):
        train(OPTIONS, TINY)


def test_the_readme_s_command_is_the_run_s(whole):
    (line,) = [line for line in readme(whole) if line.startswith("- command: ")]
    command = re.findall(r"`(.*?)`", line)[-1]
    assert json.loads((whole / "run.json").read_text())["command"] == command
    program, *arguments = command.removeprefix("python -m ").split()
    parsed = parse(TrainOptions, prog=program, description="", args=arguments)
    assert (program, parsed) == ("model.training.train", replace(OPTIONS, out=Path("runs/demo-smelt")))


def test_a_finished_run_is_left_alone(whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    with pytest.raises(UserError, match="a run must not be finished already; run/checkpoint exists"):
        train(OPTIONS, TINY)


def test_a_run_that_leaves_the_finite_numbers_stops():
    with pytest.raises(UserError, match=r"training must stay finite; the gradient of step 0 is (nan|inf); lower"):
        train(replace(OPTIONS, balance=1e39), TINY)
    with pytest.raises(UserError, match="hook_router_logits must be finite; got nan"):
        train(replace(OPTIONS, out=Path("other"), learning_rate=1e18, warmup=0), TINY)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1; got 0"),
        ("save_every", 0, "save_every must be at least 1; got 0"),
        ("learning_rate", 0.0, "learning_rate must be above 0 and finite; got 0.0"),
        ("learning_rate", float("inf"), "learning_rate must be above 0 and finite; got inf"),
        ("learning_rate", float("nan"), "learning_rate must be above 0 and finite; got nan"),
        ("clip", 0.0, "clip must be above 0 and finite; got 0.0"),
        ("clip", -1.0, "clip must be above 0 and finite; got -1.0"),
        ("clip", float("nan"), "clip must be above 0 and finite; got nan"),
        ("warmup", -1, "warmup must be 0 or above and finite; got -1"),
        ("weight_decay", -0.1, "weight_decay must be 0 or above and finite; got -0.1"),
        ("balance", float("nan"), "balance must be 0 or above and finite; got nan"),
        ("seed", -1, r"seed must be from 0 to 2\^63 - 1; got -1"),
        ("seed", 2**70, r"seed must be from 0 to 2\^63 - 1; got 1180591620717411303424"),
        ("decay", 1.5, "decay must be a share from 0 to 1; got 1.5"),
    ],
)
def test_bad_options_are_named(field, value, message):
    with pytest.raises(UserError, match=message):
        replace(OPTIONS, **{field: value})


def test_the_learning_rate_warms_up_stays_and_decays_to_zero():
    options = replace(OPTIONS, steps=1000, warmup=10, decay=0.2, learning_rate=1.0)
    assert [options.rate(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert {options.rate(step) for step in range(9, 801)} == {1.0}
    assert [options.rate(step) for step in (900, 950, 999)] == [0.5, 0.25, 0.005]


def test_gains_do_not_decay():
    matrices, gains = training._optimizer(LoopedMoE(TINY), OPTIONS).param_groups
    assert (matrices["weight_decay"], gains["weight_decay"]) == (0.1, 0.0)
    assert all(weight.ndim >= 2 for weight in matrices["params"])
    assert len(gains["params"]) == 2 * 4 + 1


@pytest.mark.parametrize(
    ("there", "got"),
    [
        ([], r"fetched texts must be in .*; got no such folder"),
        (["math"], "texts of prose must hold a document; got none, .* not whole"),
        (["prose/readme.md"], "texts of prose must hold a document; got none, .* not whole"),
        (["prose/08-ruth.txt"], "texts of math must hold a document; got none, .* not whole"),
    ],
)
def test_texts_that_were_not_fetched_are_asked_for_before_a_folder_is_made(there, got, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mixture_module, "corpus", corpus.__wrapped__)  # the texts of this machine may be remembered
    for name in there:
        path = tmp_path / "cache" / "smelt-interp" / "texts" / name
        (path.parent if path.suffix else path).mkdir(parents=True)
        if path.suffix:
            path.write_text("In the days when the judges ruled " * 20)
    with pytest.raises(UserError, match=rf"{got}: run `python -m smelt_interp\.data\.fetch"):
        train(replace(OPTIONS, mixture=replace(MIXTURE, source="fetched")), TINY)
    assert not Path("run").exists()
