"""Loss and gain by domain are those that were planted, paired by document."""

from dataclasses import replace

import numpy as np
import pytest

from cache.batch import Batch
from probes import domain_loss
from probes.running.command import Measured
from probes.running.probe import Result
from probes.running.source import SampleSet, Subject
from smelt_interp.data.samples import Samples, concatenate
from smelt_interp.data.tokenizer import PAD
from smelt_interp.errors import UserError
from tests.support.answers import measure, rows_of
from tests.support.planted import BASELINE, LOOPED, pick, planted_batch, text_samples


def two_domains() -> Samples:
    code, prose = text_samples(6, 12, padding=2), text_samples(5, 20, seed=1)
    prose = replace(prose, domain_N=np.full(5, b"prose", "S16"), document_N=np.array([6, 6, 7, 8, 9]))
    return concatenate([code, prose], PAD)


def predicting(samples: Samples, nats_N: np.ndarray, network=LOOPED) -> Batch:
    """Every token of row n costs nats_N[n]; positions that predict nothing hold what no mean may count."""
    logprob_BT = np.full(samples.ids_NT.shape, np.nan, np.float32)
    for row, (nats, length) in enumerate(zip(nats_N, samples.length_N, strict=True)):
        logprob_BT[row, : length - 1] = -nats
    return planted_batch(network, samples, {}, logprob_BT=logprob_BT)


def side_by_side(samples: Samples, *batches: Batch) -> Measured:
    """What the command makes of several networks' answers; none of them is untrained."""
    subjects = tuple(
        Subject(name=f"network {i}", architecture=batch.architecture, described={}, batches=lambda *_: iter(()))
        for i, batch in enumerate(batches)
    )
    results: tuple[Result, ...] = tuple(measure(domain_loss, [batch]) for batch in batches)
    return Measured(name="domain_loss", probe=domain_loss, options=domain_loss.Options(), subjects=subjects,
                    data=SampleSet(name="text", samples=samples), results=results)  # fmt: skip


def test_each_domain_has_its_loss_and_its_bits_a_byte() -> None:
    samples = two_domains()
    rows = rows_of(domain_loss, [predicting(samples, np.r_[np.full(6, 1.5), 1.0, 1.0, 2.0, 3.0, 5.0])])
    assert pick(rows, quantity="loss (nats)", domain="code")["value"] == pytest.approx(1.5)
    prose = pick(rows, quantity="loss (nats)", domain="prose")
    assert (prose["value"], prose["n"], prose["null_uniform"]) == pytest.approx((2.4, 4, np.log(259)))
    assert pick(rows, quantity="bits a byte", domain="prose")["value"] == pytest.approx(2.4 / np.log(2))


def test_bits_a_byte_count_the_bytes_of_the_predicted_tokens() -> None:
    samples = text_samples(2, 4)
    # Every token's text is twice as long: three predicted tokens of two bytes each, BOS has none.
    longer = replace(samples.text, offsets=samples.text.offsets * 2, data=np.repeat(samples.text.data, 2))
    rows = rows_of(domain_loss, [predicting(replace(samples, text=longer), np.array([1.0, 3.0]))])
    assert pick(rows, quantity="bits a byte")["value"] == pytest.approx(2 / 2 / np.log(2))


def test_the_gain_over_another_is_paired_by_document() -> None:
    """The documents' losses differ by whole nats, the gain is .25 in each: its interval is a point."""
    samples, nats_N = two_domains(), np.arange(11.0) + 1
    both = side_by_side(samples, predicting(samples, nats_N), predicting(samples, nats_N + 0.25, BASELINE))
    rows, _ = both.joined()
    for domain in ("code", "prose"):
        gain = pick(rows, quantity="gain (nats)", domain=domain, against="network 1")
        assert (gain["value"], gain["low"], gain["high"]) == pytest.approx((0.25, 0.25, 0.25), abs=1e-6)
        loss = pick(rows, quantity="loss (nats)", domain=domain)
        assert float(str(loss["high"])) - float(str(loss["low"])) > 1
    assert "gain (nats)" in [line[0] for line in both.readable().rows]


def test_a_loss_that_is_no_number_is_refused() -> None:
    samples = two_domains()
    message = "^tokens to measure must have finite log-probabilities; got -inf from the unembedding, in samples 0 to 10"
    with pytest.raises(UserError, match=message):
        measure(domain_loss, [predicting(samples, np.r_[np.inf, np.ones(10)])])
