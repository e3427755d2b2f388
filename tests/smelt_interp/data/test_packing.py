"""Packing documents into rows and taking them apart again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.marked_text import MarkedText, Row, Tokens
from smelt_interp.data.packing import pack, unpack
from smelt_interp.data.samples import Role
from smelt_interp.data.tokenizer import BYTES
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
