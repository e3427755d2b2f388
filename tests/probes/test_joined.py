"""Two probes together: a planted relation is found over documents, none is found where there is none."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.batch import Batch
from cache.store import Capture
from probes import attention_sink, domain_loss, joined
from probes.attention_sink import PATTERN, VALUE
from probes.running.probe import Result, run
from smelt_interp.errors import UserError
from tests.support.commands import Command
from tests.support.planted import LOOPED, pick, planted_batch, random_sites, start_pattern, text_samples
from tests.support.planted_captures import planted_capture

NUM, LENGTH = 24, 8
DOCUMENT_N = np.arange(NUM) // 2
GENERATOR = np.random.default_rng(3)
LEFT_D = GENERATOR.permutation(np.linspace(0.1, 0.5, NUM // 2))
"""How much start mass a document loses on visit 2."""
UNRELATED_D = GENERATOR.random(NUM // 2)


def results(loss_D: np.ndarray) -> tuple[Result, Result]:
    """Two samples a document: start mass .6 on visit 1, .6 less what the document loses on visit 2; losses of the
    samples around the document's."""
    samples = replace(text_samples(NUM, LENGTH), document_N=DOCUMENT_N)
    sites = random_sites(LOOPED, samples, (PATTERN, VALUE))
    left_N = LEFT_D[DOCUMENT_N]
    for step in (1, 2):
        sites[step, PATTERN] = start_pattern(samples, 4, 0.6)
    for step in (3, 4):
        for row in range(NUM):
            one = samples.rows(np.array([row]))
            sites[step, PATTERN][row] = start_pattern(one, 4, 0.6 - left_N[row])[0]
    apart_N = np.where(np.arange(NUM) % 2, 0.05, -0.05)
    logprob_BT = np.broadcast_to(-(1 + loss_D[DOCUMENT_N] + apart_N)[:, None], samples.ids_NT.shape).astype(np.float32)
    batch = planted_batch(LOOPED, samples, sites, logprob_BT=logprob_BT)
    probes = {"x": (attention_sink, attention_sink.Options()), "y": (domain_loss, domain_loss.Options())}
    found = run([batch], probes, by_sample=True)
    return found["x"], found["y"]


OPTIONS = joined.Options(x="attention_sink:start_mass", y="domain_loss:loss", shuffles=300)
CHANGE = "start mass, layers 2-3, visit 2 - 1"


def test_a_planted_relation_is_found_over_documents_and_no_other() -> None:
    related = joined.join(*results(LEFT_D**2), OPTIONS)
    found = pick(related.rows(), quantity="rank correlation", x=CHANGE)
    assert (found["value"], found["n"], found["note"]) == (pytest.approx(-1), NUM // 2, "p 0.0033")
    assert found["high"] == pytest.approx(-1)
    assert 0.3 < float(str(found["null_shuffled_95"])) < 0.8
    first = pick(related.rows(), quantity="rank correlation", x="start mass, layers 2-3, visit 1")
    assert (first["value"], first["note"]) == (None, "x is the same in all of 12 documents")
    other = pick(joined.join(*results(UNRELATED_D), OPTIONS).rows(), quantity="rank correlation", x=CHANGE)
    assert abs(float(str(other["value"]))) < float(str(other["null_shuffled_95"]))
    assert len(related.figures["documents"].data) == 3


def test_the_classes_of_a_yes_or_no_have_a_difference_of_means() -> None:
    x, y = results(LEFT_D)
    assert y.by_sample is not None
    (loss,) = (name for name in y.by_sample.columns if name.startswith("loss"))
    answered_N = (LEFT_D[DOCUMENT_N] > 0.3).astype(float)
    answered_N[-1] = np.nan  # the other sample of its document stands for it
    y = replace(y, by_sample=y.by_sample.assign(**{loss: answered_N}))
    found = pick(joined.join(x, y, OPTIONS).rows(), quantity="difference of means", x=CHANGE)
    assert found["value"] == pytest.approx(LEFT_D[LEFT_D <= 0.3].mean() - LEFT_D[LEFT_D > 0.3].mean())


def test_more_words_name_fewer_numbers_and_a_wrong_name_is_told_those_that_there_are() -> None:
    x, y = results(LEFT_D)
    narrow = replace(OPTIONS, x="attention_sink:start_mass_looped_2_3_visit_2")
    assert {row["x"] for row in joined.join(x, y, narrow).rows()} == {"start mass, layers 2-3, visit 2", CHANGE}
    told = r"^a quantity by sample of attention_sink must be one of start_mass, self_mass, .*; got 'start_mas'; nearest"
    with pytest.raises(UserError, match=told):
        joined.join(x, y, replace(OPTIONS, x="attention_sink:start_mas"))


def test_the_command_reads_a_capture_and_refuses_what_names_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = Command(monkeypatch, capsys)
    samples = text_samples(6, LENGTH)
    batch = planted_batch(LOOPED, samples, random_sites(LOOPED, samples, (PATTERN, VALUE)))
    capture = planted_capture(tmp_path / "capture", batch)
    words = ("--capture", capture.path, "--x", "attention_sink:start_mass", "--y", "attention_sink:self_mass")
    document = command.json(joined.main, *words)
    assert [row["y"] for row in document["results"][0]["rows"]][:3] == [
        f"self mass, layers 2-3, visit {visit}" for visit in ("1", "2", "2 - 1")
    ]
    assert "must be PROBE:QUANTITY" in command.refusal(joined.main, *words, "--x", "start_mass")
    assert "those that there are; got 'zzz': attention_sink, " in command.refusal(
        joined.main, *words, "--x", "zzz:mass"
    )
    passes: list[int] = []
    whole = Capture.batches

    def counted(*given: object, **options: object) -> Iterator[Batch]:
        for each in whole(*given, **options):
            passes.append(len(each.samples))
            yield each

    monkeypatch.setattr(Capture, "batches", counted)
    said = command.refusal(joined.main, *words, "--batch-size", "2", "--y", "attention_sink:self_mas")
    assert "must be one of start_mass, self_mass, " in said
    assert "; got 'self_mas'; nearest: self_mass" in said
    assert passes == [2], "one batch of three tells the names"
    assert "measures the samples it is given; got patching" in command.refusal(joined.main, *words, "--y", "patching:a")
