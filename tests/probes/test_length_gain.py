"""A network whose gain over another is planted by the tokens before has that gain, and the planted ratio."""

from dataclasses import replace

import numpy as np
import pytest

from probes import length_gain
from probes.length_gain import BUCKETS, buckets
from smelt_interp.data.samples import Samples
from tests.support.answers import measure, rows_of
from tests.support.planted import LOOPED, pick, planted_batch, split_batch, text_samples


def batch_of(samples: Samples, nats_NT: np.ndarray):
    """Of a network whose context is the rows' length."""
    network = replace(LOOPED, context=samples.ids_NT.shape[1])
    return planted_batch(network, samples, {}, logprob_BT=-nats_NT.astype(np.float32))


def gains(samples: Samples, gain_NT: np.ndarray, size: int = 3) -> list[dict[str, object]]:
    """The rows of a network that gains so much at each position over one of random losses."""
    nats_NT = np.random.default_rng(0).random(samples.ids_NT.shape) + 2
    own, other = (measure(length_gain, split_batch(batch_of(samples, x_NT), size)).totals
                  for x_NT in (nats_NT - gain_NT, nats_NT))  # fmt: skip
    return [row for quantity in length_gain.against(own, other) for row in quantity.rows()]


def before(samples: Samples) -> np.ndarray:
    """How many tokens of its document come before the token that each position predicts."""
    return np.arange(samples.ids_NT.shape[1]) + 1 - samples.segment_start_NT


def test_a_planted_gain_comes_back_and_its_ratio() -> None:
    """.1 nats up to 10 tokens before, .152 from 20 on: the paper's ratio, in rows of 160 tokens."""
    samples = text_samples(6, 160)
    rows = gains(samples, np.where(before(samples) <= 10, 0.1, 0.152))
    short, long = (pick(rows, quantity="gain (nats)", bucket=name) for name in ("short", "long"))
    assert (short["tokens before"], long["tokens before"]) == ("2-10", "20-160")
    assert (short["value"], long["value"]) == pytest.approx((0.1, 0.152), abs=1e-6)
    assert (short["null_no_difference"], long["null_no_difference"]) == (0.0, 0.0)
    ratio = pick(rows, quantity="gain ratio, long / short")
    assert (ratio["value"], ratio["low"], ratio["high"]) == pytest.approx((1.52, 1.52, 1.52), abs=1e-4)
    assert ratio["note"] == "as shares of a context of 160: the paper's are 512-4096 of 4096"
    octave = pick(rows, quantity="gain (nats)", bucket="octave", **{"tokens before": "8-15"})
    assert octave["value"] == pytest.approx((3 * 0.1 + 5 * 0.152) / 8, abs=1e-6)


def test_over_a_gain_that_may_be_none_any_ratio_may_be() -> None:
    samples = text_samples(6, 160)
    sign_N1 = np.where(np.arange(6) % 2, 1.0, -1.0)[:, None]
    ratio = pick(gains(samples, sign_N1 * 0.1 + 0.01), quantity="gain ratio, long / short")
    assert str(ratio["note"]).startswith("the gain in the short bucket may be 0: any ratio may be; as shares of")


def test_rows_of_the_papers_length_have_the_papers_buckets() -> None:
    short, long, *octaves = buckets(4096)
    assert [(each.first, each.last, each.note) for each in (short, long)] == [(32, 256, ""), (512, 4096, "")]
    assert [each.first for each in octaves] == [2**k for k in range(12)]
    assert list(BUCKETS) == ["short", "long"]


def test_a_document_within_a_row_counts_from_its_own_start() -> None:
    samples = text_samples(5, 64)
    start_NT = np.where(np.arange(64) < 30, 0, 30).astype(np.int32) * np.ones((5, 1), np.int32)
    samples = replace(samples, segment_start_NT=start_NT)
    rows = gains(samples, np.where(before(samples) >= 8, 1.0, 0.5))
    assert pick(rows, quantity="gain (nats)", bucket="long")["value"] == pytest.approx(1.0, abs=1e-6)
    of_octaves = [row["value"] for row in rows if row["quantity"] == "gain (nats)" and row["bucket"] == "octave"]
    assert of_octaves == pytest.approx([0.5, 0.5, 0.5, 1.0, 1.0, 1.0], abs=1e-6)


def test_a_bucket_that_no_token_falls_into_is_not_defined() -> None:
    samples = text_samples(3, 64)
    short = replace(samples, segment_start_NT=(np.arange(64) // 4 * 4 * np.ones((3, 1))).astype(np.int32))
    rows = rows_of(length_gain, [batch_of(short, np.ones((3, 64)))])
    long = pick(rows, bucket="long")
    assert (long["value"], long["note"]) == (None, "not defined: no token follows so many; --length may be 64")
