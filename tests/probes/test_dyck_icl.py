"""The Dyck probe scores planted answers as they were planted, by shots, and asks the same queries at every k."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.batch import Batch, take
from cache.record import run_batches
from model.generate import Sampling, generate
from model.network import LoopedMoE
from probes import dyck_icl
from probes.dyck_icl import DATA, SCORES
from smelt_interp.data.datasets import load_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.dyck_scores import answer_start, exact_match, first_closer, floors, queries
from smelt_interp.data.samples import Role, Samples, concatenate
from smelt_interp.data.tokenizer import BYTES, PAD
from smelt_interp.errors import UserError
from tests.support.answers import measure, rows_of
from tests.support.planted import LOOPED, pick, planted_batch, same_numbers, split_batch, text_samples
from tests.support.planted_captures import planted_capture

EXACT, FORCED, FIRST, LOSS = SCORES
ALL = {"queries": "all"}


def answered(samples: Samples, wrong: dict[int, str] | None = None, loss: float = 0.5) -> Batch:
    """Every next token is guessed right, except in the rows of `wrong`: there the answer's `first`, `last` bracket or
    its `newline` is not. Every answer token has a loss of `loss` nats, every other one of 9."""
    argmax_BT = np.roll(samples.ids_NT, -1, axis=1).astype(np.int32)
    for row, what in (wrong or {}).items():
        positions = np.flatnonzero(samples.role_NT[row] == Role.ANSWER)
        place = {"first": positions[0], "last": positions[-2], "newline": positions[-1]}[what]
        argmax_BT[row, place - 1] = ord("x")
    is_answer_BT = np.roll(samples.role_NT == Role.ANSWER, -1, axis=1)
    logprob_BT = np.where(is_answer_BT, -loss, -9).astype(np.float32)
    return planted_batch(LOOPED, samples, {}, argmax_BT=argmax_BT, logprob_BT=logprob_BT)


def episodes(num: int = 8, shots: int = 1, seed: int = 0) -> Samples:
    return dyck_samples(DyckOptions(shots=(shots,)), num, seed=seed, length=64, tokenizer=BYTES)


def test_what_was_answered_right_is_scored_right() -> None:
    rows = rows_of(dyck_icl, [answered(episodes(), {0: "first", 1: "last", 2: "newline"})])
    wrong_first = 1 + (
        len(np.flatnonzero(episodes().role_NT[1] == Role.ANSWER)) == 2
    )  # a last bracket can be the first
    expected = {EXACT: 5 / 8, FORCED: 6 / 8, FIRST: 1 - wrong_first / 8, LOSS: 0.5}
    for score, value in expected.items():
        found = pick(rows, quantity=score, **ALL)
        assert found["value"] == pytest.approx(value, abs=1e-6)
        assert found["n"] == 8
        assert (found["rendering"], found["pairing"], found["shots"]) == ("compact", "episode", 1)
    low, high = pick(rows, quantity=EXACT, **ALL)["low"], pick(rows, quantity=EXACT, **ALL)["high"]
    assert 0.2 < float(str(low)) < 5 / 8 < float(str(high)) <= 1


def test_the_same_answers_come_back_from_a_file(tmp_path: Path) -> None:
    batch = answered(episodes(), {0: "first", 3: "newline"})
    capture = planted_capture(tmp_path / "dyck.h5", batch)
    assert same_numbers(rows_of(dyck_icl, [batch]), rows_of(dyck_icl, capture.batches((), 3)))


def test_exact_match_is_that_of_greedy_generation() -> None:
    # A network of token pairs, whose layers add nothing: `)` follows `:`, a newline follows `)`.
    network = LoopedMoE(replace(LOOPED, width=64), seed=0)
    with torch.no_grad():
        for name, weight in network.stored_weights().items():
            if name.endswith(("o_proj.weight", "w_out", "unembed.weight")):
                weight.zero_()
        network.embed.weight.sign_()
        for token, following in ((":", ")"), (")", "\n")):
            network.unembed.weight[ord(following)] = network.embed.weight[ord(token)]
    options = DyckOptions(pairing="standard", num_types=2, shots=(1,), max_total=8)
    samples = dyck_samples(options, 24, seed=0, length=64, tokenizer=BYTES)
    rows = rows_of(dyck_icl, run_batches(network, samples, ()))
    prompts = [ids_T[:start].tolist() for ids_T, start in zip(samples.ids_NT, answer_start(samples), strict=True)]
    made = generate(network, prompts, Sampling(max_new_tokens=5, stop_token=ord("\n")))
    asked = [(BYTES.decode(np.array(tokens)), query) for tokens, query in zip(made, queries(samples), strict=True)]
    exact = np.mean([exact_match(text, query, "compact") for text, query in asked])
    assert 0 < exact < np.mean([first_closer(text, query, "compact") for text, query in asked]) < 1
    assert pick(rows, quantity=EXACT, **ALL)["value"] == pytest.approx(exact)
    assert pick(rows, quantity=FIRST, **ALL)["value"] == pytest.approx(
        np.mean([first_closer(text, query, "compact") for text, query in asked])
    )


def test_episodes_are_grouped_by_shots_rendering_and_pairing() -> None:
    options = DyckOptions(rendering="full", pairing="standard", shots=(0,), max_total=4)
    full = dyck_samples(options, 3, seed=0, length=160, tokenizer=BYTES)
    samples = concatenate([episodes(4, 0), episodes(4, 2), full], PAD)
    rows = rows_of(dyck_icl, [answered(samples, {4: "first", 5: "first"})])
    found = {
        (row["rendering"], row["pairing"], row["shots"]): (row["value"], row["n"])
        for row in rows
        if row["quantity"] == EXACT and row["queries"] == "all"
    }
    assert found == {
        ("compact", "episode", 0): (1.0, 4),
        ("compact", "episode", 2): (0.5, 4),
        ("full", "standard", 0): (1.0, 3),
    }


def test_what_a_network_has_over_another_is_paired_by_query() -> None:
    """Both miss the first query; the other misses two more and loses .25 nats more on every token of every answer."""
    own, other = (measure(dyck_icl, [answered(episodes(), wrong, loss)]).totals
                  for wrong, loss in (({0: "first"}, 0.5), (dict.fromkeys((0, 1, 2), "first"), 0.75)))  # fmt: skip
    rows = [row for quantity in dyck_icl.against(own, other) for row in quantity.rows()]
    assert pick(rows, quantity=f"{EXACT}, gain")["value"] == pytest.approx(2 / 8)
    loss = pick(rows, quantity=f"{LOSS}, gain")
    assert (loss["value"], loss["low"], loss["high"]) == pytest.approx((0.25, 0.25, 0.25), abs=1e-6)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_answer_does_not_depend_on_the_batches(size: int) -> None:
    samples = concatenate([episodes(6, 0), episodes(6, 2)], PAD)
    batch = answered(samples, {1: "first", 7: "newline", 8: "last"})
    shuffled = take(batch, np.random.default_rng(0).permutation(12))
    assert same_numbers(rows_of(dyck_icl, [batch]), rows_of(dyck_icl, split_batch(shuffled, size)))


def test_the_floors_are_those_of_the_same_episodes() -> None:
    samples = episodes(40)
    rows = rows_of(dyck_icl, [answered(samples)])
    found = pick(rows, quantity=EXACT, **ALL)
    for name, right_N in floors(samples).items():
        assert found[f"null_{name.replace(' ', '_')}"] == pytest.approx(right_N.mean())
    assert pick(rows, quantity=LOSS, **ALL)["null_uniform"] == pytest.approx(np.log(259))
    first = pick(rows, quantity=FIRST, **ALL)
    begins = np.mean(
        [chr(samples.ids_NT[row, np.argmax(samples.role_NT[row] == Role.ANSWER)]) == ")" for row in range(40)]
    )
    assert first["null_constant"] == pytest.approx(begins)
    assert float(str(first["null_counters"])) >= float(str(found["null_counters"]))


def test_queries_that_show_a_needed_pair_are_counted_apart() -> None:
    samples = episodes(40)
    shown_N = samples.episode_N["pair_shown"]
    assert 0 < shown_N.sum() < 40
    rows = rows_of(dyck_icl, [answered(samples, dict.fromkeys(np.flatnonzero(~shown_N).tolist(), "first"))])
    for shown, value, n in (("pair shown", 1.0, shown_N.sum()), ("pair hidden", 0.0, (~shown_N).sum())):
        found = pick(rows, quantity=EXACT, queries=shown)
        assert (found["level"], found["value"], found["n"]) == ("headline", value, n)


def test_splits_by_answer_length_and_depth_cover_all_queries() -> None:
    samples = episodes(40)
    rows = rows_of(dyck_icl, [answered(samples)])
    for words, name in (("answer length", "answer_length"), ("depth", "depth")):
        counted = {row["queries"]: row["n"] for row in rows
                   if row["quantity"] == EXACT and str(row["queries"]).startswith(words)}  # fmt: skip
        values, counts = np.unique(samples.episode_N[name], return_counts=True)
        assert counted == {f"{words} {value}": count for value, count in zip(values, counts, strict=True)}


def test_by_default_the_same_queries_are_asked_at_every_number_of_shots() -> None:
    samples = load_samples(replace(DATA, samples=5), 160, BYTES)
    shots_N = samples.episode_N["shots"]
    assert sorted(set(shots_N.tolist())) == [0, 1, 2, 4, 8]
    asked = [[query.prefix for query in queries(samples.rows(shots_N == shots))] for shots in (0, 1, 2, 4, 8)]
    assert asked[0] == asked[1] == asked[2] == asked[3] == asked[4]
    assert samples.num_documents == 5


def test_a_share_has_the_exact_binomial_interval_and_the_loss_the_bootstraps() -> None:
    samples = episodes(20)
    for wrong, (low, high) in ((0, (0.8315666, 1.0)), (20, (0.0, 0.1684334)), (10, (0.2719578, 0.7280422))):
        rows = rows_of(dyck_icl, [answered(samples, dict.fromkeys(range(wrong), "first"))])
        found = pick(rows, quantity=EXACT, **ALL)
        assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-6)
        assert pick(rows, quantity=LOSS, **ALL)["low"] == pytest.approx(0.5)


def test_a_network_of_nan_is_not_scored_as_wrong() -> None:
    network = LoopedMoE(LOOPED, seed=0)
    with torch.no_grad():
        network.ln_final.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="must be finite; got nan in"):
        measure(dyck_icl, run_batches(network, episodes(), ()))
    batch = answered(episodes())
    logprob_BT = np.array(batch.logprob_BT)
    logprob_BT[2] = np.nan
    message = "^answers to score must have finite log-probabilities; got nan from the unembedding, in samples 0 to 7"
    with pytest.raises(UserError, match=message):
        measure(dyck_icl, [replace(batch, logprob_BT=logprob_BT)])


def test_text_asks_nothing() -> None:
    rows = rows_of(dyck_icl, [planted_batch(LOOPED, text_samples(), {})])
    assert [(row["quantity"], row["value"]) for row in rows] == [(score, None) for score in SCORES]
    assert all(row["note"] == "not defined: no row asks a query; record --data dyck" for row in rows)
    with pytest.raises(UserError, match="samples to measure must be at least one; got 0"):
        measure(dyck_icl, [])
    both = answered(concatenate([episodes(3), text_samples()], PAD))
    alone = answered(episodes(3))
    assert same_numbers(rows_of(dyck_icl, [both]), rows_of(dyck_icl, [alone]))
    unasked = episodes(3)
    roles_NT = np.where(unasked.role_NT == Role.ANSWER, Role.DEMONSTRATION_ANSWER, unasked.role_NT).astype(np.uint8)
    assert {row["value"] for row in rows_of(dyck_icl, [answered(replace(unasked, role_NT=roles_NT))])} == {None}


def test_a_capture_of_dyck_and_text_gives_the_scores_and_says_that_text_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted_capture(tmp_path / "both.h5", answered(concatenate([text_samples(3), episodes(4)], PAD), {3: "first"}))
    monkeypatch.setattr(sys, "argv", ["probes.dyck_icl", "--capture", str(tmp_path / "both.h5"), "--json"])
    dyck_icl.main()
    code, dyck = json.loads(capsys.readouterr().out)["results"]
    assert (code["data"], dyck["data"]) == ("code", "dyck")
    assert {row["value"] for row in code["rows"]} == {None}
    assert pick(dyck["rows"], quantity=EXACT, **ALL)["value"] == 0.75
    monkeypatch.setattr(sys, "argv", ["probes.dyck_icl", "--capture", str(tmp_path / "both.h5")])
    dyck_icl.main()
    assert "not defined: no row asks a query" in capsys.readouterr().out


def test_the_figure_is_the_curve() -> None:
    samples = concatenate([episodes(4, 0), episodes(4, 2)], PAD)
    drawn = measure(dyck_icl, [answered(samples, {0: "first"})]).figures["shots"]
    curve = next(trace for trace in drawn.data if trace.name.startswith(EXACT))
    assert (list(curve.x), list(curve.y)) == ([0, 2], [0.75, 1.0])
