"""Other people's tokenizers: a `tokenizer.json` of Hugging Face's `tokenizers`, as the protocol has it."""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from smelt_interp.data.token_text import TokenText
from smelt_interp.data.tokenizer import BYTES, Encoding, Tokenizer, is_byte_tokenizer, visible_bytes
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
LARGEST_FILE = 200_000_000
WORD_BOUNDARY = "▁"
"""How SentencePiece writes a space."""


class HuggingFaceTokenizer:
    """One `tokenizer.json`.

    A row begins with a BOS exactly when the tokenizer's own post-processor begins every text with a special token.
    """

    def __init__(self, text: str, *, eos_token: str | None = None, pad_token: str | None = None) -> None:
        """`text` is the file; the two names are of special tokens, which the file alone does not tell apart.

        Raises UserError for a file that `tokenizers` cannot read.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{TOKENIZER} must be a file of Hugging Face's tokenizers; got {error}") from None
        self._text = text
        self._names = {"eos_token": eos_token, "pad_token": pad_token}
        self._values = json.loads(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # their names in a text are text
        framed = self._encoded("a", special=True)
        special = framed.special_tokens_mask
        self.bos_id: int | None = framed.ids[0] if special and special[0] else None
        self.eos_id = self._tokenizer.token_to_id(eos_token) if eos_token else None
        if self.eos_id is None and special and special[-1]:
            self.eos_id = framed.ids[-1]
        self.pad_id = self._tokenizer.token_to_id(pad_token) if pad_token else None
        ids = [*self._tokenizer.get_vocab().values(), self.bos_id, self.eos_id]  # a BOS may be none of the vocabulary
        self.vocab_size = max((each for each in ids if each is not None), default=-1) + 1

    @cached_property
    def token_text(self) -> TokenText:
        """The bytes of each id, undone from how the file writes them; special tokens and gaps have none."""
        kinds = _kinds(self._values.get("decoder")) | _kinds(self._values.get("pre_tokenizer"))
        added = {
            each["id"]: "" if each["special"] else each["content"] for each in self._values.get("added_tokens", [])
        }
        byte_of = {character: byte for byte, character in enumerate(visible_bytes())}
        prefix = self._values["model"].get("continuing_subword_prefix") or ""
        suffix = self._values["model"].get("end_of_word_suffix") or ""

        def of(token: int, piece: str) -> bytes:
            if token in added:
                return str(added[token]).encode()
            if "ByteLevel" in kinds:
                return b"".join(bytes([byte_of[letter]]) if letter in byte_of else letter.encode() for letter in piece)
            if "ByteFallback" in kinds and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            whole = piece.removeprefix(prefix) if prefix else piece
            whole = whole.removesuffix(suffix) + " " if suffix and whole.endswith(suffix) else whole
            return whole.replace(WORD_BOUNDARY, " ").encode()

        texts = [b""] * self.vocab_size
        for piece, token in self._tokenizer.get_vocab().items():
            texts[token] = of(token, piece)
        return TokenText.of(texts)

    def encode(self, text: str) -> Encoding:
        """The tokens of a text with their characters. Raises UserError for half a character."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text must be Unicode; got half a character at {error.start}") from None
        found = self._encoded(text, special=False)
        offsets_T2 = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        return Encoding(np.array(found.ids, dtype=np.int32), offsets_T2[:, 0], offsets_T2[:, 1])

    def _encoded(self, text: str, *, special: bool) -> tokenizers.Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{TOKENIZER} must have a token for what it does not know; got {error}") from None

    def decode(self, ids_T: NDArray[np.integer]) -> str:
        """The text that the ids stand for, as the file's decoder puts it together."""
        text: str = self._tokenizer.decode(np.asarray(ids_T).tolist(), skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """The file as it was read."""
        return self._text

    def config_json(self) -> str:
        """The names of the special tokens, as a `tokenizer_config.json` has them."""
        return json.dumps({key: name for key, name in self._names.items() if name is not None}, indent=1) + "\n"


def _kinds(part: object) -> set[str]:
    """The types that a decoder or a pre-tokenizer is made of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("decoders", []), *part.get("pretokenizers", [])]
    return {str(part.get("type"))}.union(*map(_kinds, inner))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder: its `tokenizer.json`, with the names in `tokenizer_config.json` where there is one.

    Raises UserError for files that are missing, too large or no tokenizer.
    """
    text, values = _read_json(folder / TOKENIZER)
    if is_byte_tokenizer(values):
        return BYTES
    config: object = {}
    if (folder / TOKENIZER_CONFIG).exists():
        _, config = _read_json(folder / TOKENIZER_CONFIG)
    return HuggingFaceTokenizer(text, eos_token=_name(config, "eos_token"), pad_token=_name(config, "pad_token"))


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Name and text of each file from which `read_tokenizer` reads the same tokenizer."""
    files = {TOKENIZER: tokenizer.to_json()}
    return files | ({TOKENIZER_CONFIG: tokenizer.config_json()} if isinstance(tokenizer, HuggingFaceTokenizer) else {})


def _read_json(path: Path) -> tuple[str, object]:
    try:
        text = read_input(path, "a tokenizer file", LARGEST_FILE).decode()
        return text, json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} must hold JSON; {error}") from None


def _name(config: object, key: str) -> str | None:
    """The name of a special token, which files write as text or as a record with its `content`."""
    found = config.get(key) if isinstance(config, dict) else None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None
