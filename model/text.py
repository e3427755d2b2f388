"""Text to tokens and back by any tokenizer, with the names by which transformer-lens's tools ask for it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smelt_interp.data.token_text import label
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError


def to_tokens(tokenizer: Tokenizer, text: str | Sequence[str], prepend_bos: bool) -> Tensor:
    """Tokens (B, T) of one text or of several, behind a BOS where asked for and the tokenizer has one. Raises
    `UserError` when they differ in length or are empty."""
    texts = [text] if isinstance(text, str) else list(text)
    rows = [[*_bos(tokenizer, prepend_bos), *tokenizer.encode(each).ids_T.tolist()] for each in texts]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise UserError(f"texts in one batch must have the same number of tokens; got {lengths}; pad or run them apart")
    if lengths == [0]:
        raise UserError("a text must hold at least one token; got an empty one")
    return torch.tensor(rows)


def to_single_token(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is one token. Raises `UserError` for any other."""
    ids_T = tokenizer.encode(text).ids_T
    if len(ids_T) != 1:
        raise UserError(f"a single token must be one token; got {text!r} of {len(ids_T)}")
    return int(ids_T[0])


def to_string(tokenizer: Tokenizer, tokens_T: Tensor | Sequence[int]) -> str:
    """The text of one row of tokens, without special tokens. Raises `UserError` for anything else."""
    ids_T = np.asarray(torch.as_tensor(tokens_T).cpu())
    if ids_T.ndim != 1:
        raise UserError(f"tokens to write as text must be one row; got {ids_T.ndim} axes: give one row at a time")
    return tokenizer.decode(ids_T)


def to_str_tokens(tokenizer: Tokenizer, text: str, prepend_bos: bool) -> list[str]:
    """A visible label for each token of a text."""
    bos = ["<bos>"] * len(_bos(tokenizer, prepend_bos))
    return bos + [label(tokenizer.token_text[token]) for token in tokenizer.encode(text).ids_T.tolist()]


def _bos(tokenizer: Tokenizer, prepend_bos: bool) -> list[int]:
    return [tokenizer.bos_id] if prepend_bos and tokenizer.bos_id is not None else []
