"""Hugging Face tokenizers behind the project's protocol: four kinds, each against what the library itself says."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.tokenizers import HuggingFaceTokenizer, read_tokenizer
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.dyck_scores import floors, queries
from smelt_interp.data.marked_text import MarkedText, Row, Span, padded, tokens_of
from smelt_interp.data.mixture import MixtureOptions, TrainingMixture
from smelt_interp.data.samples import Role, token_class
from smelt_interp.data.tokenizer import BYTES, padding_id
from smelt_interp.errors import UserError
from tests.support.bpe import TEXT, byte_level_bpe


def with_bos() -> Tokenizer:
    """The same behind a BOS, by template."""
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens(["<s>"])
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """As Llama's: spaces are written as a letter, and unknown characters fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    replace, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), fuse])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=900, special_tokens=special))
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [each for each in values["added_tokens"] if each["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(values))


def word_piece() -> Tokenizer:
    """As BERT's: [CLS] and [SEP] around, pieces inside a word marked."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=600, special_tokens=special))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


BYTE_LEVEL = HuggingFaceTokenizer(byte_level_bpe().to_str(), eos_token="<|end|>")
BEHIND_BOS = HuggingFaceTokenizer(with_bos().to_str())
PIECES = HuggingFaceTokenizer(sentencepiece_bpe().to_str())
WORDS = HuggingFaceTokenizer(word_piece().to_str(), pad_token="[PAD]")


def text_of_ids(tokenizer: HuggingFaceTokenizer, text: str) -> bytes:
    return b"".join(tokenizer.token_text[token] for token in tokenizer.encode(text).ids_T.tolist())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BEHIND_BOS, PIECES], ids=["byte level", "bos", "pieces"])
@settings(max_examples=60, deadline=None)
@given(text=st.text() | st.sampled_from([TEXT[:400], "<s> <|end|> <unk>", "日本 ( [ \n\n 12"]))
def test_the_bytes_of_tokens_laid_end_to_end_are_the_text(tokenizer, text):
    """Names of special tokens are text too."""
    assert text_of_ids(tokenizer, text) == text.encode()
    assert tokenizer.decode(tokenizer.encode(text).ids_T) == text


def test_pieces_of_words_lose_their_marks():
    text = "in the beginning"
    found = [WORDS.token_text[token].decode() for token in WORDS.encode(text).ids_T.tolist()]
    assert "".join(found) == text.replace(" ", "")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BEHIND_BOS, PIECES], ids=["byte level", "bos", "pieces"])
def test_a_token_says_which_characters_it_is_of(tokenizer):
    text = "Grüße, and 日本 (\n"
    encoding = tokenizer.encode(text)
    for token, start, stop in zip(*(array.tolist() for array in encoding), strict=True):
        own = tokenizer.token_text[token]
        assert own.strip() in text[start:stop].encode(), (own, text[start:stop])


def test_special_tokens_are_those_that_the_tokenizer_itself_puts_around_a_text():
    library = Tokenizer.from_str(WORDS.to_json())
    assert (WORDS.bos_id, WORDS.eos_id, WORDS.pad_id) == tuple(map(library.token_to_id, ("[CLS]", "[SEP]", "[PAD]")))
    assert (BYTE_LEVEL.bos_id, BYTE_LEVEL.eos_id, BYTE_LEVEL.pad_id) == (None, 0, None)
    assert padding_id(BYTE_LEVEL) == 0
    assert BEHIND_BOS.bos_id == BEHIND_BOS.vocab_size - 1
    assert BEHIND_BOS.token_text[BEHIND_BOS.bos_id] == b""


def test_a_token_over_two_roles_has_that_of_its_last_character():
    """` )` after `Output:` is of the answer though its space is of the question."""
    text = "Output: )\n"
    marked = MarkedText(text=text, spans=(Span(0, 8, Role.QUERY), Span(8, 10, Role.ANSWER)), document=1, domain="dyck")
    samples = padded([Row(tokens_of(marked, BYTE_LEVEL), marked)], BYTE_LEVEL)
    tokens = samples.row_text(0)
    answer = [token for token, role in zip(tokens, samples.role_NT[0].tolist(), strict=True) if role == Role.ANSWER]
    assert b" )" in tokens
    assert b"".join(answer) == b" )\n"


@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BEHIND_BOS, PIECES], ids=["byte level", "bos", "pieces"])
def test_episodes_ask_the_same_whatever_the_tokenizer(tokenizer, rendering):
    options = DyckOptions(rendering=rendering, shots=(3,))
    ours, theirs = (dyck_samples(options, 30, seed=0, length=600, tokenizer=each) for each in (BYTES, tokenizer))
    assert queries(ours) == queries(theirs)
    assert np.array_equal(ours.episode_N, theirs.episode_N)
    assert np.array_equal(ours.document_N, theirs.document_N)
    assert theirs.ids_NT.shape[1] <= ours.ids_NT.shape[1]
    for name, right_N in floors(ours).items():
        assert np.array_equal(right_N, floors(theirs)[name])
    for row in range(30):
        assert b"".join(ours.row_text(row)) == b"".join(theirs.row_text(row))


def test_rows_begin_with_bos_only_where_the_tokenizer_has_one():
    options = DataOptions(data=("code", "backcopy", "dyck"), samples=4, length=60, shots=(1,))
    plain, behind = (load_samples(options, 60, each) for each in (BYTE_LEVEL, BEHIND_BOS))
    assert (behind.ids_NT[:, 0] == BEHIND_BOS.bos_id).all()
    assert (behind.role_NT[:, 0] == Role.BOS).all()
    assert not (plain.role_NT == Role.BOS).any()
    assert (plain.segment_start_NT == 0).all()
    assert token_class(plain, "letters")[:4].any()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BEHIND_BOS], ids=["byte level", "bos"])
def test_the_training_mixture_fills_rows_with_any_tokenizer(tokenizer):
    options = MixtureOptions(context=50, source="excerpts", code=0, prose=4, math=0)
    batch = TrainingMixture(options, tokenizer).batch(0)
    assert batch.ids_NT.shape == (12, 50)
    assert (batch.length_N == 50).all()
    for row in range(5):
        text = b"".join(batch.row_text(row))
        assert text.count(b"\n") == batch.episode_N["shots"][row]


# Files


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BYTES.to_json())
    assert read_tokenizer(tmp_path) is BYTES
    (tmp_path / "tokenizer.json").write_text(BYTE_LEVEL.to_json())
    assert read_tokenizer(tmp_path).eos_id is None
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "pad_token": None})
    )
    found = read_tokenizer(tmp_path)
    assert (found.eos_id, found.pad_id) == (0, None)
    assert found.to_json() == BYTE_LEVEL.to_json()
    assert found.encode("( [").ids_T.tolist() == BYTE_LEVEL.encode("( [").ids_T.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tokenizer.json must hold JSON; "),
        ("[" * 100_000, r"tokenizer.json must hold JSON; "),
        ("{}", r"tokenizer.json must be a file of Hugging Face's tokenizers; got "),
        ('{"model": {"type": "BPE"}}', r"must be a file of Hugging Face's tokenizers; got "),
        (
            '{"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}}',
            r"tokenizer.json must have a token for what it does not know; got ",
        ),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_tokenizer(tmp_path)


def test_a_file_need_not_list_added_tokens_and_its_bos_counts_in_the_vocabulary() -> None:
    values = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    assert HuggingFaceTokenizer(json.dumps(values)).token_text[1] == b"b"
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    found = HuggingFaceTokenizer(tokenizer.to_str())
    assert (found.bos_id, found.vocab_size) == (7, 8)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a tokenizer file must exist; got .*tokenizer.json"):
        read_tokenizer(tmp_path)


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(UserError, match="text must be Unicode; got half a character at 2"):
        BYTE_LEVEL.encode("ab\ud800")
