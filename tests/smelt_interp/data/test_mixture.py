"""The training mixture is a pure function of options and step."""

import numpy as np
import pytest

from smelt_interp.data.mixture import EMPTY_DIGEST, MixtureOptions, TrainingMixture, extend
from smelt_interp.data.samples import Role
from smelt_interp.data.text import corpus, split_of
from smelt_interp.data.tokenizer import BOS, PAD
from smelt_interp.errors import UserError

EXCERPTS = MixtureOptions(source="excerpts")


@pytest.fixture(scope="module")
def mixture():
    return TrainingMixture(EXCERPTS)


def test_a_step_is_twelve_full_rows_in_the_stated_order(mixture):
    batch = mixture.batch(3)
    expected = [b"dyck"] * 6 + [b"code"] * 2 + [b"prose", b"math"] + [b"backcopy"] * 2
    assert batch.domain_N.tolist() == expected
    assert batch.episode_N["episode_pairing"].tolist() == [True] * 5 + [False] * 7
    assert batch.ids_NT.shape == (12, 160)
    assert (batch.ids_NT[:, 0] == BOS).all()
    assert (batch.length_N == 160).all()
    assert not np.isin(batch.ids_NT[:, 1:], [BOS, PAD]).any()
    assert not (batch.role_NT == Role.PAD).any()


def test_a_batch_depends_on_step_and_options_only(mixture):
    again = TrainingMixture(EXCERPTS)
    forward = [mixture.batch(step).digest() for step in (0, 1, 2)]
    backward = [again.batch(step).digest() for step in (2, 1, 0)]
    assert forward == backward[::-1]
    assert len(set(forward)) == 3
    assert TrainingMixture(MixtureOptions(source="excerpts", seed=1)).batch(0).digest() not in forward


def test_text_rows_of_training_come_from_training_documents(mixture):
    documents = {d: [x.data for x in corpus(d, "train").documents] for d in ("code", "prose", "math")}
    for step in range(5):
        batch = mixture.batch(step)
        for row, domain in enumerate(batch.domain_N.tolist()):
            if domain.decode() in documents:
                data = bytes(batch.ids_NT[row, 1:].astype(np.uint8))
                assert any(data in document for document in documents[domain.decode()])


def test_order_digest_is_a_chain_that_a_resumed_run_carries_on(mixture):
    digest = mixture.order_digest(2)
    for step in (2, 3):
        digest = extend(digest, mixture.batch(step))
    assert digest == mixture.order_digest(4)
    assert mixture.order_digest(0) == EMPTY_DIGEST
    swapped = extend(extend(EMPTY_DIGEST, mixture.batch(1)), mixture.batch(0))
    assert swapped != mixture.order_digest(2)


def test_corpora_are_recorded_with_their_digests(mixture):
    assert [record.domain for record in mixture.corpora] == ["code", "prose", "math"]
    for record in mixture.corpora:
        texts = corpus(record.domain, "train")
        assert (record.documents, record.bytes) == (len(texts.documents), texts.num_bytes())
        assert record.digest == texts.digest()


def test_kinds_can_be_left_out():
    options = MixtureOptions(dyck_episode=0, dyck_standard=2, code=0, prose=0, math=1, backcopy=0, source="excerpts")
    only = TrainingMixture(options)
    assert only.batch(0).domain_N.tolist() == [b"dyck", b"dyck", b"math"]
    assert [record.domain for record in only.corpora] == ["math"]


def test_folders_of_text_are_domains_whose_training_side_is_packed(tmp_path):
    for folder in ("tales", "letters"):
        (tmp_path / folder).mkdir()
        for number in range(20):
            (tmp_path / folder / f"{number}.txt").write_text(f"{folder} {number} " * 9)
    none = dict.fromkeys(("dyck_episode", "dyck_standard", "code", "prose", "math", "backcopy"), 0)
    folders = (str(tmp_path / "tales"), str(tmp_path / "letters"))
    mixture = TrainingMixture(MixtureOptions(**none, text=folders, text_rows=3, context=64))
    assert [record.domain for record in mixture.corpora] == ["file:tales", "file:letters"]
    assert all(10 <= record.documents < 20 for record in mixture.corpora)
    held_out = [str(number) for number in range(20) if split_of("file:tales", f"{number}.txt") == "held_out"]
    assert held_out
    for step in range(8):
        batch = mixture.batch(step)
        assert batch.domain_N.tolist() == [b"file:tales"] * 3 + [b"file:letters"] * 3
        assert (batch.segment_start_NT > 0).any()
        text = b" ".join(b"".join(batch.row_text(row)) for row in range(3)).decode()
        assert not any(f"tales {number} " in text for number in held_out)


def test_token_stream_of_everything_but_text_is_pinned():
    """Dyck and backcopy rows must never change: shipped checkpoints name the digest of their order."""
    options = MixtureOptions(code=0, prose=0, math=0, source="excerpts")
    assert TrainingMixture(options).order_digest(3)[:16] == "41cc8619235f88ab"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prose": -1}, "prose must be at least 0; got -1"),
        (
            dict.fromkeys(("dyck_episode", "dyck_standard", "code", "prose", "math", "backcopy"), 0),
            "at least 1 in all; got 0",
        ),
        ({"context": 1}, "context must be at least 2; got 1"),
        ({"max_total": 9}, "max_total must be a multiple of 2; got 9"),
        ({"seed": -1}, "seed must be at least 0; got -1"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        MixtureOptions(**change)


def test_a_context_longer_than_the_texts_is_refused():
    with pytest.raises(UserError, match=r"text rows must be at most .* of prose"):
        TrainingMixture(MixtureOptions(context=20_000, source="excerpts"))
