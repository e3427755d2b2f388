"""A recording ends and goes on as the command line says."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cache import record as record_module
from cache.batch import Batch
from cache.manifest import MANIFEST
from cache.record import DEFAULT_SITES, weights_digest
from cache.recording import Recording
from cache.store import Capture
from cache.verify import verify
from model.network import LoopedMoE
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import run_command
from smelt_interp.sites import SITES
from tests.cache.test_recording import limit_files_after
from tests.support.forked import Child, killed_after
from tests.support.planted import LOOPED
from tests.support.planted_captures import contents, shard_paths

PATTERN, KEYS = "attn.hook_pattern", "attn.hook_k"


@pytest.fixture(scope="module")
def network() -> LoopedMoE:
    return LoopedMoE(LOOPED, seed=3)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory, network: LoopedMoE) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    network.save_pretrained(folder, readme="A tiny network.\n")
    return folder


def command(ckpt: Path, out: Path | str, *more: str) -> list[str]:
    return [*shlex.split(f"--ckpt {ckpt} --out {out} --samples 12 --length 60 --shots 2 --batch-size 2"), *more]


def run_main(arguments: list[str]) -> None:
    """The command in this process, as `python -m cache.record` runs it."""
    sys.argv = ["cache.record", *arguments]
    run_command(record_module.main)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, ckpt: Path) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "a"
    assert Child(partial(in_shards_of_a_batch, partial(run_main, command(ckpt, out)))).wait() == (0, "")
    return out


def test_the_command_records_the_data_it_names(ckpt: Path, uninterrupted: Path, network: LoopedMoE) -> None:
    capture = Capture(uninterrupted)
    options = DataOptions(samples=12, length=60, shots=(2,))
    assert capture.samples.digest() == load_samples(options, 64, BYTES).digest()
    assert capture.request["checkpoint"] == "tiny"
    assert capture.request["weights"] == weights_digest(network)
    assert isinstance(capture.request["data"], dict)
    assert capture.request["data"]["pairing"] == "episode"
    assert capture.sites == tuple(suffix for suffix in SITES if suffix in DEFAULT_SITES)


def test_the_same_command_gives_the_same_bytes(
    tmp_path: Path, ckpt: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run_main(command(ckpt, "a", "--only-visits", "2", "--heads", "1", "--sites", PATTERN, KEYS))
        files.append([path.read_bytes() for path in (*shard_paths(Path("a")), Path("a") / MANIFEST)])
        time.sleep(1.1 if name == "one" else 0)  # a time stamp in the file would differ
    assert files[0] == files[1]
    out = capfd.readouterr().out
    # 12 samples, 2 steps, one head: T x T of attention and T x 6 of keys, 2 bytes each; T is the longest row.
    capture = Capture(tmp_path / "one" / "a")
    num_tokens = capture.samples.ids_NT.shape[1]
    size = 12 * 2 * 2 * (num_tokens**2 + 6 * num_tokens) + 12 * num_tokens * 17
    assert f"12 samples, 2 sites, about {size}B before compression; batches to record: 6" in out
    assert capture.kept[PATTERN] == ((3, 4), (0,))
    assert capture.manifest.command.startswith("python -m cache.record --ckpt ")


def test_the_untrained_network_is_of_the_given_seed(tmp_path: Path, ckpt: Path) -> None:
    arguments = command(ckpt, tmp_path / "a", "--untrained", "--untrained-seed", "5", "--sites", KEYS)
    assert Child(partial(run_main, arguments)).wait() == (0, "")
    request = Capture(tmp_path / "a").request
    assert (request["weights"], request["untrained_seed"]) == (weights_digest(LoopedMoE(LOOPED, seed=5)), 5)


def test_killed_at_random_moments_and_gone_on_with(tmp_path: Path, ckpt: Path, uninterrupted: Path) -> None:
    out, delays = tmp_path / "a", []
    work = partial(run_main, command(ckpt, out))
    for _ in range(12):
        delays.append(random.uniform(0, 0.6))
        code, errors = killed_after(delays[-1], partial(in_shards_of_a_batch, work))
        assert code in (0, -signal.SIGKILL), (errors, delays)
        if code == 0:
            break
    assert Child(partial(in_shards_of_a_batch, work)).wait() == (0, ""), delays
    assert contents(out) == contents(uninterrupted), delays
    verify(out)


def in_shards_of_a_batch(work: Callable[[], None], pause: float = 0.0) -> None:
    """Do the work with shards as small as they can be, and a pause before each is recorded."""
    add = Recording.add

    def paused(self: Recording, positions: range, batches: Iterator[Batch]) -> None:
        time.sleep(pause)
        add(self, positions, batches)

    Recording.add = paused
    record_module.MOST_BATCHES = 1
    work()


def test_ctrl_c_ends_with_130_and_the_command_to_go_on(tmp_path: Path, ckpt: Path, uninterrupted: Path) -> None:
    out = tmp_path / "a"
    arguments = command(ckpt, out)
    child = Child(partial(in_shards_of_a_batch, partial(run_main, arguments), 0.05))
    while len(shard_paths(out)) < 2:
        assert child.running()
        time.sleep(0.005)
    child.send(signal.SIGINT)
    code, errors = child.wait()
    assert code == 130, errors
    going_on = shlex.join(["python", "-m", "cache.record", *arguments])
    assert errors == f"finished shards stay in {out}; to go on: {going_on}\ninterrupted\n"
    assert 2 <= len(shard_paths(out)) < 6
    assert Child(partial(in_shards_of_a_batch, partial(run_main, arguments))).wait() == (0, "")
    assert contents(out) == contents(uninterrupted)


def test_ctrl_c_before_any_shard_leaves_nothing(tmp_path: Path, ckpt: Path) -> None:
    out = tmp_path / "a"
    child = Child(partial(in_shards_of_a_batch, partial(run_main, command(ckpt, out)), 0.5))
    while not out.exists():
        assert child.running()
        time.sleep(0.005)
    child.send(signal.SIGINT)
    ended, said = child.wait()
    # With warnings on, Python itself says where Ctrl-C came between opening a temporary file and handing it out.
    assert (ended, said.splitlines()[-1]) == (130, "interrupted")
    assert not out.exists()


def test_ctrl_c_that_python_would_drop_ends_the_recording(tmp_path: Path, ckpt: Path) -> None:
    """It arrives in the callback of a weak reference, where every exception is ignored."""
    out, arguments = tmp_path / "a", command(ckpt, tmp_path / "a")
    kept: list[object] = []

    def work() -> None:
        add = Recording.add

        def interrupted(self: Recording, positions: range, batches: Iterator[Batch]) -> None:
            add(self, positions, batches)
            if len(shard_paths(out)) == 2:
                gone = LoopedMoE.__new__(LoopedMoE)
                kept.append(weakref.ref(gone, lambda _: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.01))))
                del gone
                time.sleep(0.2)

        Recording.add = interrupted
        run_main(arguments)

    code, errors = Child(partial(in_shards_of_a_batch, work)).wait()
    assert (code, errors.splitlines()[-1]) == (130, "interrupted")
    assert 2 <= len(shard_paths(out)) < 6


def test_a_full_disk_ends_with_1_and_the_command_to_go_on(tmp_path: Path, ckpt: Path, uninterrupted: Path) -> None:
    out = tmp_path / "a"
    arguments = command(ckpt, out)
    work = partial(limit_files_after, partial(run_main, arguments), 3, 1000)
    code, errors = Child(partial(in_shards_of_a_batch, work)).wait()
    going_on = shlex.join(["python", "-m", "cache.record", *arguments])
    assert (code, errors) == (
        1,
        f"finished shards stay in {out}; to go on: {going_on}\nerror: File too large: {out / '000006-000007.h5'}\n",
    )
    assert len(shard_paths(out)) == 3
    assert Child(partial(in_shards_of_a_batch, partial(run_main, arguments))).wait() == (0, "")
    assert contents(out) == contents(uninterrupted)


def test_a_disk_that_is_full_from_the_beginning_says_nothing_of_shards(tmp_path: Path, ckpt: Path) -> None:
    out = tmp_path / "a"
    work = partial(limit_files_after, partial(run_main, command(ckpt, out)), 0, 1000)
    assert Child(work).wait() == (1, f"error: File too large: {out / '000000-000011.h5'}\n")
    assert not out.exists()


def test_bad_input_ends_with_2_and_writes_nothing(tmp_path: Path, ckpt: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = [
        (command(tmp_path / "none", tmp_path / "a"), "a checkpoint must be a folder"),
        (command(ckpt, tmp_path / "file" / "a"), "the output folder must be writable; got "),
        (command(ckpt, tmp_path / "a", "--only-visits", "3"), "visits must be 1 to 2, counted from 1; got 3"),
        (command(ckpt, tmp_path / "a", "--layers", "0"), "layers"),
        (command(ckpt, tmp_path / "a", "--heads", "5"), "heads must be 1 to 4, counted from 1; got 5"),
        (command(ckpt, tmp_path / "a", "--rows", "12"), "rows must be 0 to 11; got 12"),
        (command(ckpt, tmp_path / "a", "--sites", "hook_q"), "a site must be one of the hook suffixes of a step"),
        (command(ckpt, tmp_path / "a", "--batch-size", "0"), "batch_size must be "),
        (command(ckpt, tmp_path / "a", "--samples", "0"), "samples must be "),
        (command(ckpt, tmp_path / "a", "--shots", "4"), "Dyck shots must be at most 3, the largest number that"),
        (command(ckpt, tmp_path / "a", "--samples", "1e30"), "--samples must be a whole number; got '1e30'"),
        (command(ckpt, tmp_path / "a", "--batch-size", str(10**30)), "batch_size must be "),
        (command(ckpt, tmp_path / "a", "--rows", str(10**12)), "rows"),
        (command(ckpt, tmp_path / "a", "--compression", "zip"), "invalid choice 'zip' for argument '--compression'"),
        (command(ckpt, tmp_path / "a", "--threads", "0"), "threads must be "),
        (command(ckpt, tmp_path / "a", "--untrained", "--untrained-seed", "-1"), "untrained_seed must be "),
        (command(ckpt, tmp_path / "a", "--untrained", "--untrained-seed", str(2**70)), "untrained_seed must be "),
        (command(ckpt, tmp_path / ("a" * 300)), "File name too long: "),
        (command(ckpt, tmp_path / ("a" * 300) / "a"), "File name too long: "),
        (command(ckpt, "a\0b"), "a path must be"),
        (
            command(ckpt, tmp_path / "a", "--layers", "1", "--only-visits", "2"),
            "the chosen layers must run on the chosen visits; got layers 1 and visits 2, counted from 1: a",
        ),
        (
            [*command(ckpt, tmp_path / "a"), "--data", "verse"],
            "data must be one of dyck, code, prose, math, backcopy",
        ),
    ]
    for arguments, start in cases:
        code, errors = Child(partial(run_main, arguments)).wait()
        assert (code, errors.count("\n")) == (2, 1), (arguments, errors)
        assert errors.startswith(f"error: {start}"), errors
    assert Child(partial(run_main, [*command(ckpt, tmp_path / "a"), "--dtype", "float8"])).wait()[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_recording_under_the_same_name_is_refused(tmp_path: Path, ckpt: Path, uninterrupted: Path) -> None:
    out = Path(shutil.copytree(uninterrupted, tmp_path / "a"))
    code, errors = Child(partial(run_main, command(ckpt, out, "--seed", "1"))).wait()
    assert code == 2
    assert "a capture must not replace another" in errors
    assert Child(partial(in_shards_of_a_batch, partial(run_main, command(ckpt, out)))).wait() == (0, "")
    assert contents(out) == contents(uninterrupted)


def test_help_does_not_import_torch() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cache.record", "--help"], capture_output=True, text=True, check=True
    )
    assert "--untrained-seed" in shown.stdout
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "h5py" in imported
    assert not imported & {"torch", "transformer_lens", "nnsight", "transformers"}
