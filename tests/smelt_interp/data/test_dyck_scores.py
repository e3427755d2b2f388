"""Dyck scores and floors on rows worked by hand."""

import numpy as np
import pytest

from smelt_interp.data.backcopy import backcopy_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.dyck_scores import (
    SHORTCUTS,
    Query,
    answer_loss,
    answer_start,
    closers_in,
    exact_match,
    first_closer,
    floors,
    pairing_of,
    queries,
    teacher_forced,
    teacher_forced_first_closer,
)
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError


def episodes_of(num, shots=(0,), **options):
    return dyck_samples(
        DyckOptions(pairing="standard", shots=shots, **options), num, seed=0, length=300, tokenizer=BYTES
    )


# query, closers that answer it: what constant, last openers, outermost openers and counters answer
WORKED = [
    (Query("()(", ")"), ")", ")", ")", ")"),
    (Query("[(){", "}]"), ")", "})", ")]", "}]"),
    (Query("([(", ")])"), ")", ")])", ")])", "))]"),  # two of one type around another: counts lose the order
    (Query("<{}", ">"), ")", "}", ">", ">"),
    (Query("[]<", ">"), ")", ">", "]", ">"),
]


@pytest.mark.parametrize(("query", "constant", "last", "outermost", "counters"), WORKED)
def test_shortcuts_answer_as_worked_by_hand(query, constant, last, outermost, counters):
    closer_of = pairing_of(query)
    answers = [shortcut(query, closer_of) for shortcut in SHORTCUTS.values()]
    assert answers == [constant, last, outermost, counters]


def test_shortcuts_use_the_pairing_of_the_episode():
    permuted = Query("(]{<)[", ">}")  # ( with ], < with ), [ with >, { with }
    closer_of = pairing_of(permuted)
    assert closer_of == {"(": "]", "<": ")", "[": ">", "{": "}"}
    assert SHORTCUTS["last openers"](permuted, closer_of) == ">)"
    assert SHORTCUTS["outermost openers"](permuted, closer_of) == "}]"
    assert SHORTCUTS["counters"](permuted, closer_of) == ">}"
    assert SHORTCUTS["constant"](permuted, closer_of) == ")"


def test_floors_are_what_each_shortcut_gets_right():
    samples = episodes_of(300)
    found = floors(samples)
    for row, query in enumerate(queries(samples)):
        for name, shortcut in SHORTCUTS.items():
            assert found[name][row] == (shortcut(query, pairing_of(query)) == query.answer)
    means = {name: right.mean() for name, right in found.items()}
    assert means["constant"] < 0.15
    assert means["constant"] < means["last openers"] < means["counters"] < 1.0


def test_counters_know_all_but_the_order():
    """With one open bracket, or one type, a count is the whole answer."""
    samples = episodes_of(200, max_total=20)
    right = floors(samples)["counters"]
    assert right[samples.episode_N["answer_length"] == 1].all()
    assert floors(episodes_of(50, num_types=1))["counters"].all()


def test_scoring_keeps_order_and_punctuation():
    query = Query("[{", "}]")
    assert exact_match(" } ]\n", query, "full")
    assert exact_match("}]\n", query, "compact")
    assert not exact_match("] }", query, "full")
    assert not exact_match("} ].", query, "full")
    assert not exact_match("}]", query, "full")
    assert not exact_match("} ] ]", query, "full")
    assert not exact_match("", query, "full")
    assert first_closer("} )", query, "full")
    assert not first_closer("]}", query, "compact")
    assert not first_closer("", query, "compact")
    assert closers_in("}]", "full") == ["}]"]


@pytest.fixture
def episodes():
    return episodes_of(6, shots=(1,), rendering="full")


def perfect_argmax(episodes):
    return np.pad(episodes.ids_NT[:, 1:], ((0, 0), (0, 1)))


def test_teacher_forced_scores_see_each_single_wrong_token(episodes):
    argmax = perfect_argmax(episodes)
    start, stop = answer_start(episodes), episodes.length_N
    argmax[1, start[1] - 1] = 0  # the first closer
    argmax[2, stop[2] - 2] = 0  # the newline
    argmax[3, start[3] - 2] = 0  # the prompt's last token: not scored
    argmax[4, stop[4] - 1 :] = 0  # after the answer: not scored
    assert teacher_forced(episodes, argmax, newline=True).tolist() == [True, False, False, True, True, True]
    assert teacher_forced(episodes, argmax, newline=False).tolist() == [True, False, True, True, True, True]
    assert teacher_forced_first_closer(episodes, argmax).tolist() == [True, False, True, True, True, True]


def test_answer_loss_averages_over_the_answer_and_its_newline(episodes):
    logprob = np.full(episodes.ids_NT.shape, -100.0)
    for row in range(6):
        start, stop = answer_start(episodes)[row], episodes.length_N[row]
        logprob[row, start - 1 : stop - 1] = -np.arange(1, stop - start + 1)
    lengths = episodes.length_N - answer_start(episodes)
    np.testing.assert_allclose(answer_loss(episodes, logprob), (lengths + 1) / 2)


def test_rows_without_a_query_are_refused():
    with pytest.raises(UserError, match="a query and its answer; got row 0 without"):
        queries(backcopy_samples(2, length=20, seed=0, tokenizer=BYTES))


@pytest.mark.parametrize("query", [Query("((", ")"), Query("(", "))"), Query("(<", "))"), Query("((", ")]")])
def test_a_wrong_answer_has_no_pairing(query):
    with pytest.raises(UserError, match="must close every opener"):
        pairing_of(query)
