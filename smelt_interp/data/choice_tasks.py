"""Small generated tasks whose floors are known: copying, recall by key, bracket depth, sums modulo 10.

An item is a line, question and answer with `=` between them:

    copy          kqzt=kqzt             `size` different letters, to be repeated
    recall        a3 k7 q1 k=7          `size` pairs of letter and digit, all different; the digit of the last letter
    depth         (.(.)(..=2            how many of the brackets are open; 1 to `size`. As many `)` as 0 to `size`, all
                                        numbers equally likely; dots make every question 3 * `size` long
    arithmetic    7+5+9=1               the sum of `size` digits modulo 10

Each stands behind `shots` items of its task, none with its question. The newline that ends an answer is part of it.
Two forms ask the same items: `completion` has one row an item, and the answer must be generated exactly; `choice` has a
row for each of `choices` candidates, and the right one must be the likeliest. Candidates are as long as each other: the
letters in other orders, other digits of the same question, other numbers.

A choice that does not depend on the question is right once in `choices`, whatever it prefers: the candidates of an item
are drawn so that each is as often the right one. Item i depends on the seed and i alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import factorial
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from smelt_interp.data.dyck import uniform_stream, up_probability
from smelt_interp.data.marked_text import MarkedText, Row, joined, padded, tokens_of, with_bos
from smelt_interp.data.samples import Role, Samples, document_id
from smelt_interp.data.tokenizer import Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.validation import validated

Task = Literal["copy", "recall", "depth", "arithmetic"]
Form = Literal["choice", "completion"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"


@validated
class TaskOptions:
    """Which items."""

    task: Task = "copy"
    form: Form = "choice"
    shots: Annotated[int, Field(ge=0, le=1000)] = 4
    """Items of the task before the one that is asked."""
    size: Annotated[int, Field(ge=2, le=9)] = 4
    """Letters to copy, pairs to recall from, deepest nesting, or digits to add."""
    choices: Annotated[int, Field(ge=2, le=9)] = 4
    """Candidates of an item."""

    def __post_init__(self) -> None:
        most = {"copy": factorial(self.size), "recall": self.size, "depth": self.size, "arithmetic": len(DIGITS)}
        if self.form == "choice" and self.choices > most[self.task]:
            raise UserError(
                f"choices must be at most {most[self.task]} for {self.task} of size {self.size}; got {self.choices}"
            )


@dataclass(frozen=True, slots=True)
class Item:
    """One question, its answer, and what may stand in the answer's place."""

    question: str
    answer: str
    others: tuple[str, ...]
    """Every other answer that a candidate may be; of `copy` as many orders as are asked for."""


class TaskSet(NamedTuple):
    """Rows that ask items."""

    options: TaskOptions
    items: tuple[Item, ...]
    candidates: tuple[tuple[str, ...], ...]
    """Of each item, in the order of its rows; the answer alone for completions."""
    samples: Samples
    item_N: NDArray[np.intp]
    """The item that each row asks, ascending."""
    right_N: NDArray[np.bool_]
    """Whether a row ends with its item's answer."""


def shuffled(uniform: Iterator[float], letters: str) -> str:
    """The letters in a uniformly random order."""
    order = list(letters)
    for last in range(len(order) - 1, 0, -1):
        other = int(next(uniform) * (last + 1))
        order[last], order[other] = order[other], order[last]
    return "".join(order)


def _copy(uniform: Iterator[float], options: TaskOptions) -> Item:
    text = shuffled(uniform, LETTERS)[: options.size]
    others: list[str] = []
    while len(others) < min(options.choices, factorial(options.size)) - 1:
        order = shuffled(uniform, text)
        if order != text and order not in others:
            others.append(order)
    return Item(text, text, tuple(others))


def _recall(uniform: Iterator[float], options: TaskOptions) -> Item:
    keys, values = shuffled(uniform, LETTERS)[: options.size], shuffled(uniform, DIGITS)[: options.size]
    asked = int(next(uniform) * options.size)
    pairs = " ".join(key + value for key, value in zip(keys, values, strict=True))
    return Item(f"{pairs} {keys[asked]}", values[asked], tuple(values.replace(values[asked], "")))


def _depth(uniform: Iterator[float], options: TaskOptions) -> Item:
    size = options.size
    depth, downs = 1 + int(next(uniform) * size), int(next(uniform) * (size + 1))
    ups = depth + downs
    dots = 3 * size - ups - downs
    height, written = 0, []
    while ups or downs or dots:
        if next(uniform) * (ups + downs + dots) < dots:
            written.append(".")
            dots -= 1
        elif next(uniform) < up_probability(height, ups, downs):
            written.append("(")
            ups, height = ups - 1, height + 1
        else:
            written.append(")")
            downs, height = downs - 1, height - 1
    return Item("".join(written), str(depth), tuple(str(other) for other in range(1, size + 1) if other != depth))


def _arithmetic(uniform: Iterator[float], options: TaskOptions) -> Item:
    digits = [int(next(uniform) * 10) for _ in range(options.size)]
    answer = str(sum(digits) % 10)
    return Item("+".join(map(str, digits)), answer, tuple(DIGITS.replace(answer, "")))


_DRAW: dict[Task, Callable[[Iterator[float], TaskOptions], Item]] = {
    "copy": _copy,
    "recall": _recall,
    "depth": _depth,
    "arithmetic": _arithmetic,
}


def task_samples(options: TaskOptions, num: int, *, seed: int, length: int, tokenizer: Tokenizer) -> TaskSet:
    """`num` items; the rows of one are one document. Raises UserError when `num` is below 1 and for rows that do not
    fit `length` tokens."""
    if num < 1:
        raise UserError(f"number of items must be at least 1; got {num}")
    items, candidates, rows, item_N = [], [], [], []
    for number in range(num):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))
        uniform = uniform_stream(generator)
        item = _DRAW[options.task](uniform, options)
        # Candidates are drawn before the demonstrations, so that the same ones are asked at every number of shots.
        wrong = _some(uniform, item.others, options.choices - 1) if options.form == "choice" else ()
        asked = _some(uniform, (item.answer, *wrong), 1 + len(wrong))
        shown: list[tuple[str, Role]] = []
        while len(shown) < 2 * options.shots:
            other = _DRAW[options.task](uniform, options)
            if other.question != item.question:
                shown.append((f"{other.question}=", Role.DEMONSTRATION_INPUT))
                shown.append((f"{other.answer}\n", Role.DEMONSTRATION_ANSWER))
        # A row a candidate, or one for the answer alone.
        document = document_id(options.task, f"{seed} {number} {item.question}")
        for candidate in asked:
            text, spans = joined([*shown, (f"{item.question}=", Role.QUERY), (f"{candidate}\n", Role.ANSWER)])
            source = MarkedText(text=text, spans=spans, document=document, domain=options.task)
            tokens = with_bos(tokens_of(source, tokenizer), tokenizer)
            if len(tokens.ids_T) > length:
                raise UserError(
                    f"rows of {options.task} must have at most {length} tokens; got {len(tokens.ids_T)}: lower shots "
                    "or size"
                )
            rows.append(Row(tokens, source))
            item_N.append(number)
        items.append(item)
        candidates.append(asked)
    right = [each == item.answer for item, asked in zip(items, candidates, strict=True) for each in asked]
    return TaskSet(options, tuple(items), tuple(candidates), padded(rows, tokenizer), np.array(item_N), np.array(right))


def _some(uniform: Iterator[float], values: tuple[str, ...], num: int) -> tuple[str, ...]:
    """`num` of the values without replacement, in a random order."""
    left = list(values)
    return tuple(left.pop(int(next(uniform) * len(left))) for _ in range(num))


def some_items(tasks: TaskSet, which_I: NDArray[np.integer]) -> TaskSet:
    """These items alone, in this order, with all rows of each."""
    rows_I = [np.flatnonzero(tasks.item_N == item) for item in which_I]
    rows = np.concatenate(rows_I)
    return tasks._replace(
        items=tuple(tasks.items[item] for item in which_I),
        candidates=tuple(tasks.candidates[item] for item in which_I),
        samples=tasks.samples.rows(rows),
        item_N=np.repeat(np.arange(len(rows_I)), [len(each) for each in rows_I]),
        right_N=tasks.right_N[rows],
    )


def answer_logprob(tasks: TaskSet, logprob_NT: NDArray[np.floating]) -> NDArray[np.float64]:
    """The log-probability of each row's whole answer. -> (N,)

    logprob_NT[n, t] = log p(ids_NT[n, t + 1] | ids_NT[n, :t + 1]).
    """
    answer_NT = tasks.samples.role_NT[:, 1:] == Role.ANSWER
    score_N: NDArray[np.float64] = np.where(answer_NT, logprob_NT[:, :-1].astype(np.float64), 0.0).sum(axis=1)
    return score_N


def answer_bytes(tasks: TaskSet) -> NDArray[np.int64]:
    """The bytes of each row's answer without its newline, which `acc_norm` divides by. -> (N,)"""
    return np.array([len(candidate) for asked in tasks.candidates for candidate in asked])


def right_choices(tasks: TaskSet, score_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Whether the candidate of the highest score is the right one of each item; a tie counts its share. -> (items,)"""
    best_I = np.full(len(tasks.items), -np.inf)
    np.maximum.at(best_I, tasks.item_N, score_N)
    first_N = score_N == best_I[tasks.item_N]
    right_I: NDArray[np.float64] = np.bincount(tasks.item_N, first_N & tasks.right_N) / np.bincount(
        tasks.item_N, first_N
    )
    return right_I


def right_completions(tasks: TaskSet, argmax_NT: NDArray[np.integer]) -> NDArray[np.float64]:
    """Whether every token of an item's answer, its newline included, is the likeliest, which is the exact match of
    greedy generation. -> (items,)"""
    answer_NT = tasks.samples.role_NT[:, 1:] == Role.ANSWER
    wrong_N = (answer_NT & (argmax_NT[:, :-1] != tasks.samples.ids_NT[:, 1:])).any(axis=1)
    right_I: NDArray[np.float64] = np.bincount(tasks.item_N, ~wrong_N & tasks.right_N).astype(np.float64)
    return right_I


def _constant(item: Item, options: TaskOptions) -> str:
    return {"copy": LETTERS[: options.size], "recall": "5", "depth": "1", "arithmetic": "5"}[options.task]


SHORTCUTS: dict[Task, dict[str, Callable[[Item, TaskOptions], str]]] = {
    "copy": {"constant": _constant, "reversed": lambda item, _: item.question[::-1]},
    "recall": {"constant": _constant, "last value": lambda item, _: item.question[-3]},
    "depth": {"constant": _constant, "openers": lambda item, _: str(item.question.count("("))},
    "arithmetic": {"constant": _constant, "last digit": lambda item, _: item.question[-1]},
}
"""What each answers. Expected exact matches at a size s: copy constant (26 - s)!/26! and reversed 0; recall .1 and 1/s;
depth 1/s and 1/(s + 1); arithmetic .1 and .1."""


def task_floors(tasks: TaskSet) -> dict[str, NDArray[np.float64]]:
    """What each shortcut gets right of each item; a floor is the mean. -> name: (items,)

    Among candidates, one whose answer is none of them is right by chance.
    """
    options = tasks.options

    def credit(answer: str, item: Item, candidates: tuple[str, ...]) -> float:
        return float(answer == item.answer) if answer in candidates or len(candidates) == 1 else 1 / len(candidates)

    asked = list(zip(tasks.items, tasks.candidates, strict=True))
    found = {
        name: np.array([credit(shortcut(item, options), item, candidates) for item, candidates in asked])
        for name, shortcut in SHORTCUTS[options.task].items()
    }
    if options.form == "choice":
        found["chance"] = np.full(len(asked), 1 / options.choices)
    return found
