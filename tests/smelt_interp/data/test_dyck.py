"""Dyck episodes: what they are, against a dumb parser and counts of all prefixes."""

import hashlib
from collections import Counter
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from smelt_interp.data import dyck
from smelt_interp.data.dyck import (
    CLOSERS,
    INSTRUCTION,
    OPENERS,
    DyckOptions,
    draw_closers,
    draw_shot,
    dyck_pairs,
    dyck_samples,
    filled_rows,
    most_shots,
    uniform_stream,
)
from smelt_interp.data.marked_text import padded
from smelt_interp.data.samples import Role, Samples
from smelt_interp.data.tokenizer import BOS, BYTES, PAD
from smelt_interp.errors import UserError

decode = BYTES.decode


def episodes(num, *, seed=0, length=160, pairing="standard", **options) -> Samples:
    return dyck_samples(DyckOptions(pairing=pairing, **options), num, seed=seed, length=length, tokenizer=BYTES)


def stream(seed: int = 0):
    return uniform_stream(np.random.default_rng(seed))


def closed(prefix: str, closers: str) -> str | None:
    """The stack closure of a prefix, by rubbing out neighbouring pairs; None when it is not proper."""
    pairs = [opener + closer for opener, closer in zip(OPENERS, closers, strict=False)]
    left = prefix
    while any(pair in left for pair in pairs):
        for pair in pairs:
            left = left.replace(pair, "")
    if any(bracket not in OPENERS for bracket in left):
        return None
    return "".join(closers[OPENERS.index(opener)] for opener in reversed(left))


def shots_of(samples: Samples, row: int) -> list[tuple[str, str]]:
    """(prefix, answer) of each whole shot of a row, read from its text alone."""
    text = decode(samples.ids_NT[row]).removeprefix(INSTRUCTION)
    if text.startswith("Input: "):
        pairs = [shot.split("\nOutput: ") for shot in text.removesuffix("\n").split("\nInput: ")]
        return [(prefix.removeprefix("Input: ").replace(" ", ""), answer.replace(" ", "")) for prefix, answer in pairs]
    return [tuple(line.split(":")) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("pairing", ["standard", "episode"])
def test_every_answer_is_the_stack_closure_under_one_pairing_an_episode(rendering, pairing):
    samples = episodes(40, rendering=rendering, pairing=pairing, shots=(5,), max_total=16, length=600)
    all_closers = ["".join(order) for order in product(CLOSERS, repeat=4) if len(set(order)) == 4]
    for row in range(40):
        shots = shots_of(samples, row)
        assert len(shots) == 6
        candidates = [CLOSERS] if pairing == "standard" else all_closers
        assert any(all(closed(prefix, c) == answer for prefix, answer in shots) for c in candidates)
        for prefix, answer in shots:
            assert 4 <= len(prefix + answer) <= 16
            assert len(prefix + answer) % 2 == 0
            assert 1 <= len(answer) <= 3
        query, answer = shots[-1]
        depths = np.cumsum([1 if bracket in OPENERS else -1 for bracket in query])
        episode = samples.episode_N[row]
        assert tuple(episode)[:4] == (5, depths.max(), len(answer), pairing == "episode")
        assert episode["pair_shown"] == any(bracket in query for bracket in answer)


def test_episode_pairings_are_uniform_over_all_permutations():
    uniform = stream()
    counts = Counter(draw_closers(uniform, 3, "episode") for _ in range(6000))
    assert len(counts) == 6
    assert max(abs(count - 1000) for count in counts.values()) < 5 * np.sqrt(1000)
    assert draw_closers(uniform, 3, "standard") == ")]}"


def test_prefixes_are_uniform_given_total_and_open_brackets():
    """One bracket type, total 8: every proper prefix with the same number of open brackets is equally frequent."""
    possible = {}
    for num_open in (1, 2, 3):
        words = ("".join(word) for word in product("()", repeat=8 - num_open))
        possible[num_open] = [word for word in words if closed(word, ")") == ")" * num_open]
    uniform = stream()
    shots = [draw_shot(uniform, ")", 8, 8) for _ in range(9000)]
    for num_open, words in possible.items():
        counts = Counter(shot.prefix for shot in shots if len(shot.answer) == num_open)
        assert set(counts) == set(words)
        expected = counts.total() / len(words)
        assert abs(counts.total() - 3000) < 5 * np.sqrt(3000)
        assert max(abs(count - expected) for count in counts.values()) < 5 * np.sqrt(expected)


def test_short_sequences_end_with_as_many_open_brackets_as_they_can():
    uniform = stream()
    for total, most in ((4, 2), (6, 3), (12, 3)):
        counts = Counter(len(draw_shot(uniform, ")]", total, total).answer) for _ in range(600))
        assert sorted(counts) == list(range(1, most + 1))
        assert min(counts.values()) > 600 / most - 5 * np.sqrt(600 / most)


def test_roles_mark_the_parts_of_both_renderings():
    for rendering, question_end in (("full", "Output: "), ("compact", ":")):
        samples = episodes(3, rendering=rendering, shots=(2,), length=300)
        ids, role = samples.ids_NT[1], samples.role_NT[1]
        parts = {which: decode(ids[role == which]) for which in Role}
        assert role[0] == Role.BOS
        assert ids[0] == BOS
        assert parts[Role.INSTRUCTION] == (INSTRUCTION if rendering == "full" else "")
        (prefix, answer) = shots_of(samples, 1)[-1]
        space = " " if rendering == "full" else ""
        assert parts[Role.ANSWER] == space.join(answer) + "\n"
        assert parts[Role.QUERY].endswith(space.join(prefix) + ("\n" if space else "") + question_end)
        assert parts[Role.DEMONSTRATION_INPUT].count(question_end) == 2
        assert parts[Role.DEMONSTRATION_ANSWER].count("\n") == 2
        order = [Role(a) for a, b in pairwise([*role, 255]) if a != b and a != Role.PAD]
        demonstration = [Role.DEMONSTRATION_INPUT, Role.DEMONSTRATION_ANSWER]
        first = [Role.BOS, Role.INSTRUCTION] if rendering == "full" else [Role.BOS]
        assert order == [*first, *demonstration, *demonstration, Role.QUERY, Role.ANSWER]
        assert (ids[samples.length_N[1] :] == PAD).all()


def test_no_demonstration_has_the_prefix_of_its_query_even_where_three_prefixes_exist():
    samples = episodes(60, shots=(8,), num_types=1, max_total=4)
    for row in range(60):
        *demonstrations, query = shots_of(samples, row)
        assert query[0] not in [prefix for prefix, _ in demonstrations]


def test_the_same_seed_asks_the_same_queries_at_every_number_of_shots_and_they_are_one_document():
    samples = episodes(20, shots=(0, 7), pairing="episode")
    few, many = samples.rows(slice(20)), samples.rows(slice(20, 40))
    assert few.episode_N["shots"].tolist() == [0] * 20
    assert many.episode_N["shots"].tolist() == [7] * 20
    for row in range(20):
        assert shots_of(few, row)[-1] == shots_of(many, row)[-1]
    assert np.array_equal(few.document_N, many.document_N)
    assert samples.num_documents == 20
    other = episodes(20, shots=(0,), pairing="episode", seed=1)
    assert few.digest() != other.digest()
    assert not set(few.document_N) & set(other.document_N)


def test_a_row_does_not_depend_on_how_many_are_drawn():
    few, many = episodes(4, shots=(3,)), episodes(9, shots=(3,))
    for row in range(4):
        assert shots_of(few, row) == shots_of(many, row)
        assert few.document_N[row] == many.document_N[row]


@pytest.mark.parametrize("rendering", ["full", "compact"])
def test_the_largest_number_of_shots_always_fits_and_more_are_refused(rendering):
    options = DyckOptions(rendering=rendering, min_total=12)
    most = most_shots(options, 300)
    samples = episodes(200, rendering=rendering, shots=(most,), length=300, min_total=12)
    assert 270 < samples.length_N.max() <= 300
    with pytest.raises(
        UserError,
        match=rf"shots must be at most {most}, the .* fits rows of 300 .*; got {most + 1}: .* by --length,",
    ):
        episodes(1, rendering=rendering, shots=(most + 1,), length=300, min_total=4)
    with pytest.raises(UserError, match=r"rows of 14 tokens must hold a query of 12 brackets; got one of 1"):
        episodes(1, shots=(0,), length=14, min_total=12)


def test_filled_rows_are_full_of_whole_shots_but_the_last():
    samples = padded(filled_rows(100, 161, "episode", 12, np.random.default_rng(0), BYTES), BYTES)
    assert samples.ids_NT.shape == (100, 161)
    assert (samples.length_N == 161).all()
    assert (samples.ids_NT[:, 0] == BOS).all()
    assert set(np.unique(samples.role_NT[:, 1:])) == {Role.DEMONSTRATION_INPUT, Role.DEMONSTRATION_ANSWER}
    assert (samples.ids_NT[:, -1] == ord("\n")).any()  # rows that end with a whole shot count it
    longest = set()
    for row in range(100):
        shots = shots_of(samples, row)
        assert len(shots) == samples.episode_N["shots"][row]
        assert 9 <= len(shots) <= 26
        longest.add(max(len(prefix + answer) for prefix, answer in shots))
    assert longest == {4, 6, 8, 10, 12}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rendering": "short"}, "rendering must be 'full' or 'compact'; got 'short'"),
        ({"pairing": "any"}, "pairing must be 'standard' or 'episode'; got 'any'"),
        ({"num_types": 5}, "num_types must be at most 4; got 5"),
        ({"max_total": 11}, "max_total must be a multiple of 2; got 11"),
        ({"min_total": 2}, "min_total must be at least 4; got 2"),
        ({"max_total": 102}, "max_total must be at most 100; got 102"),
        ({"min_total": 14}, "min_total must be at most max_total, 12; got 14"),
        ({"shots": (-1,)}, r"shots.0 must be at least 0; got -1"),
        ({"shots": (1, 10_001)}, r"shots.1 must be at most 10000; got 10001"),
        ({"shots": ()}, "shots must be one or more different values; got none"),
        ({"shots": (2, 2)}, "shots must be one or more different values; got 2 2"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        DyckOptions(**change)


def test_zero_episodes_are_refused():
    with pytest.raises(UserError, match="at least 1; got 0"):
        episodes(0)


def test_rows_of_the_byte_tokenizer_are_pinned():
    """Shipped results name their digests: ids and roles must never change."""
    sha = hashlib.sha256()
    for rendering in ("full", "compact"):
        samples = episodes(20, rendering=rendering, pairing="episode", shots=(3,), seed=4, length=400)
        sha.update(samples.ids_NT.tobytes() + samples.role_NT.tobytes() + samples.length_N.tobytes())
    assert sha.hexdigest()[:16] == "f4863f82ca7e0ec2"


def pairs_of(num, *, swap, length=160, **options):
    return dyck_pairs(DyckOptions(**options), num, seed=0, length=length, tokenizer=BYTES, swap=swap)


@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("swap", ["closer", "opener"])
def test_corrupted_episodes_are_right_episodes_with_another_answer_at_the_same_places(swap, rendering):
    clean, corrupted = pairs_of(40, swap=swap, rendering=rendering, shots=(1, 4), length=400)
    assert len(clean) == len(corrupted) == 80
    assert np.array_equal(clean.role_NT, corrupted.role_NT)
    assert np.array_equal(clean.document_N, corrupted.document_N)
    all_closers = ["".join(order) for order in permutations(CLOSERS)]
    for row in range(80):
        ours, theirs = shots_of(clean, row), shots_of(corrupted, row)
        assert theirs[-1][0] not in [prefix for prefix, _ in theirs[:-1]]
        assert any(all(closed(prefix, c) == answer for prefix, answer in theirs) for c in all_closers)
        assert ours[-1][1][0] != theirs[-1][1][0]
        assert corrupted.episode_N["pair_shown"][row] == any(bracket in theirs[-1][0] for bracket in theirs[-1][1])
        prompt_T = clean.role_NT[row] != Role.ANSWER
        assert (clean.ids_NT[row] != corrupted.ids_NT[row])[prompt_T].any()


def test_a_swapped_opener_is_one_character_of_the_prompt():
    clean, corrupted = pairs_of(40, swap="opener", shots=(2,))
    differs_NT = clean.ids_NT != corrupted.ids_NT
    assert (differs_NT.sum(axis=1) == 2).all()
    assert (clean.role_NT[differs_NT].reshape(-1, 2) == [Role.QUERY, Role.ANSWER]).all()


def test_swapped_closers_leave_openers_as_they_are_and_exchange_two():
    clean, corrupted = pairs_of(40, swap="closer", shots=(4,))
    for ours, theirs in zip(clean.ids_NT, corrupted.ids_NT, strict=True):
        changes = {(a, b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True) if a != b}
        assert {chr(a) for a, _ in changes} <= set(CLOSERS)
        ((low, high),) = {tuple(sorted(pair)) for pair in changes}
        assert changes <= {(low, high), (high, low)}


def test_pairs_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(UserError, match="at least 1, of 2 bracket types or more; got 4 of 1"):
        pairs_of(4, swap="opener", num_types=1)
    with pytest.raises(UserError, match="pairing must be episode where closers are exchanged; got standard"):
        pairs_of(4, swap="closer", pairing="standard")
    monkeypatch.setattr(
        dyck, "_corrupted", lambda options, shots, number, seed, swap: dyck.episode(options, shots, number, seed)
    )
    with pytest.raises(UserError, match=r"must be found among 180 episodes of 0 shots; got 0 of 4: give more shots"):
        pairs_of(4, swap="closer", shots=(0,))
