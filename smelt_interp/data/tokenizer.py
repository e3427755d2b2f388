"""What a tokenizer is, and the byte tokenizer: a token is a byte, and three more mark beginning, end and padding.

Tokenizers of Hugging Face's `tokenizers` are in `model.tokenizers`.
"""

import json
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.token_text import TokenText
from smelt_interp.errors import UserError

BOS, EOS, PAD = 256, 257, 258
"""Ids of the byte tokenizer's special tokens."""
SPECIAL_NAMES = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}


class Encoding(NamedTuple):
    """The tokens of a text, no special token among them."""

    ids_T: NDArray[np.int32]
    start_T: NDArray[np.int64]
    """The character, counted from 0, with which each token begins; tokens that share a character begin with it."""
    stop_T: NDArray[np.int64]
    """The character after the last that each token has a part of."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token with which every row begins; None where rows begin with their text."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document, where there is one."""
        ...

    @property
    def pad_id(self) -> int | None:
        """The token that fills rows up, where there is one."""
        ...

    @property
    def token_text(self) -> TokenText:
        """The bytes of each id of the vocabulary; special tokens have none."""
        ...

    def encode(self, text: str) -> Encoding:
        """The tokens of a text; no special token is added, and the name of one in the text is text."""
        ...

    def decode(self, ids_T: NDArray[np.integer]) -> str:
        """The text that the ids stand for, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def to_json(self) -> str:
        """The same tokenizer as a `tokenizer.json` of Hugging Face's `tokenizers`."""
        ...


def padding_id(tokenizer: Tokenizer) -> int:
    """The token that fills rows up: padding, or the end of a document, or 0; masks leave it out everywhere."""
    return next((each for each in (tokenizer.pad_id, tokenizer.eos_id) if each is not None), 0)


def text_of(tokenizer: Tokenizer, ids_NT: NDArray[np.integer], length_N: NDArray[np.integer]) -> TokenText:
    """Every token's own bytes; what lies beyond a row's length has none. Raises UserError for an unknown id."""
    ids_NT = np.asarray(ids_NT)
    if ids_NT.size and not 0 <= ids_NT.min() <= ids_NT.max() < tokenizer.vocab_size:
        worst = int(ids_NT.min()) if ids_NT.min() < 0 else int(ids_NT.max())
        raise UserError(f"token ids must be 0 to {tokenizer.vocab_size - 1}; got {worst}")
    empty = TokenText(
        tokenizer.token_text.data, np.append(tokenizer.token_text.offsets, tokenizer.token_text.offsets[-1])
    )
    real_NT = np.arange(ids_NT.shape[1]) < np.asarray(length_N)[:, None]
    return empty.take(np.where(real_NT, ids_NT, len(empty) - 1).ravel())


class ByteTokenizer:
    """The bytes of a text in UTF-8 are its tokens, ids 0 to 255; 256, 257 and 258 are bos, eos and pad."""

    vocab_size = 259
    bos_id: int | None = BOS
    eos_id: int | None = EOS
    pad_id: int | None = PAD
    token_text = TokenText.of([*(bytes([byte]) for byte in range(256)), b"", b"", b""])

    def encode(self, text: str) -> Encoding:
        """The bytes of the text; those of one character share its place. Raises UserError for half a character."""
        try:
            data = np.frombuffer(text.encode(), dtype=np.uint8)
        except UnicodeEncodeError as error:
            found = ascii(text[error.start])
            raise UserError(f"text must be Unicode; got a lone surrogate {found} at character {error.start}") from None
        continues_T = (data & 0xC0) == 0x80  # every byte of a character in UTF-8 but its first is 10xxxxxx
        stop_T = np.cumsum(~continues_T, dtype=np.int64)
        return Encoding(data.astype(np.int32), stop_T - 1, stop_T)

    def decode_bytes(self, ids_T: NDArray[np.integer]) -> bytes:
        """The bytes that the ids stand for; special tokens stand for none. Raises UserError for an unknown id."""
        ids_T = np.asarray(ids_T)
        return text_of(self, ids_T[None], np.array([len(ids_T)])).data.tobytes()

    def decode(self, ids_T: NDArray[np.integer]) -> str:
        """The text that the ids stand for; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids_T).decode(errors="replace")

    def to_json(self) -> str:
        """A byte-level file without merges. Special tokens are in its vocabulary alone, so no text gives one."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        # Decoding a special token gives nothing: its name is replaced while tokens are still apart.
        special = {"type": "Replace", "pattern": {"Regex": "^<(bos|eos|pad)>$"}, "content": ""}
        vocabulary = {character: byte for byte, character in enumerate(visible_bytes())}
        return json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": byte_level,
                "post_processor": None,
                "decoder": {"type": "Sequence", "decoders": [special, byte_level]},
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": False,
                    "byte_fallback": False,
                    "ignore_merges": False,
                    "vocab": vocabulary | {name: token for token, name in SPECIAL_NAMES.items()},
                    "merges": [],
                },
            },
            ensure_ascii=False,
            indent=1,
        )


BYTES = ByteTokenizer()


def is_byte_tokenizer(values: object) -> bool:
    """Whether these are the values of a `tokenizer.json` of the byte tokenizer, as it is written now or was at first,
    when special tokens were listed as added ones and their names in a text became them."""
    now = json.loads(BYTES.to_json())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": token, "content": name, "special": True} | flags for token, name in SPECIAL_NAMES.items()]
    vocabulary = {name: token for name, token in now["model"]["vocab"].items() if token not in SPECIAL_NAMES}
    first = {"added_tokens": added, "decoder": now["pre_tokenizer"], "model": now["model"] | {"vocab": vocabulary}}
    return values in (now, now | first)


def visible_bytes() -> list[str]:
    """The printable character by which byte-level tokenizer files write each byte (the GPT-2 table).

    Bytes that print stand for themselves; the other 68, in order, take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]
