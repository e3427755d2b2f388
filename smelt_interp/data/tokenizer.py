"""The byte tokenizer: a token is a byte, and three more mark the beginning, the end and the padding."""

import json

import numpy as np
from numpy.typing import NDArray

from smelt_interp.errors import UserError

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
SPECIAL_NAMES = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}


def encode(text: str | bytes) -> NDArray[np.int32]:
    """The bytes of a text (UTF-8 for a `str`) as token ids 0..255; no special token is added. -> (T,)"""
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, dtype=np.uint8).astype(np.int32)


def decode_bytes(ids_T: NDArray[np.integer]) -> bytes:
    """The bytes that the ids stand for; special tokens stand for none. Raises UserError for an id outside 0..258."""
    ids_T = np.asarray(ids_T)
    if ids_T.size and (ids_T.min() < 0 or ids_T.max() >= VOCAB_SIZE):
        worst = int(ids_T.max()) if ids_T.max() >= VOCAB_SIZE else int(ids_T.min())
        raise UserError(f"token ids must be 0 to {VOCAB_SIZE - 1} (bytes, then bos, eos, pad); got {worst}")
    return ids_T[ids_T < BOS].astype(np.uint8).tobytes()


def decode(ids_T: NDArray[np.integer]) -> str:
    """The text that the ids stand for, without special tokens; bytes that are no UTF-8 become U+FFFD."""
    return decode_bytes(ids_T).decode(errors="replace")


def token_labels(ids_T: NDArray[np.integer]) -> tuple[str, ...]:
    """One visible label a token, for axes and tables: the character, `\\n`, `\\x1b`, `<bos>`; a space is `␣`."""
    return tuple(_LABELS[int(token)] for token in ids_T)


def _label(byte: int) -> str:
    if byte == ord(" "):
        return "␣"
    return chr(byte) if 32 < byte < 127 else repr(bytes([byte]))[2:-1]


_LABELS = (*(_label(byte) for byte in range(256)), *SPECIAL_NAMES.values())


def _visible_bytes() -> list[str]:
    """The printable character by which byte-level tokenizer files write each byte (the GPT-2 table).

    Bytes that print stand for themselves; the other 68, in order, take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def tokenizer_json() -> str:
    """The same tokenizer as a file of Hugging Face's `tokenizers`: byte-level, no merges, ids are byte values."""
    special = [
        {"id": token, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, name in SPECIAL_NAMES.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(_visible_bytes())},
                "merges": [],
            },
        },
        ensure_ascii=False,
        indent=1,
    )
