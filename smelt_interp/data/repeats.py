"""Repeated random tokens: a run of different ones twice, the second time predictable from the first alone."""

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.marked_text import MarkedText, Row, Tokens, padded, with_bos
from smelt_interp.data.samples import Role, Samples, document_id
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError

DOMAIN = "repeats"


def drawn_from(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The ids that are drawn: tokens of printable ASCII that are more than white space."""
    texts = (tokenizer.token_text[token] for token in range(len(tokenizer.token_text)))
    return np.array([token for token, text in enumerate(texts) if text.strip() and _prints(text)], np.int32)


def _prints(text: bytes) -> bool:
    return text.isascii() and text.decode("ascii").isprintable()


def repeated_samples(num: int, *, length: int, seed: int, tokenizer: Tokenizer) -> Samples:
    """`num` rows: BOS where the tokenizer has one, then a run of different random tokens, twice; as many as fit into
    `length`, at most one of each. A row depends on the seed and its number alone.

    Raises UserError when a row has no room for two tokens twice.
    """
    ids_V = drawn_from(tokenizer)
    width = min((length - (tokenizer.bos_id is not None)) // 2, len(ids_V))
    if num < 1 or width < 2:
        raise UserError(f"repeats must have at least 1 row of 5 tokens or more; got {num} of {length}")
    rows = []
    for row in range(num):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, row])))
        ids_T = np.tile(generator.choice(ids_V, width, replace=False), 2)
        text = MarkedText(text=tokenizer.decode(ids_T), document=document_id(DOMAIN, f"{seed} {row}"), domain=DOMAIN)
        role_T = np.full(len(ids_T), Role.TEXT, np.uint8)
        rows.append(Row(with_bos(Tokens(ids_T, role_T), tokenizer), text))
    return padded(rows, tokenizer)
