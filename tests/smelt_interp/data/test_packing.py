"""Packing documents into rows and taking them apart again."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.marked_text import MarkedText, Row, Tokens, padded
from smelt_interp.data.packing import PackedText, pack, unpack
from smelt_interp.data.samples import Role
from smelt_interp.data.text import Corpus, Document
from smelt_interp.data.tokenizer import BOS, BYTES, EOS
from smelt_interp.errors import UserError


def document(number: int, size: int) -> Row:
    tokens = Tokens(np.full(size, number, np.int32), np.full(size, Role.TEXT, np.uint8))
    return Row(tokens, MarkedText(text="", document=number, domain="text"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_packed_documents_come_back_whole_and_in_order(sizes):
    documents = [document(number, size) for number, size in enumerate(sizes)]
    packed = pack(documents, 9, BYTES)
    back = unpack(packed.ids_NT, packed)
    assert [ids.tolist() for ids in back] == [d.tokens.ids_T.tolist() for d in documents]
    assert packed.length_N.sum() == sum(sizes)


def test_worked_layout():
    packed = pack([document(number, size) for number, size in enumerate([3, 2, 4, 2])], 6, BYTES)
    assert packed.ids_NT.tolist() == [[0, 0, 0, 1, 1, 258], [2, 2, 2, 2, 3, 3]]
    assert packed.segment_start_NT.tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 0, 0, 4, 4]]
    assert packed.length_N.tolist() == [5, 6]
    assert packed.role_NT[0].tolist() == [Role.TEXT] * 5 + [Role.PAD]
    assert packed.episode_N["shots"].tolist() == [-1, -1]
    assert packed.document_N.tolist() == [0, 2]
    assert packed.row_text(0) == [b"\0", b"\0", b"\0", b"\1", b"\1", b""]


def test_episodes_packed_and_unpacked_keep_their_ids_and_roles():
    episodes = dyck_samples(DyckOptions(shots=(2,)), 7, seed=0, length=160, tokenizer=BYTES)
    source = MarkedText(text="", document=0, domain="dyck")
    parts = zip(unpack(episodes.ids_NT, episodes), unpack(episodes.role_NT, episodes), strict=True)
    rows = [Row(Tokens(ids_T, role_T), source) for ids_T, role_T in parts]
    packed = pack(rows, 160, BYTES)
    assert len(packed) < 7
    for name in ("ids_NT", "role_NT"):
        before, after = (unpack(getattr(samples, name), samples) for samples in (episodes, packed))
        assert [part.tolist() for part in before] == [part.tolist() for part in after]


def test_values_with_more_axes_are_cut_alike():
    packed = pack([document(0, 2), document(1, 3)], 6, BYTES)
    values = np.stack([packed.ids_NT, -packed.ids_NT], axis=-1)
    assert [part.shape for part in unpack(values, packed)] == [(2, 2), (3, 2)]


def test_bad_documents_are_refused():
    with pytest.raises(UserError, match="1 to 4 tokens; got 5 in document 1"):
        pack([document(0, 2), document(1, 5)], 4, BYTES)
    with pytest.raises(UserError, match="1 to 4 tokens; got 0"):
        pack([document(0, 0)], 4, BYTES)
    with pytest.raises(UserError, match="at least one; got 0"):
        pack([], 4, BYTES)
    packed = pack([document(0, 2)], 4, BYTES)
    with pytest.raises(UserError, match=r"one entry a token \(1, 4\)"):
        unpack(np.zeros((1, 3)), packed)


def texts(*sizes: int) -> Corpus:
    """Documents whose bytes name them."""
    documents = [Document(name=str(number), data=bytes([97 + number]) * size) for number, size in enumerate(sizes)]
    return Corpus(domain="text", documents=tuple(documents))


SIZES = (7, 3, 30, 1, 12)
PACKED = PackedText(texts(*SIZES), 10, 0, BYTES)


def test_an_epoch_of_packed_text_is_every_document_once_from_bos_to_eos():
    """53 bytes, five bos and five eos are six rows of ten; three tokens of the last document wait for no row."""
    assert PACKED.rows_per_epoch == 6
    stream = np.concatenate([row.tokens.ids_T for row in PACKED.rows(0, 6)])
    documents = bytes(np.where(stream == BOS, ord("<"), np.where(stream == EOS, ord(">"), stream)).astype(np.uint8))
    whole = [b"<" + bytes([97 + number]) * size + b">" for number, size in enumerate(SIZES)]
    assert documents[:60] in {b"".join(order)[:60] for order in permutations(whole)}


def test_rows_of_packed_text_depend_on_their_number_alone_and_epochs_on_their_order():
    at_once = padded(PACKED.rows(0, 24), BYTES)
    for first, num in ((5, 3), (12, 1)):
        assert padded(PACKED.rows(first, num), BYTES).digest() == at_once.rows(slice(first, first + num)).digest()
    epochs = {at_once.ids_NT[first : first + 6].tobytes() for first in range(0, 24, 6)}
    assert len(epochs) > 1


def test_segments_of_packed_text_begin_where_documents_do_and_where_a_row_does():
    samples = padded(PACKED.rows(0, 12), BYTES)
    begins_NT = samples.segment_start_NT == np.arange(10)
    assert np.array_equal(begins_NT[:, 1:], samples.ids_NT[:, 1:] == BOS)
    assert begins_NT[:, 0].all()
    assert (samples.length_N == 10).all()


def test_texts_that_fill_no_row_are_refused():
    with pytest.raises(UserError, match="texts of text must fill a row of 10 tokens; got 9 in 1 documents"):
        PackedText(texts(7), 10, 0, BYTES)
