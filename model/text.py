"""Text to tokens and back, with the names by which transformer-lens's tools ask for it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smelt_interp.data.token_text import label
from smelt_interp.data.tokenizer import BOS, BYTES
from smelt_interp.errors import UserError


def to_tokens(text: str | Sequence[str], prepend_bos: bool = True) -> Tensor:
    """Tokens (B, T) of one text or of several. Raises `UserError` when they differ in length or are empty."""
    texts = [text] if isinstance(text, str) else list(text)
    rows = [np.concatenate(([BOS] if prepend_bos else [], BYTES.encode(each).ids_T)).astype(np.int64) for each in texts]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise UserError(f"texts in one batch must have the same number of bytes; got {lengths}; pad or run them apart")
    if lengths == [0]:
        raise UserError("a text must hold at least one byte; got an empty one")
    return torch.from_numpy(np.stack(rows))


def to_single_token(text: str) -> int:
    """The id of a text that is one byte. Raises `UserError` for any other."""
    ids_T = BYTES.encode(text).ids_T
    if len(ids_T) != 1:
        raise UserError(f"a single token must be one byte; got {text!r} of {len(ids_T)}")
    return int(ids_T[0])


def to_string(tokens_T: Tensor | Sequence[int]) -> str:
    """The text of one row of tokens, without special tokens."""
    return BYTES.decode(np.asarray(torch.as_tensor(tokens_T).cpu()))


def to_str_tokens(text: str, prepend_bos: bool = True) -> list[str]:
    """A visible label for each token of a text."""
    labels = [label(BYTES.token_text[token]) for token in BYTES.encode(text).ids_T.tolist()]
    return ["<bos>", *labels] if prepend_bos else labels
