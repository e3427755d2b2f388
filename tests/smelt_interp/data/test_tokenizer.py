"""The byte tokenizer and its Hugging Face file give the same ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from smelt_interp.data.tokenizer import (
    BOS,
    EOS,
    PAD,
    VOCAB_SIZE,
    decode,
    decode_bytes,
    encode,
    token_labels,
    tokenizer_json,
)
from smelt_interp.errors import UserError

HF = Tokenizer.from_str(tokenizer_json())


@given(st.binary())
def test_bytes_survive_encoding(data):
    assert decode_bytes(encode(data)) == data
    assert encode(data).tolist() == list(data)


@given(st.text().filter(lambda text: not any(name in text for name in ("<bos>", "<eos>", "<pad>"))))
def test_hugging_face_gives_the_same_ids_and_text(text):
    assert HF.encode(text).ids == encode(text).tolist()
    assert HF.decode(encode(text).tolist()) == text == decode(encode(text))


def test_hugging_face_knows_every_byte_by_its_value():
    """Bytes that no UTF-8 text holds are checked by decoding: each id stands for its own byte-level character."""
    characters = [HF.id_to_token(byte) for byte in range(256)]
    assert len(set(characters)) == 256
    assert set(characters) == set(ByteLevel.alphabet())
    for text in map(chr, range(0x800)):
        assert [HF.token_to_id(token) for token in HF.encode(text).tokens] == list(text.encode())
    assert HF.decode([0xE2, 0x82, 0xAC]) == "€"


def test_special_tokens_are_the_same_and_stand_for_no_text():
    assert [HF.token_to_id(name) for name in ("<bos>", "<eos>", "<pad>")] == [BOS, EOS, PAD]
    assert HF.get_vocab_size() == VOCAB_SIZE
    ids = np.array([BOS, ord("a"), EOS, PAD])
    assert decode(ids) == "a" == HF.decode(ids.tolist())


def test_bytes_that_are_no_utf8_become_replacement_characters():
    assert decode(np.array([0x61, 0xFF])) == "a\ufffd"


def test_labels_are_visible_and_distinct():
    labels = token_labels(np.arange(VOCAB_SIZE))
    assert len(set(labels)) == VOCAB_SIZE
    assert all(label.isprintable() and label.strip() for label in labels)
    assert (labels[10], labels[65], labels[BOS]) == (r"\n", "A", "<bos>")


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(UserError, match=f"0 to 258 .*; got {bad}"):
        decode(np.array([5, bad]))
