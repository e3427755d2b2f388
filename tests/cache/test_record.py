"""What is recorded is what the network computed; a recording ends and goes on as the command line says."""

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
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cache import record as record_module
from cache.batch import Batch
from cache.layout import Contents
from cache.manifest import MANIFEST
from cache.record import DEFAULT_SITES, record, run_batches, weights_digest
from cache.recording import Recording
from cache.store import Capture
from cache.verify import verify
from model.network import LoopedMoE
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError, run_command
from smelt_interp.sites import SITES, hook_name
from tests.cache.test_recording import limit_files_after
from tests.support.forked import Child, killed_after
from tests.support.planted import LOOPED, text_samples
from tests.support.planted_captures import contents, shard_paths

PATTERN, KEYS, RESULT = "attn.hook_pattern", "attn.hook_k", "mlp.hook_expert_result"


@pytest.fixture(scope="module")
def network() -> LoopedMoE:
    return LoopedMoE(LOOPED, seed=3)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory, network: LoopedMoE) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    network.save_pretrained(folder, readme="A tiny network.\n")
    return folder


def values(batches: list[Batch], suffix: str, step: int) -> np.ndarray:
    return np.concatenate([batch.sites[step, suffix] for batch in batches])


# Running


def test_batches_hold_what_the_hooks_saw(network: LoopedMoE) -> None:
    samples = text_samples(4, padding=3)
    (batch,) = run_batches(network, samples, tuple(SITES), batch_size=4)
    tokens_BT = torch.from_numpy(samples.ids_NT.astype(np.int64))
    logits_BTW, cache = network.run_with_cache(tokens_BT, head_results=True, expert_results=True)
    assert {key[1] for key in batch.sites} == set(SITES)
    for (step, suffix), recorded in batch.sites.items():
        assert np.array_equal(recorded, cache[hook_name(step, suffix)].numpy()), suffix
    assert np.array_equal(batch.argmax_BT, logits_BTW.argmax(-1))
    assert batch.architecture == LOOPED.architecture()


def test_log_probabilities_are_of_the_next_token_and_0_where_there_is_none(network: LoopedMoE) -> None:
    samples = text_samples(3, padding=2)
    (batch,) = run_batches(network, samples, (), batch_size=3)
    with torch.no_grad():
        probability_BTW = network(torch.from_numpy(samples.ids_NT.astype(np.int64))).double().softmax(-1).numpy()
    for row in range(3):
        for position in range(12):
            if position + 1 < samples.length_N[row]:
                expected = np.log(probability_BTW[row, position, samples.ids_NT[row, position + 1]])
                assert abs(batch.logprob_BT[row, position] - expected) < 1e-5
            else:
                assert batch.logprob_BT[row, position] == 0


def test_packed_documents_do_not_see_each_other(network: LoopedMoE) -> None:
    samples = text_samples(2)
    starts_NT = np.where(np.arange(12) < 5, 0, 5).astype(np.int32) + np.zeros((2, 1), np.int32)
    (batch,) = run_batches(network, replace(samples, segment_start_NT=starts_NT), [PATTERN], batch_size=2)
    assert (batch.sites[4, PATTERN][:, :, 5:, :5] == 0).all()
    assert (batch.sites[4, PATTERN][:, :, 4, 0] > 0).all()


def test_a_batch_depends_on_its_own_rows_alone(network: LoopedMoE) -> None:
    """Equal to the bit whatever ran before it; where the last batch is filled up, within rounding."""
    samples = text_samples(11, 20)
    whole = list(run_batches(network, samples, DEFAULT_SITES, batch_size=4))
    (second,) = run_batches(network, samples, DEFAULT_SITES, batch_size=4, rows=[4, 5, 6, 7])
    (short,) = run_batches(network, samples, DEFAULT_SITES, batch_size=4, rows=[4, 5])
    assert [len(batch.samples) for batch in (*whole, second, short)] == [4, 4, 3, 4, 2]
    for key, array in whole[1].sites.items():
        assert np.array_equal(second.sites[key], array)
        assert (short.sites[key] - array[:2]).abs().max() < 1e-6
    assert np.array_equal(second.logprob_BT, whole[1].logprob_BT)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_sizes_agree(network: LoopedMoE, batch_size: int) -> None:
    samples = text_samples(8, 20)
    ours = list(run_batches(network, samples, [PATTERN, "hook_resid_post"], batch_size=batch_size))
    eight = list(run_batches(network, samples, [PATTERN, "hook_resid_post"], batch_size=8))
    for suffix in (PATTERN, "hook_resid_post"):
        for step in range(6):
            assert np.abs(values(ours, suffix, step) - values(eight, suffix, step)).max() < 1e-6
    assert np.concatenate([batch.sample_ids for batch in ours]).tolist() == list(range(8))


def test_filters_keep_the_same_numbers(network: LoopedMoE) -> None:
    samples = text_samples(6)
    whole = list(run_batches(network, samples, [PATTERN, KEYS, "hook_resid_post"], batch_size=6))
    filters = {"layers": [1, 2], "visits": [1], "heads": [1], "rows": [4, 0]}
    (some,) = run_batches(network, samples, [PATTERN, KEYS, "hook_resid_post"], batch_size=6, **filters)
    assert some.sample_ids.tolist() == [0, 4]
    assert {step for step, _ in some.sites} == {3, 4}
    assert some.heads == {PATTERN: (1,), KEYS: (0,)}
    rows = [0, 4]
    for step in (3, 4):
        expected = {
            PATTERN: values(whole, PATTERN, step)[rows][:, [1]],
            KEYS: values(whole, KEYS, step)[rows][:, :, [0]],
            "hook_resid_post": values(whole, "hook_resid_post", step)[rows],
        }
        for suffix, array in expected.items():
            assert some.sites[step, suffix].shape == array.shape
            assert np.abs(some.sites[step, suffix].numpy() - array).max() < 1e-6


def test_batches_are_let_go(network: LoopedMoE) -> None:
    batches = run_batches(network, text_samples(6), [PATTERN], batch_size=2)
    first = weakref.ref(next(batches).sites[0, PATTERN])
    next(batches)
    assert first() is None


def test_what_cannot_be_run(network: LoopedMoE) -> None:
    samples = text_samples(3)
    for options, match in (
        ({"rows": [3]}, r"rows must be 0 to 2; got 3"),
        ({"batch_size": 0}, r"batch_size must be at least 1; got 0"),
        ({"heads": [4]}, r"heads must be 0 to 3, counted from 0; got 4"),
    ):
        with pytest.raises(UserError, match=match):
            run_batches(network, samples, [PATTERN], **options)
    with pytest.raises(UserError, match="a site must be one of the hook suffixes"):
        run_batches(network, samples, ["attn.pattern"])
    with pytest.raises(UserError, match="a row must be at most the context of 64 tokens; got 65"):
        next(run_batches(network, text_samples(2, 65), [PATTERN]))


def test_batches_that_outlive_the_hooks_they_were_made_under(network: LoopedMoE) -> None:
    samples, cut = text_samples(4), (hook_name(3, "hook_attn_out"), lambda x, hook: 0 * x)
    with network.hooks(fwd_hooks=[cut]):
        batches = run_batches(network, samples, ["hook_attn_out"], batch_size=2)
        assert not next(batches).sites[3, "hook_attn_out"].any()
    with pytest.raises(UserError, match="batches must be read under the hooks that they were made under"):
        next(batches)
    plain = run_batches(network, samples, ["hook_attn_out"], batch_size=2)
    with network.hooks(fwd_hooks=[cut]), pytest.raises(UserError, match="inside the block that sets the hooks"):
        next(plain)


def test_hooks_that_come_and_go_between_batches_do_no_harm(network: LoopedMoE) -> None:
    batches = run_batches(network, text_samples(4), ["hook_attn_out"], batch_size=2)
    first = next(batches)
    network.run_with_hooks(
        torch.zeros(1, 4, dtype=torch.int64), fwd_hooks=[(hook_name(3, "hook_attn_out"), lambda x, hook: 0 * x)]
    )
    assert first.sites[3, "hook_attn_out"].any()
    assert next(batches).sites[3, "hook_attn_out"].any()


def test_numbers_that_are_not_finite_are_told_where_they_arise(network: LoopedMoE) -> None:
    suffixes = ["attn.hook_attn_scores", "hook_mlp_out", "hook_resid_post"]
    match = r"a network's numbers must be finite; got nan in hook_mlp_out at layer 4, visit 1: look for"
    edit = (hook_name(5, "hook_mlp_out"), lambda x, hook: x * float("nan"))
    with network.hooks(fwd_hooks=[edit]), pytest.raises(UserError, match=match):
        next(run_batches(network, text_samples(2), suffixes))
    broken = LoopedMoE(LOOPED, seed=3)
    with torch.no_grad():
        broken.ln_final.weight[0] = float("nan")
    with pytest.raises(UserError, match="got nan in the logits"):
        next(run_batches(broken, text_samples(2), suffixes))


# Recording


def test_a_capture_holds_what_runs(tmp_path: Path, network: LoopedMoE) -> None:
    samples = text_samples(7, padding=2)
    capture = record(network, samples, tmp_path / "a", batch_size=3, dtype="float32", visits=[1], suffixes=tuple(SITES))
    running = list(run_batches(network, samples, tuple(SITES), batch_size=3, visits=[1]))
    read = list(capture.batches(tuple(SITES), 3))
    for ours, theirs in zip(read, running, strict=True):
        assert ours.sites.keys() == theirs.sites.keys()
        assert all(np.array_equal(ours.sites[key], theirs.sites[key]) for key in ours.sites)
        assert ours.samples.digest() == theirs.samples.digest()
        assert ours.heads == theirs.heads
        for name in ("logprob_BT", "argmax_BT", "sample_ids"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    assert verify(capture.path).samples == 7


def test_the_request_says_what_fixes_the_numbers(tmp_path: Path, network: LoopedMoE) -> None:
    capture = record(network, text_samples(3), tmp_path / "a", batch_size=2, rows=[0, 2], source={"seed": 7})
    request = capture.request
    assert request["weights"] == weights_digest(network) != weights_digest(LoopedMoE(LOOPED, seed=4))
    assert (request["batch_shape"], request["threads"], request["seed"]) == ([2, 12], 1, 7)
    assert request["experts"] == {"backend": "torch", "fp_fusion": True}
    assert (request["dtype"], request["device"]) == ("float16", "cpu")
    assert [batch.sample_ids.tolist() for batch in capture.batches(())] == [[0, 2]]
    assert capture.sites == tuple(suffix for suffix in SITES if suffix in DEFAULT_SITES)


def test_a_capture_of_an_edited_network_says_so(tmp_path: Path, network: LoopedMoE) -> None:
    samples, name = text_samples(4), hook_name(3, "hook_mlp_out")
    with network.hooks(fwd_hooks=[(name, lambda x, hook: 0 * x)]):
        capture = record(network, samples, tmp_path / "a", suffixes=["hook_mlp_out"])
    assert not capture.read("hook_mlp_out", 3).any()
    assert capture.request["hooked"] == [name]
    with pytest.raises(UserError, match="a capture must not replace another"):
        record(network, samples, tmp_path / "a", suffixes=["hook_mlp_out"])


def test_who_watches_is_told_what_is_done(tmp_path: Path, network: LoopedMoE) -> None:
    told: list[object] = []

    def watch(contents: Contents, remaining: int) -> Callable[[int], None]:
        told.append((len(contents.samples), remaining))
        return told.append

    record(network, text_samples(5), tmp_path / "a", suffixes=[PATTERN], batch_size=2, watch=watch)
    record(network, text_samples(5), tmp_path / "a", suffixes=[PATTERN], batch_size=2, watch=watch)
    assert told == [(5, 3), 1, 2, 3, (5, 0)]


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    network = LoopedMoE(LOOPED, seed=3).bfloat16()
    capture = record(network, text_samples(2), tmp_path / "a", suffixes=[PATTERN, KEYS], batch_size=2)
    assert {suffix: site.stored for suffix, site in capture.manifest.sites.items()} == {
        PATTERN: "float16",
        KEYS: "bfloat16",
    }
    (batch,) = run_batches(network, text_samples(2), [PATTERN, KEYS], batch_size=2)
    assert np.array_equal(capture.read(KEYS, 3), batch.sites[3, KEYS])
    (read,) = capture.batches([KEYS])
    assert read.bfloat16 == {KEYS}


def test_shards_are_as_large_as_they_may_be(tmp_path: Path, network: LoopedMoE) -> None:
    def shard_sizes(name: str, num: int, suffixes: list[str], **options: int) -> list[int]:
        capture = record(network, text_samples(num), tmp_path / name, suffixes=suffixes, batch_size=2, **options)
        return [shard.samples for shard in capture.manifest.shards]

    a_batch = 2 * (12 * 17 + 6 * 4 * 12 * 12 * 2)
    assert shard_sizes("small", 7, [PATTERN]) == [7]
    assert shard_sizes("batches", 7, [PATTERN], shard_bytes=2 * a_batch) == [4, 3]
    assert shard_sizes("one batch is more", 7, [PATTERN], shard_bytes=1) == [2, 2, 2, 1]
    assert shard_sizes("outputs alone", 130, []) == [128, 2]


def test_numbers_that_are_not_finite_are_not_recorded(tmp_path: Path, network: LoopedMoE) -> None:
    """A key that no query sees leaves the logits as they are; recorded, it could never be verified."""
    edit = (hook_name(4, "attn.hook_v"), lambda x, hook: torch.where(torch.arange(12)[:, None, None] == 11, x, x))
    nan = (hook_name(5, "hook_mlp_out"), lambda x, hook: x * float("nan"))
    with network.hooks(fwd_hooks=[edit, nan]), pytest.raises(UserError, match="got nan in hook_mlp_out at layer 4"):
        record(network, text_samples(2), tmp_path / "a", suffixes=["hook_mlp_out"])
    assert not (tmp_path / "a").exists()


def test_a_value_beyond_float16_stops_with_the_site_and_the_way_out(tmp_path: Path) -> None:
    network = LoopedMoE(LOOPED, seed=3)
    with torch.no_grad():
        network.embed.weight[97:123] = 1e5
    options = {"suffixes": ["hook_resid_pre"], "batch_size": 2}
    with pytest.raises(UserError, match=r"values of hook_resid_pre must fit float16.*record with --dtype float32"):
        record(network, text_samples(2), tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
    capture = record(network, text_samples(2), tmp_path / "b", dtype="float32", **options)
    assert capture.read("hook_resid_pre", 0).max() == np.float32(1e5)


# The command line


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
        run_main(command(ckpt, "a", "--visits", "2", "--heads", "1", "--sites", PATTERN, KEYS))
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
    assert child.wait() == (130, "interrupted\n")
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
        (command(ckpt, tmp_path / "a", "--visits", "3"), "visits must be 1 to 2, counted from 1; got 3"),
        (command(ckpt, tmp_path / "a", "--layers", "0"), "layers"),
        (command(ckpt, tmp_path / "a", "--heads", "5"), "heads must be 1 to 4, counted from 1; got 5"),
        (command(ckpt, tmp_path / "a", "--rows", "12"), "rows must be 0 to 11; got 12"),
        (command(ckpt, tmp_path / "a", "--sites", "hook_q"), "a site must be one of the hook suffixes of a step"),
        (command(ckpt, tmp_path / "a", "--batch-size", "0"), "batch_size must be "),
        (command(ckpt, tmp_path / "a", "--samples", "0"), "samples must be "),
        (command(ckpt, tmp_path / "a", "--shots", "4"), "Dyck shots must be at most 3, the largest number that"),
        (command(ckpt, tmp_path / "a", "--samples", "1e30"), "--samples must be a number; got '1e30'"),
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
            command(ckpt, tmp_path / "a", "--layers", "1", "--visits", "2"),
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
