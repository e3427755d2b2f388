"""Packing documents into rows and taking them apart again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.packing import Segment, pack, segments, unpack
from smelt_interp.data.samples import Role
from smelt_interp.errors import UserError


def document(number: int, size: int) -> Segment:
    return Segment(ids_T=np.full(size, number, np.int32), role_T=np.full(size, Role.TEXT, np.uint8))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_packed_documents_come_back_whole_and_in_order(sizes):
    documents = [document(number, size) for number, size in enumerate(sizes)]
    packed = pack(documents, 9, b"text")
    back = unpack(packed.ids_NT, packed)
    assert [ids.tolist() for ids in back] == [d.ids_T.tolist() for d in documents]
    assert packed.length_N.sum() == sum(sizes)


def test_worked_layout():
    packed = pack([document(number, size) for number, size in enumerate([3, 2, 4, 2])], 6, b"text")
    assert packed.ids_NT.tolist() == [[0, 0, 0, 1, 1, 258], [2, 2, 2, 2, 3, 3]]
    assert packed.segment_start_NT.tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 0, 0, 4, 4]]
    assert packed.length_N.tolist() == [5, 6]
    assert packed.role_NT[0].tolist() == [Role.TEXT] * 5 + [Role.PAD]
    assert packed.episode_N["shots"].tolist() == [-1, -1]


def test_episodes_packed_and_unpacked_keep_their_ids_and_roles():
    episodes = dyck_samples(DyckOptions(shots=2), 7)
    packed = pack(segments(episodes), 160, b"dyck")
    assert len(packed) < 7
    for before, after in zip(segments(episodes), segments(packed), strict=True):
        np.testing.assert_array_equal(before.ids_T, after.ids_T)
        np.testing.assert_array_equal(before.role_T, after.role_T)


def test_values_with_more_axes_are_cut_alike():
    packed = pack([document(0, 2), document(1, 3)], 6, b"text")
    values = np.stack([packed.ids_NT, -packed.ids_NT], axis=-1)
    assert [part.shape for part in unpack(values, packed)] == [(2, 2), (3, 2)]


def test_bad_documents_are_refused():
    with pytest.raises(UserError, match="1 to 4 tokens; got 5 in document 1"):
        pack([document(0, 2), document(1, 5)], 4, b"text")
    with pytest.raises(UserError, match="1 to 4 tokens; got 0"):
        pack([document(0, 0)], 4, b"text")
    with pytest.raises(UserError, match="at least one; got 0"):
        pack([], 4, b"text")
    packed = pack([document(0, 2)], 4, b"text")
    with pytest.raises(UserError, match=r"one entry a token \(1, 4\)"):
        unpack(np.zeros((1, 3)), packed)
