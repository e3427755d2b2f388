"""The byte tokenizer and its Hugging Face file give the same ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from smelt_interp.data.tokenizer import BOS, BYTES, EOS, PAD, SPECIAL_NAMES, is_byte_tokenizer, text_of
from smelt_interp.errors import UserError

HF = Tokenizer.from_str(BYTES.to_json())


def ids(text: str) -> list[int]:
    return BYTES.encode(text).ids_T.tolist()


@given(st.text())
def test_tokens_are_the_bytes_of_the_text_and_know_their_characters(text):
    encoding = BYTES.encode(text)
    assert ids(text) == list(text.encode())
    assert BYTES.decode(encoding.ids_T) == text
    place = [number for number, character in enumerate(text) for _ in character.encode()]
    assert encoding.start_T.tolist() == place
    assert encoding.stop_T.tolist() == [number + 1 for number in place]


@given(st.text() | st.lists(st.sampled_from(["<bos>", "<eos>", "<pad>", "a", "<", "é"])).map("".join))
def test_hugging_face_gives_the_same_ids_and_text_names_of_special_tokens_included(text):
    assert HF.encode(text).ids == ids(text)
    assert HF.decode(ids(text)) == text


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
    assert HF.get_vocab_size() == BYTES.vocab_size == len(BYTES.token_text)
    tokens = [BOS, ord("a"), EOS, PAD]
    assert BYTES.decode(np.array(tokens)) == "a" == HF.decode(tokens) == HF.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["demo-smelt", "demo-baseline"])
def test_shipped_files_are_the_byte_tokenizer_and_transformers_reads_them(name):
    path = Path(__file__).parents[3] / "checkpoints" / name / "tokenizer.json"
    assert path.read_text() == BYTES.to_json()
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert loaded("a<bos>é")["input_ids"] == ids("a<bos>é")
    assert len(loaded) == 259


def test_the_first_form_of_the_file_is_known_and_nothing_else_is():
    """Checkpoints written with special tokens as added ones stay readable."""
    now = json.loads(BYTES.to_json())
    first = json.loads(json.dumps(now))
    for token, content in SPECIAL_NAMES.items():
        del first["model"]["vocab"][content]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        first["added_tokens"].append({"id": token, "content": content, "special": True} | flags)
    first["decoder"] = first["pre_tokenizer"]
    other = json.loads(json.dumps(now))
    other["model"]["vocab"]["a"], other["model"]["vocab"]["b"] = 98, 97
    assert is_byte_tokenizer(now)
    assert is_byte_tokenizer(first)
    assert not is_byte_tokenizer(other)
    assert not is_byte_tokenizer([])


def test_bytes_that_are_no_utf8_become_replacement_characters():
    assert BYTES.decode(np.array([0x61, 0xFF])) == "a\ufffd"


def test_half_a_character_is_no_text():
    with pytest.raises(UserError, match=r"text must be Unicode; got a lone surrogate '.*ud800' at character 1"):
        BYTES.encode("a\ud800")


def test_text_of_rows_ends_where_they_do():
    text = text_of(BYTES, np.array([[BOS, 97, 10], [98, 99, PAD]]), np.array([3, 1]))
    assert [text[i] for i in range(6)] == [b"", b"a", b"\n", b"b", b"", b""]


@pytest.mark.parametrize("bad", [-1, 259])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(UserError, match=f"0 to 258; got {bad}"):
        BYTES.decode(np.array([5, bad]))
