"""The text of tokens: taking, classes and labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_interp.data.samples import token_class
from smelt_interp.data.token_text import TokenText, label
from smelt_interp.errors import UserError
from tests.support.planted import text_samples

TOKENS = st.lists(st.binary(max_size=4), min_size=1, max_size=12)


@given(TOKENS, st.data())
def test_taking_tokens_is_taking_their_bytes(tokens, data):
    text = TokenText.of(tokens)
    index = data.draw(st.lists(st.integers(0, len(tokens) - 1)))
    taken = text.take(np.array(index, dtype=np.int64))
    assert [taken[i] for i in range(len(taken))] == [tokens[i] for i in index]


CASES = {
    b"(": "brackets opening",
    b" [": "brackets opening",
    b">)\n": "brackets closing",
    b"()": "brackets",
    b"(:": "",
    b" hello": "letters",
    b"a1": "",
    b"12": "digits",
    b"::": "punctuation",
    b" ": "whitespace",
    b" \n": "whitespace newline",
    b"a\n": "letters",
    b"": "",
    "é".encode(): "",
}


def test_classes_are_read_from_the_text_white_space_around_it_apart():
    text = TokenText.of(list(CASES))
    for name in ("brackets", "opening", "closing", "letters", "digits", "punctuation", "whitespace", "newline"):
        expected = [name in classes.split() for classes in CASES.values()]
        assert text.is_class(name).tolist() == expected, name


def test_every_ascii_character_is_in_one_of_five_classes():
    text = TokenText.of([bytes([byte]) for byte in range(33, 127)])
    classes = [text.is_class(name) for name in ("brackets", "letters", "digits", "punctuation", "whitespace")]
    assert (np.sum(classes, axis=0) == 1).all()


def test_classes_of_samples_do_not_look_at_ids():
    samples = text_samples(3, 9, padding=2)
    letters_NT = token_class(samples, "letters")
    assert letters_NT.sum() == samples.length_N.sum() - 3  # all but bos
    assert not letters_NT[:, 0].any()


def test_a_class_of_no_known_name_is_refused():
    with pytest.raises(UserError, match=r"a token class must be one of brackets, .*; got vowels"):
        TokenText.of([b"a"]).is_class("vowels")


@pytest.mark.parametrize(("data", "offsets"), [(b"abc", [0, 2]), (b"abc", [1, 3]), (b"abc", [0, 3, 2, 3]), (b"", [])])
def test_offsets_that_do_not_fit_are_refused(data, offsets):
    with pytest.raises(UserError, match="token text must"):
        TokenText(np.frombuffer(data, np.uint8), np.array(offsets, dtype=np.int64))


def test_labels_are_visible_and_those_of_single_bytes_distinct():
    labels = [label(bytes([byte])) for byte in range(256)]
    assert len(set(labels)) == 256
    assert all(each.isprintable() and each.strip() for each in labels)
    assert [label(token) for token in (b"\n", b"A", b" the", "é\n".encode(), b"\xc3")] == [
        r"\n", "A", "␣the", r"é\n", r"\xc3"
    ]  # fmt: skip


def test_labels_of_a_row_name_what_has_no_text():
    labels = text_samples(2, 5, padding=1).labels(1)
    assert (labels[0], labels[-1]) == ("<bos>", "<pad>")


def test_a_token_without_text_is_special_and_so_is_an_id_that_has_none():
    text = TokenText.of([b"a b", b""])
    assert [text.label(token) for token in range(3)] == ["a␣b", "<special>", "<special>"]
