"""Bigram-backcopy text follows its chain and its copying rule."""

import numpy as np
import pytest

from smelt_interp.data.backcopy import SYMBOLS, TRIGGERS, backcopy_row, backcopy_samples, is_copied, transition_matrix
from smelt_interp.data.samples import Role
from smelt_interp.data.tokenizer import BOS, BYTES
from smelt_interp.errors import UserError

PLAIN = np.array([symbol not in TRIGGERS for symbol in SYMBOLS])


@pytest.fixture(scope="module")
def samples():
    return backcopy_samples(600, length=160, seed=5, tokenizer=BYTES)


def test_sixty_printable_symbols_three_of_them_triggers():
    assert len(set(SYMBOLS)) == 60
    assert all(32 < symbol < 127 for symbol in SYMBOLS)
    assert set(TRIGGERS) < set(SYMBOLS)
    assert len(TRIGGERS) == 3


def test_rows_of_the_matrix_are_distributions_and_triggers_have_none():
    matrix = transition_matrix()
    np.testing.assert_allclose(matrix[PLAIN].sum(1), 1.0)
    assert (matrix[~PLAIN] == 0).all()
    np.testing.assert_allclose(matrix[PLAIN][:, ~PLAIN], 0.05)


def test_a_trigger_copies_the_symbol_before_it_and_never_follows_a_trigger(samples):
    ids = samples.ids_NT[:, 1:]
    copied = is_copied(ids)
    rows, columns = np.nonzero(copied)
    assert len(rows) > 5000
    np.testing.assert_array_equal(ids[rows, columns], ids[rows, columns - 2])
    assert not (np.isin(ids, list(TRIGGERS)) & copied).any()
    assert not np.isin(ids[:, 0], list(TRIGGERS)).any()


def test_other_symbols_follow_the_transition_matrix(samples):
    ids = samples.ids_NT[:, 1:]
    place = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    numbers = np.vectorize(place.__getitem__)(ids)
    counts = np.zeros((60, 60))
    here = ~is_copied(ids)[:, 1:]
    np.add.at(counts, (numbers[:, :-1][here], numbers[:, 1:][here]), 1)
    expected = counts.sum(1, keepdims=True) * transition_matrix()
    spread = np.sqrt(np.maximum(expected, 1))
    assert (
        np.abs(counts - expected).max() < 5.5 * spread[np.unravel_index(np.abs(counts - expected).argmax(), (60, 60))]
    )
    assert (np.abs(counts - expected) < 6 * spread).all()


def test_the_chain_is_the_same_for_every_seed_and_the_text_is_not():
    one, again, other = (backcopy_samples(3, length=50, seed=seed, tokenizer=BYTES).digest() for seed in (1, 1, 2))
    assert one == again != other


def test_a_row_worked_by_hand():
    """Uniform 0 takes the first symbol of positive probability; 0.9999 the last, which is no trigger."""
    first = SYMBOLS[int(np.flatnonzero(transition_matrix()[0])[0])]
    assert backcopy_row([0.0, 0.0]) == bytes([SYMBOLS[0], first])
    assert backcopy_row([0.0, 0.999999999])[1] not in TRIGGERS


def test_rows_are_full_text_behind_bos(samples):
    assert samples.ids_NT.shape == (600, 160)
    assert (samples.ids_NT[:, 0] == BOS).all()
    assert (samples.role_NT[:, 1:] == Role.TEXT).all()
    assert set(samples.domain_N.tolist()) == {b"backcopy"}


@pytest.mark.parametrize(("num", "length"), [(0, 5), (1, 1)])
def test_too_little_is_refused(num, length):
    with pytest.raises(UserError, match=f"at least 1 row of at least 2 tokens; got {num} of {length}"):
        backcopy_samples(num, length=length, seed=0, tokenizer=BYTES)
