"""What is stored is what was recorded: storage types, their errors, and the size that is said beforehand."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from cache.layout import Contents, decode, encode, site_shape
from cache.selection import Kept, select
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES
from tests.support.planted import text_samples
from tests.support.planted_captures import ARCHITECTURE, planted_capture, random_batch


def test_float16_keeps_eleven_bits() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    stored = encode(values, "attn.hook_q", precision="float16", bfloat16=False)
    assert stored.dtype == np.float16
    assert np.abs(decode(stored) / values - 1).max() < 2**-11


def test_float32_keeps_every_bit() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert np.array_equal(decode(encode(values, "attn.hook_q", precision="float32", bfloat16=False)), values)


def test_bfloat16_keeps_its_bits_in_two_bytes() -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F80, 1000).astype(np.uint32) << 16
    values = bits.view(np.float32)
    for precision in ("float16", "float32"):
        stored = encode(values, "attn.hook_q", precision=precision, bfloat16=True)
        assert stored.dtype == np.uint16
        assert np.array_equal(decode(stored), values)


def test_attention_is_never_stored_as_bfloat16() -> None:
    stored = encode(np.full(4, 0.25, np.float32), "attn.hook_pattern", precision="float16", bfloat16=True)
    assert stored.dtype == np.float16


def test_a_value_beyond_float16_names_the_site_and_the_way_out() -> None:
    values = np.array([1.0, -70_000.0], np.float32)
    with pytest.raises(UserError, match=r"hook_resid_post must fit float16.*got -70000: record with --dtype float32"):
        encode(values, "hook_resid_post", precision="float16", bfloat16=False)
    assert np.array_equal(encode(values, "hook_resid_post", precision="float32", bfloat16=False), values)


def test_the_infinite_scores_of_masked_keys_are_stored() -> None:
    values = np.array([-np.inf, 0.5], np.float32)
    stored = decode(encode(values, "attn.hook_attn_scores", precision="float16", bfloat16=False))
    assert np.array_equal(stored, values)


def test_expert_indices_above_255_are_exact() -> None:
    values = np.array([0, 287, 70_000])
    assert decode(encode(values, "mlp.hook_expert_indices", precision="float16", bfloat16=False)).tolist() == [
        0,
        287,
        70_000,
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_size_said_beforehand_is_the_size_of_the_datasets(tmp_path: Path, dtype: str) -> None:
    suffixes = tuple(SITES)
    batch = random_batch(3, suffixes=suffixes)
    contents = Contents(
        architecture=ARCHITECTURE,
        samples=batch.samples,
        sample_ids=batch.sample_ids,
        sites=select(ARCHITECTURE, suffixes),
        precision=dtype,
        source={},
    )
    planted_capture(tmp_path / "a.h5", batch, dtype=dtype)
    with h5py.File(tmp_path / "a.h5") as file:
        assert contents.num_bytes() == sum(
            file[name].nbytes
            for name in (*suffixes, "logprob", "argmax", "tokens/ids", "tokens/role", "tokens/segment_start")
        )


def test_every_site_has_the_shape_of_its_axes() -> None:
    assert site_shape("attn.hook_pattern", ARCHITECTURE, 12, 3) == (3, 12, 12)
    assert site_shape("attn.hook_k", ARCHITECTURE, 12, 1) == (12, 1, 6)
    assert site_shape("mlp.hook_expert_result", ARCHITECTURE, 12, 0) == (12, 2, 8)
    assert site_shape("ln1.hook_scale", ARCHITECTURE, 12, 0) == (12, 1)


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        (Kept((0, 6), (0,)), r"steps of attn.hook_k must be ascending numbers below 6; got \[0, 6\]"),
        (Kept((1, 0), (0,)), r"steps of attn.hook_k must be ascending numbers below 6; got \[1, 0\]"),
        (Kept((), (0,)), r"steps of attn.hook_k must be ascending numbers below 6; got \[\]"),
        (Kept((0,), (2,)), r"heads of attn.hook_k must be ascending numbers below 2; got \[2\]"),
        (Kept((0,), ()), r"heads of attn.hook_k must be ascending numbers below 2; got \[\]"),
    ],
)
def test_steps_and_heads_that_the_network_does_not_have(kept: Kept, match: str) -> None:
    samples = text_samples(2)
    with pytest.raises(UserError, match=match):
        Contents(
            architecture=ARCHITECTURE,
            samples=samples,
            sample_ids=np.arange(2),
            sites={"attn.hook_k": kept},
            precision="float16",
            source={},
        )


@pytest.mark.parametrize("ids", [[0], [1, 0], [3, 3]])
def test_sample_ids_must_ascend(ids: list[int]) -> None:
    with pytest.raises(UserError, match="sample ids must ascend, one a sample"):
        Contents(
            architecture=ARCHITECTURE,
            samples=text_samples(2),
            sample_ids=np.array(ids),
            sites={},
            precision="float16",
            source={},
        )


def test_a_domain_that_would_be_cut() -> None:
    samples = replace(text_samples(2), domain_N=np.array([b"code", b"a name of 17 byte"]))
    with pytest.raises(UserError, match=r"a domain must have at most 16 letters; got b'a name of 17 byte'"):
        Contents(
            architecture=ARCHITECTURE,
            samples=samples,
            sample_ids=np.arange(2),
            sites={},
            precision="float16",
            source={},
        )


def test_a_capture_has_samples() -> None:
    with pytest.raises(UserError, match="a capture must hold at least one sample; got 0"):
        Contents(
            architecture=ARCHITECTURE,
            samples=text_samples(2).rows(slice(0)),
            sample_ids=np.arange(0),
            sites={},
            precision="float16",
            source={},
        )


def test_an_unknown_dtype() -> None:
    with pytest.raises(UserError, match="dtype must be one of float16, float32; got bfloat16"):
        Contents(
            architecture=ARCHITECTURE,
            samples=text_samples(2),
            sample_ids=np.arange(2),
            sites={},
            precision="bfloat16",
            source={},
        )
