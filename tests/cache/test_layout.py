"""What is stored is what was recorded: storage types, their errors, and the size that is said beforehand."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from cache.layout import Contents, decode, encode, site_shape, stored_as
from cache.selection import Kept, select
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from smelt_interp.plan import Step
from smelt_interp.sites import SITES
from tests.support.planted import text_samples
from tests.support.planted_captures import ARCHITECTURE, planted_capture, random_batch, shard_paths

KEYS = "attn.hook_k"


def test_float16_keeps_eleven_bits() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    stored = encode(values, "attn.hook_q", "float16")
    assert stored.dtype == np.float16
    assert np.abs(decode(stored) / values - 1).max() < 2**-11


def test_float32_keeps_every_bit() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert np.array_equal(decode(encode(values, "attn.hook_q", "float32")), values)


def test_bfloat16_keeps_its_bits_in_two_bytes() -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F80, 1000).astype(np.uint32) << 16
    values = bits.view(np.float32)
    for precision in ("float16", "float32"):
        stored = encode(values, "attn.hook_q", stored_as("attn.hook_q", precision, bfloat16=True))
        assert stored.dtype == np.uint16
        assert np.array_equal(decode(stored), values)


def test_attention_is_never_stored_as_bfloat16() -> None:
    assert stored_as("attn.hook_pattern", "float16", bfloat16=True) == "float16"
    assert stored_as("attn.hook_q", "float16", bfloat16=True) == "bfloat16"


def test_a_value_beyond_float16_names_the_site_and_the_way_out() -> None:
    values = np.array([1.0, -70_000.0], np.float32)
    with pytest.raises(UserError, match=r"hook_resid_post must fit float16.*got -70000: record with --dtype float32"):
        encode(values, "hook_resid_post", "float16")
    assert np.array_equal(encode(values, "hook_resid_post", "float32"), values)


def test_the_infinite_scores_of_masked_keys_are_stored() -> None:
    values = np.array([-np.inf, 0.5], np.float32)
    for stored in ("float16", "float32"):
        assert np.array_equal(decode(encode(values, "attn.hook_attn_scores", stored)), values)


@pytest.mark.parametrize(
    ("suffix", "value"),
    [("hook_resid_post", np.nan), ("hook_resid_post", -np.inf), ("attn.hook_attn_scores", np.inf),
     ("attn.hook_attn_scores", np.nan), ("attn.hook_pattern", np.nan)],
)  # fmt: skip
@pytest.mark.parametrize("stored", ["float16", "float32", "bfloat16"])
def test_a_number_that_is_not_finite_names_the_site(suffix: str, value: float, stored: str) -> None:
    values = np.array([0.5, value, -np.inf if suffix == "attn.hook_attn_scores" else 0.5], np.float32)
    with pytest.raises(UserError, match=rf"values of {suffix} must be finite; got {value}"):
        encode(values, suffix, stored)


def test_a_score_beyond_float16_is_no_masked_key() -> None:
    values = np.array([-np.inf, -70_000.0], np.float32)
    with pytest.raises(UserError, match=r"values of attn.hook_attn_scores must fit float16, .*got -70000: record with"):
        encode(values, "attn.hook_attn_scores", "float16")


@pytest.mark.parametrize("stored", ["float16", "float32", "bfloat16"])
def test_tensors_are_stored_as_arrays_are(stored: str) -> None:
    values = (np.random.default_rng(0).integers(-1000, 1000, (3, 4, 5)) / 64).astype(np.float32)
    tensor = torch.from_numpy(values.copy())
    assert np.array_equal(encode(tensor, "hook_resid_post", stored), encode(values, "hook_resid_post", stored))
    assert np.array_equal(encode(tensor.mT, "hook_resid_post", stored), encode(values.mT, "hook_resid_post", stored))


def test_expert_indices_above_255_are_exact() -> None:
    values = np.array([0, 287, 70_000])
    assert decode(encode(values, "mlp.hook_expert_indices", "int32")).tolist() == [
        0,
        287,
        70_000,
    ]


def contents_of(samples: Samples | None = None, **changed: object) -> Contents:
    """What a capture of two samples without sites will hold."""
    samples = text_samples(2) if samples is None else samples
    usual = {
        "architecture": ARCHITECTURE,
        "samples": samples,
        "sample_ids": np.arange(len(samples)),
        "sites": {},
        "precision": "float16",
        "compression": "gzip",
        "shard_samples": 2,
        "source": {},
    }
    return Contents(**(usual | changed))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_size_said_beforehand_is_the_size_of_the_datasets(tmp_path: Path, dtype: str) -> None:
    suffixes = tuple(SITES)
    batch = random_batch(3, suffixes=suffixes)
    contents = contents_of(batch.samples, sites=select(ARCHITECTURE, suffixes), precision=dtype)
    (path,) = shard_paths(planted_capture(tmp_path / "a", batch, dtype=dtype).path)
    with h5py.File(path) as file:
        assert contents.num_bytes() == sum(
            file[name].nbytes
            for name in (*suffixes, "logprob", "argmax", "tokens/ids", "tokens/role", "tokens/segment_start")
        )


def test_every_site_has_the_shape_of_its_axes() -> None:
    assert site_shape("attn.hook_pattern", ARCHITECTURE, 12, 3) == (3, 12, 12)
    assert site_shape("attn.hook_k", ARCHITECTURE, 12, 1) == (12, 1, 6)
    assert site_shape("mlp.hook_expert_result", ARCHITECTURE, 12, 0) == (12, 2, 8)
    assert site_shape("ln1.hook_scale", ARCHITECTURE, 12, 0) == (12, 1)


def test_numbers_of_a_nested_plan_and_a_dense_network() -> None:
    """Two stacks, H x (L + 1) cycles; the head axis and the steps are those of the architecture, whatever made it."""
    inner, outer = (0, 1), (2,)
    order = [*inner, *inner, *outer, *inner, *inner, *outer]
    steps = tuple(Step(layer, order[:index].count(layer)) for index, layer in enumerate(order))
    sites = ("hook_resid_post", "attn.hook_pattern", "attn.hook_k")
    dense = replace(
        ARCHITECTURE, family="nested", steps=steps, loop_factors=(1.0,) * len(steps), sites=sites, num_experts=0,
        top_k=0, router="none", vocab_size=1000,
    )  # fmt: skip
    assert select(dense, sites, layers=[0], visits=[2, 3])["hook_resid_post"].steps == (5, 7)
    contents = contents_of(architecture=dense, sites=select(dense, sites))
    assert contents.sites["attn.hook_k"] == Kept(tuple(range(10)), (0, 1))
    match = r"a site must be one that a network of family nested computes; got mlp.hook_router_logits: it has hook_res"
    with pytest.raises(UserError, match=match):
        select(dense, ["mlp.hook_router_logits"])


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"sites": {KEYS: Kept((0, 6), (0,))}},
            r"steps of attn.hook_k must be ascending numbers .* 6; got \[0, 6\]",
        ),
        (
            {"sites": {KEYS: Kept((1, 0), (0,))}},
            r"steps of attn.hook_k must be ascending numbers .* 6; got \[1, 0\]",
        ),
        ({"sites": {KEYS: Kept((), (0,))}}, r"steps of attn.hook_k must be ascending numbers .* 6; got \[\]"),
        ({"sites": {KEYS: Kept((0,), (2,))}}, r"heads of attn.hook_k must be ascending numbers .* 2; got \[2\]"),
        ({"sites": {KEYS: Kept((0,), ())}}, r"heads of attn.hook_k must be ascending numbers .* 2; got \[\]"),
        ({"sample_ids": np.array([0])}, "sample ids must ascend, one a sample"),
        ({"sample_ids": np.array([1, 0])}, "sample ids must ascend, one a sample"),
        ({"sample_ids": np.array([3, 3])}, "sample ids must ascend, one a sample"),
        ({"samples": text_samples(2).rows(slice(0))}, "a capture must hold at least one sample; got 0"),
        ({"shard_samples": 0}, "a shard must hold at least one sample; got 0"),
        ({"precision": "bfloat16"}, "dtype must be one of float16, float32; got 'bfloat16'"),
        ({"compression": "zip"}, "compression must be one of none, lzf, gzip; got 'zip'"),
    ],
)
def test_contents_that_cannot_be(changed: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        contents_of(**changed)


def test_a_domain_that_would_be_cut() -> None:
    samples = replace(text_samples(2), domain_N=np.array([b"code", b"a name of 17 byte"]))
    with pytest.raises(UserError, match=r"a domain must have at most 16 letters; got b'a name of 17 byte'"):
        contents_of(samples)
