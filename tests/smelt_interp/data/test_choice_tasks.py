"""Generated tasks against their own definitions, and their floors against what they are by counting."""

from itertools import pairwise
from math import factorial, sqrt

import numpy as np
import pytest

from smelt_interp.data.choice_tasks import (
    TaskOptions,
    answer_bytes,
    answer_logprob,
    right_choices,
    right_completions,
    some_items,
    task_floors,
    task_samples,
)
from smelt_interp.data.samples import Role
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError

TASKS = ("copy", "recall", "depth", "arithmetic")


def drawn(task, num=50, *, seed=0, length=400, **options):
    return task_samples(TaskOptions(task=task, **options), num, seed=seed, length=length, tokenizer=BYTES)


def solved(task: str, question: str) -> str:
    """The answer, found from the question alone."""
    if task == "copy":
        return question
    if task == "recall":
        *pairs, key = question.split()
        return dict(pairs)[key]
    if task == "depth":
        return str(question.count("(") - question.count(")"))
    return str(sum(map(int, question.split("+"))) % 10)


@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_its_question(task, size):
    tasks = drawn(task, size=size, choices=2)
    for row in np.flatnonzero(tasks.right_N):
        *lines, last = b"".join(tasks.samples.row_text(row)).decode().split("\n")
        assert last == ""
        assert len(lines) == 5
        questions = [line.split("=")[0] for line in lines]
        assert all(solved(task, line.split("=")[0]) == line.split("=")[1] for line in lines)
        assert questions[-1] not in questions[:-1]
    for item in tasks.items:
        assert item.answer not in item.others
        assert len({item.answer, *item.others}) == 1 + len(item.others)
        assert {len(other) for other in item.others} == {len(item.answer)}


def test_depth_is_uniform_its_prefixes_proper_and_their_length_says_nothing():
    tasks = drawn("depth", 3000, size=5, shots=0, form="completion")
    depths = np.array([int(item.answer) for item in tasks.items])
    counts = np.bincount(depths, minlength=6)[1:]
    assert (np.abs(counts - 600) < 5 * sqrt(600)).all()
    for item in tasks.items:
        heights = np.cumsum([{"(": 1, ")": -1, ".": 0}[letter] for letter in item.question])
        assert (heights >= 0).all()
        assert len(item.question) == 15


@pytest.mark.parametrize("task", TASKS)
def test_candidates_are_different_rows_of_one_document_and_one_of_them_is_right(task):
    tasks = drawn(task, 30)
    assert len(tasks.samples) == 4 * 30
    assert np.bincount(tasks.item_N, tasks.right_N).tolist() == [1] * 30
    assert tasks.samples.num_documents == 30
    assert all(len(set(asked)) == 4 for asked in tasks.candidates)
    first = tasks.samples.rows(np.flatnonzero(tasks.item_N == 3))
    assert len({first.ids_NT[row][first.role_NT[row] != Role.ANSWER].tobytes() for row in range(4)}) == 1
    assert len(set(first.document_N)) == 1
    places = np.flatnonzero(tasks.right_N) % 4
    assert set(places) == {0, 1, 2, 3}


@pytest.mark.parametrize("task", TASKS)
def test_the_same_items_are_asked_at_every_number_of_shots_and_in_both_forms(task):
    few, many, exact = drawn(task, 20, shots=0), drawn(task, 20, shots=5), drawn(task, 20, form="completion")
    assert few.candidates == many.candidates
    assert [item.question for item in few.items] == [item.question for item in exact.items]
    assert np.array_equal(few.samples.document_N[few.right_N], exact.samples.document_N)
    assert len(exact.samples) == 20
    longer = drawn(task, 25, shots=5)
    assert longer.candidates[:20] == many.candidates


def within(found: np.ndarray, floor: float) -> bool:
    """Whether a mean is within five binomial standard deviations of a floor."""
    return abs(found.mean() - floor) <= 5 * sqrt(max(floor * (1 - floor), 1e-9) / len(found))


EXACT = [
    ("copy", "constant", factorial(22) / factorial(26)),
    ("copy", "reversed", 0.0),
    ("recall", "constant", 0.1),
    ("recall", "last value", 1 / 4),
    ("depth", "constant", 1 / 4),
    ("depth", "openers", 1 / 5),
    ("arithmetic", "constant", 0.1),
    ("arithmetic", "last digit", 0.1),
]


@pytest.mark.parametrize(("task", "shortcut", "floor"), EXACT)
def test_shortcuts_complete_as_often_as_counting_says(task, shortcut, floor):
    tasks = drawn(task, 2000, shots=0, form="completion")
    assert within(task_floors(tasks)[shortcut], floor)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("choices", [2, 4])
def test_a_choice_that_does_not_depend_on_the_question_is_right_by_chance(task, choices):
    """The candidate that sorts first, and the likeliest under probabilities of single bytes."""
    tasks = drawn(task, 1000, shots=0, choices=choices)
    first = [min(asked) == item.answer for item, asked in zip(tasks.items, tasks.candidates, strict=True)]
    assert within(np.array(first), 1 / choices)
    logprob_of_byte = np.log(np.random.default_rng(0).dirichlet(np.ones(259)))
    logprob_NT = np.zeros(tasks.samples.ids_NT.shape)
    logprob_NT[:, :-1] = logprob_of_byte[tasks.samples.ids_NT[:, 1:]]
    assert within(right_choices(tasks, answer_logprob(tasks, logprob_NT)), 1 / choices)
    assert task_floors(tasks)["chance"].mean() == pytest.approx(1 / choices)


def test_right_choices_by_hand_and_ties_by_share():
    tasks = drawn("arithmetic", 3, shots=1, choices=4)
    logprob_NT = np.zeros(tasks.samples.ids_NT.shape)
    answer_NT = tasks.samples.role_NT[:, 1:] == Role.ANSWER
    right, wrong = np.flatnonzero(tasks.right_N), np.flatnonzero(~tasks.right_N)
    assert right_choices(tasks, answer_logprob(tasks, logprob_NT)).tolist() == [0.25] * 3
    logprob_NT[right[0], :-1][answer_NT[right[0]]] = 1.0
    logprob_NT[wrong[3], :-1][answer_NT[wrong[3]]] = 1.0  # the second item's
    logprob_NT[right[2], :-1][~answer_NT[right[2]]] = 9.0  # outside the answer: not counted
    assert right_choices(tasks, answer_logprob(tasks, logprob_NT)).tolist() == [1.0, 0.0, 0.25]


def test_some_items_are_asked_as_they_were_in_the_order_given():
    tasks = drawn("copy", 6, size=3)
    part = some_items(tasks, np.array([4, 1]))
    assert part.items == (tasks.items[4], tasks.items[1])
    assert part.candidates == (tasks.candidates[4], tasks.candidates[1])
    rows = [*np.flatnonzero(tasks.item_N == 4), *np.flatnonzero(tasks.item_N == 1)]
    assert part.samples.digest() == tasks.samples.rows(np.array(rows)).digest()
    assert (part.item_N.tolist(), part.right_N.tolist()) == ([0] * 4 + [1] * 4, tasks.right_N[rows].tolist())
    assert answer_bytes(part).tolist() == [3] * 8
    unequal = part._replace(candidates=(("a", "bc", "def", "g"), ("hi", "j", "k", "l")))
    assert answer_bytes(unequal).tolist() == [1, 2, 3, 1, 2, 1, 1, 1], "as acc_norm divides"


def test_right_completions_see_each_wrong_token_of_the_answer_alone():
    tasks = drawn("copy", 4, shots=1, form="completion")
    argmax_NT = np.pad(tasks.samples.ids_NT[:, 1:], ((0, 0), (0, 1)))
    stop_N = tasks.samples.length_N
    argmax_NT[1, stop_N[1] - 2] = 0  # the newline
    argmax_NT[2, stop_N[2] - 6] = 0  # the first letter
    argmax_NT[3, stop_N[3] - 7] = 0  # the sign before it
    assert right_completions(tasks, argmax_NT).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_roles_follow_one_another():
    samples = drawn("recall", 1, shots=2).samples
    order = [Role(a) for a, b in pairwise([*samples.role_NT[0].tolist(), 255]) if a != b]
    shown = [Role.DEMONSTRATION_INPUT, Role.DEMONSTRATION_ANSWER]
    assert order == [Role.BOS, *shown, *shown, Role.QUERY, Role.ANSWER]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sort"}, "task must be 'copy', 'recall', 'depth' or 'arithmetic'; got 'sort'"),
        ({"size": 10}, "size must be at most 9; got 10"),
        ({"size": 2, "choices": 3}, "choices must be at most 2 for copy of size 2; got 3"),
        ({"task": "recall", "size": 3}, "choices must be at most 3 for recall of size 3; got 4"),
        ({"choices": 1}, "choices must be at least 2; got 1"),
        ({"shots": -1}, "shots must be at least 0; got -1"),
    ],
)
def test_options_outside_their_rules(changes, message):
    with pytest.raises(UserError, match=message):
        TaskOptions(**changes)


def test_rows_that_do_not_fit_and_no_items_are_refused():
    with pytest.raises(UserError, match=r"rows of copy must have at most 40 tokens; got 51: lower shots or size"):
        drawn("copy", length=40)
    with pytest.raises(UserError, match="number of items must be at least 1; got 0"):
        drawn("copy", 0)
