"""Scores of answers to Dyck episodes, and what shortcuts that keep no stack would score on the same episodes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.dyck import CLOSERS, OPENERS, Rendering
from smelt_interp.data.samples import Role, Samples, token_class
from smelt_interp.errors import UserError


@dataclass(frozen=True, slots=True)
class Query:
    """What an episode asks: the brackets of its query and of the right answer, without separators."""

    prefix: str
    answer: str


def queries(samples: Samples) -> tuple[Query, ...]:
    """The query of each row. Raises UserError for a row that asks nothing."""

    def brackets(row: int, role: Role) -> str:
        tokens = zip(samples.row_text(row), samples.role_NT[row].tolist(), strict=True)
        text = b"".join(token for token, each in tokens if each == role).decode(errors="replace")
        return "".join(character for character in text if character in OPENERS + CLOSERS)

    found = tuple(Query(brackets(row, Role.QUERY), brackets(row, Role.ANSWER)) for row in range(len(samples)))
    for row, query in enumerate(found):
        if not (query.prefix and query.answer):
            raise UserError(f"rows to score must be Dyck episodes with a query and its answer; got row {row} without")
    return found


def answer_start(samples: Samples) -> NDArray[np.intp]:
    """Position of the first answer token of each row: the prompt for generating is what stands before it. -> (N,)"""
    queries(samples)
    start_N: NDArray[np.intp] = np.argmax(samples.role_NT == Role.ANSWER, axis=1)
    return start_N


def closers_in(text: str, rendering: Rendering) -> list[str]:
    """The answer that a text gives: stripped, then split on white space (`full`) or into characters (`compact`).

    Nothing else is dropped: `} ]` and `] }` stay different, and so do `)` and `).`.
    """
    return text.split() if rendering == "full" else list(text.strip())


def exact_match(generated: str, query: Query, rendering: Rendering) -> bool:
    """Whether generated text, cut at the newline that ends an answer, is the right closers in the right order."""
    return closers_in(generated, rendering) == list(query.answer)


def first_closer(generated: str, query: Query, rendering: Rendering) -> bool:
    """Whether generated text begins with the right closer."""
    return closers_in(generated, rendering)[:1] == [query.answer[0]]


def _answer_tokens(samples: Samples, newline: bool) -> NDArray[np.bool_]:
    """Mask of the answer tokens of each row, with or without the newline that closes it. -> (N, T)"""
    answer_NT: NDArray[np.bool_] = samples.role_NT == Role.ANSWER
    return answer_NT if newline else answer_NT & ~token_class(samples, "newline")


def teacher_forced(samples: Samples, argmax_NT: NDArray[np.integer], *, newline: bool) -> NDArray[np.bool_]:
    """Whether each answer token of a row is the most likely one, given the right tokens before it. -> (N,)

    argmax_NT[n, t] = most likely token after ids_NT[n, :t + 1]. Without the newline the score gives the answer's
    length away; with it, the score is the exact match of greedy generation, found without generating.
    """
    queries(samples)
    wrong_NT = _answer_tokens(samples, newline)[:, 1:] & (argmax_NT[:, :-1] != samples.ids_NT[:, 1:])
    right_N: NDArray[np.bool_] = np.logical_not(np.any(wrong_NT, axis=1))
    return right_N


def teacher_forced_first_closer(samples: Samples, argmax_NT: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether the first answer token of each row is the most likely one after its prompt. -> (N,)"""
    row_N, start_N = np.arange(len(samples)), answer_start(samples)
    right_N: NDArray[np.bool_] = argmax_NT[row_N, start_N - 1] == samples.ids_NT[row_N, start_N]
    return right_N


def answer_loss(samples: Samples, logprob_NT: NDArray[np.floating]) -> NDArray[np.float64]:
    """Mean negative log-likelihood, in nats a token, of each row's answer, newline included. -> (N,)

    logprob_NT[n, t] = log p(ids_NT[n, t + 1] | ids_NT[n, :t + 1]).
    """
    queries(samples)
    answer_NT = _answer_tokens(samples, newline=True)[:, 1:]
    total_N = -np.where(answer_NT, logprob_NT[:, :-1].astype(np.float64), 0.0).sum(axis=1)
    loss_N: NDArray[np.float64] = total_N / answer_NT.sum(axis=1)
    return loss_N


def pairing_of(query: Query) -> dict[str, str]:
    """The closer of each opener of a query, read from its prefix and right answer: every opener is closed in them."""
    closer_of: dict[str, str] = {}
    stack: list[str] = []
    wrong = False
    for bracket in query.prefix + query.answer:
        if bracket in OPENERS:
            stack.append(bracket)
        else:
            wrong |= not stack or closer_of.setdefault(stack.pop(), bracket) != bracket
    if wrong or stack or len(set(closer_of.values())) < len(closer_of):
        raise UserError(f"a query's answer must close every opener, last first; got {query.prefix} {query.answer}")
    return closer_of


def _constant(query: Query, closer_of: dict[str, str]) -> str:
    return CLOSERS[0]


def _last_openers(query: Query, closer_of: dict[str, str]) -> str:
    openers = [bracket for bracket in query.prefix if bracket in OPENERS]
    return "".join(closer_of[opener] for opener in reversed(openers[-len(query.answer) :]))


def _outermost_openers(query: Query, closer_of: dict[str, str]) -> str:
    openers = [bracket for bracket in query.prefix if bracket in OPENERS]
    return "".join(closer_of[opener] for opener in reversed(openers[: len(query.answer)]))


def _counters(query: Query, closer_of: dict[str, str]) -> str:
    opener_of = {closer: opener for opener, closer in closer_of.items()}
    num_open = Counter(bracket for bracket in query.prefix if bracket in OPENERS)
    num_open.subtract(opener_of[bracket] for bracket in query.prefix if bracket in CLOSERS)
    latest_first = sorted(num_open, key=query.prefix.rindex, reverse=True)
    return "".join(closer_of[opener] * num_open[opener] for opener in latest_first)


SHORTCUTS: dict[str, Callable[[Query, dict[str, str]], str]] = {
    "constant": _constant,
    "last openers": _last_openers,
    "outermost openers": _outermost_openers,
    "counters": _counters,
}
"""What each answers to a query whose answer has n closers:

constant            `)`, whatever is asked
last openers        the closers of the last n openers, latest first, closed already or not
outermost openers   the closers of the first n openers, latest first
counters            as many closers of each type as are open, the type opened last coming first

All but the constant know n and the episode's pairing, so where closers are permuted their floors are for a reader
who has the pairing from the demonstrations and lacks only the stack.
"""


def floors(samples: Samples) -> dict[str, NDArray[np.bool_]]:
    """Whether each shortcut answers each row exactly right; a floor is the mean. -> name: (N,)"""
    asked = [(query, pairing_of(query)) for query in queries(samples)]
    return {
        name: np.array([shortcut(query, closer_of) == query.answer for query, closer_of in asked])
        for name, shortcut in SHORTCUTS.items()
    }
