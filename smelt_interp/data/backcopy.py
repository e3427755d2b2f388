"""Bigram-backcopy text (arXiv:2410.13835): a Markov chain in which three trigger symbols copy the symbol before them.

Away from a trigger the next symbol depends on the present one alone, so an attention head that copies has nothing
to do there; heads of trained networks then park their attention on the first token. The chain is fixed: the same
transition matrix for every seed of the text.
"""

from bisect import bisect_right
from itertools import accumulate
from operator import truediv

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.marked_text import MarkedText, Row, Tokens, padded, tokens_of, with_bos
from smelt_interp.data.samples import Samples, document_id
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError

SYMBOLS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123@#$%"
"""The 60 symbols; `@`, `#` and `$` are the triggers."""
TRIGGERS = b"@#$"
TRIGGER_PROBABILITY = 0.05
"""Probability of each trigger after any symbol that is not one."""
DOMAIN = "backcopy"
_MATRIX_SEED = 241013835


def transition_matrix() -> NDArray[np.float64]:
    """p_SS[i, j] = probability of symbol j after symbol i, in the order of SYMBOLS; rows of triggers are zero.

    A row's weights on the 57 plain symbols are sixteenth powers of uniform numbers, so a few successors dominate.
    """
    uniform_SS = np.random.Generator(np.random.PCG64(_MATRIX_SEED)).random((len(SYMBOLS), len(SYMBOLS)))
    weight_SS = uniform_SS
    for _ in range(4):  # repeated squares: exact to the last bit on every machine
        weight_SS = weight_SS * weight_SS
    trigger_S = np.isin(np.frombuffer(SYMBOLS, np.uint8), np.frombuffer(TRIGGERS, np.uint8))
    weight_SS[:, trigger_S] = 0.0
    plain_probability = 1 - len(TRIGGERS) * TRIGGER_PROBABILITY
    p_SS: NDArray[np.float64] = weight_SS / weight_SS.sum(axis=1, keepdims=True) * plain_probability
    p_SS[:, trigger_S] = TRIGGER_PROBABILITY
    p_SS[trigger_S] = 0.0
    return p_SS


def _cumulative_rows() -> list[list[float]]:
    rows = [list(accumulate(row)) for row in transition_matrix().tolist()]
    return [list(map(truediv, row, [row[-1] or 1.0] * len(row))) for row in rows]


_CUMULATIVE = dict(zip(SYMBOLS, _cumulative_rows(), strict=True))
_PLAIN = bytes(symbol for symbol in SYMBOLS if symbol not in TRIGGERS)


def backcopy_row(uniform_T: list[float]) -> bytes:
    """One text, one symbol for each uniform number in [0, 1).

    The first symbol is uniform over the plain ones. No trigger follows a trigger, so what a trigger copies is plain.
    """
    row = bytearray([_PLAIN[int(uniform_T[0] * len(_PLAIN))]])
    for uniform in uniform_T[1:]:
        if row[-1] in TRIGGERS:
            row.append(row[-2])
        else:
            row.append(SYMBOLS[bisect_right(_CUMULATIVE[row[-1]], uniform)])
    return bytes(row)


def is_copied(ids_NT: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which tokens are the copy that a trigger right before them demands. (N, T) -> (N, T)"""
    copied_NT = np.zeros(ids_NT.shape, dtype=np.bool_)
    copied_NT[:, 1:] = np.isin(ids_NT[:, :-1], np.frombuffer(TRIGGERS, np.uint8))
    return copied_NT


def backcopy_rows(num: int, length: int, generator: np.random.Generator, tokenizer: Tokenizer) -> list[Row]:
    """`num` rows of `length` tokens, BOS first where the tokenizer has one; each is a document."""
    width = length - (tokenizer.bos_id is not None)
    rows = []
    for _ in range(num):
        uniform_T: list[float] = []
        ids_T = np.zeros(0, dtype=np.int32)
        while len(ids_T) < width:  # once where a token is a symbol
            uniform_T += generator.random(width).tolist()
            text = backcopy_row(uniform_T).decode()
            source = MarkedText(text=text, document=document_id(DOMAIN, text), domain=DOMAIN)
            ids_T, role_T = tokens_of(source, tokenizer)
        rows.append(Row(with_bos(Tokens(ids_T[:width], role_T[:width]), tokenizer), source))
    return rows


def backcopy_samples(num: int, *, length: int, seed: int, tokenizer: Tokenizer) -> Samples:
    """`num` rows of bigram-backcopy text of `length` tokens each.

    Raises UserError when `num` is below 1 or `length` below 2.
    """
    if num < 1 or length < 2:
        raise UserError(f"backcopy text must have at least 1 row of at least 2 tokens; got {num} of {length}")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, _MATRIX_SEED])))
    return padded(backcopy_rows(num, length, generator, tokenizer), tokenizer)
