"""What is recorded is what the network computed."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.batch import Batch
from cache.layout import Contents
from cache.record import DEFAULT_SITES, record, run_batches, weights_digest
from cache.verify import verify
from model.network import LoopedMoE
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, hook_name
from tests.support.planted import LOOPED, text_samples

PATTERN, KEYS, RESULT = "attn.hook_pattern", "attn.hook_k", "mlp.hook_expert_result"


@pytest.fixture(scope="module")
def network() -> LoopedMoE:
    return LoopedMoE(LOOPED, seed=3)


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


def test_a_hook_that_writes_over_its_site_leaves_what_was_kept_before_it(network: LoopedMoE) -> None:
    """The stream after a step is that before the next one, the very tensor."""

    def erase(x: torch.Tensor, hook: object) -> None:
        x.zero_()

    samples, site = text_samples(2), "hook_resid_post"
    (plain,) = run_batches(network, samples, [site], batch_size=2)
    with network.hooks(fwd_hooks=[(hook_name(1, "hook_resid_pre"), erase)]):
        (edited,) = run_batches(network, samples, [site], batch_size=2)
    assert np.array_equal(edited.sites[0, site], plain.sites[0, site])
    assert not np.array_equal(edited.sites[1, site], plain.sites[1, site])


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
