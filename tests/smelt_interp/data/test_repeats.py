"""Repeated random tokens: different ones, twice, the same for a seed and number."""

import numpy as np
import pytest

from model.tokenizers import HuggingFaceTokenizer
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.repeats import drawn_from, repeated_samples
from smelt_interp.data.tokenizer import BOS, BYTES
from smelt_interp.errors import UserError
from tests.support.bpe import byte_level_bpe


def test_a_row_is_a_run_of_different_tokens_twice() -> None:
    samples = load_samples(DataOptions(data=("repeats",), samples=5, length=40, seed=3), 160, BYTES)
    assert samples.ids_NT.shape == (5, 39)
    assert (samples.ids_NT[:, 0] == BOS).all()
    first_NT, second_NT = samples.ids_NT[:, 1:20], samples.ids_NT[:, 20:]
    np.testing.assert_array_equal(first_NT, second_NT)
    assert all(len(set(row)) == 19 for row in first_NT.tolist())
    assert samples.num_documents == 5
    fewer = repeated_samples(2, length=40, seed=3, tokenizer=BYTES)
    np.testing.assert_array_equal(fewer.ids_NT, samples.ids_NT[:2])
    assert (repeated_samples(2, length=40, seed=4, tokenizer=BYTES).ids_NT != fewer.ids_NT).any()


def test_tokens_are_printable_and_none_is_there_more_often_than_twice() -> None:
    assert drawn_from(BYTES).tolist() == list(range(33, 127))
    assert repeated_samples(1, length=1000, seed=0, tokenizer=BYTES).ids_NT.shape == (1, 1 + 2 * 94)
    words = HuggingFaceTokenizer(byte_level_bpe().to_str())
    ids_V = drawn_from(words)
    texts = [words.token_text[token].decode() for token in ids_V]
    assert len(texts) > 10
    assert all(text.isprintable() and text.strip() for text in texts)


def test_a_row_without_room_is_refused() -> None:
    with pytest.raises(UserError, match=r"^repeats must have at least 1 row of 5 tokens or more; got 2 of 4$"):
        repeated_samples(2, length=4, seed=0, tokenizer=BYTES)
