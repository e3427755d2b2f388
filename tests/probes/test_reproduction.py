"""The paper's figures against ours: verdicts follow from the numbers, whatever made them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from model.network import LoopedMoE
from probes import attention_sink, reproduction
from probes.reproduction import AS_FAR, NO_POWER
from probes.running.claims import CLAIMS, DYCK, FEW_SHOT, LENGTH, OTHERS, OVERLAP, SIMILARITY, SINK, UPDATES
from probes.running.command import Measured
from probes.running.probe import Result
from probes.running.source import SampleSet, Subject
from probes.running.verdicts import Ours, Printed, reaches, verdict
from probes.statistics.bootstrap import Estimate
from probes.statistics.quantities import Record, as_table, record
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role
from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from smelt_interp.paper.printed import Figure
from tests.support.planted import BASELINE, LOOPED, dyck_samples_of, pick

OPTIONS = SimpleNamespace(queries="predict_answer", content="brackets", heads="separate")


def row(level: str, quantity: str, value: float, spread: float = 0.0, null: float = 0.0, **where: object) -> Record:
    estimate = Estimate(value, value - spread, value + spread, 9)
    nulls = {"shuffled": null, "popularity": null, "uniform": null}
    return record(level, quantity, estimate, where=where, nulls=nulls)  # type: ignore[arg-type]  # cells


def layers(quantity: str, values: list[float], null: float = 0.0, **where: object) -> list[Record]:
    """Layers 2 and 3 of the tiny network, looped, and their mean."""
    mean = row("headline", quantity, sum(values) / len(values), null=null, layers="looped 2-3", **where)
    outside = row("layer", quantity, 9.0, layers="1", **where)
    each = [row("layer", quantity, value, layers=str(2 + i), **where) for i, value in enumerate(values)]
    return [mean, outside, *each]


def measured(*answers: tuple[list[Record], ModelConfig, bool]) -> Measured:
    """Each answer is a network's rows, its config, and whether it is the untrained one."""
    samples = dyck_samples_of([[("(:", Role.QUERY), (")\n", Role.ANSWER)]], [(0, 1, 1, False, False)])
    subjects = tuple(
        Subject(name=f"network {i}", architecture=config.architecture(), described={},
                batches=lambda data, sites: iter(()), untrained=untrained)
        for i, (_, config, untrained) in enumerate(answers)
    )  # fmt: skip
    results = tuple(
        Result(table=as_table(rows), samples=1, documents=1, tokens=9, by_sample=None, draw=dict)
        for rows, _, _ in answers
    )
    return Measured(
        name="probe", probe=attention_sink, options=OPTIONS, data=SampleSet(name="dyck", samples=samples),  # type: ignore[arg-type]  # a module
        subjects=subjects, results=results,
    )  # fmt: skip


def ours(low: float, high: float) -> Ours:
    return Ours(value=(low + high) / 2, low=low, high=high)


def test_a_printed_figure_is_known_to_half_of_its_last_digit() -> None:
    assert Printed(figures=(Figure("0.60"),)).allowed == pytest.approx((0.595, 0.605))
    assert Printed(figures=(Figure("2"), Figure("3")), scale=1 / 8).allowed == pytest.approx((1.5 / 8, 3.5 / 8))


def test_the_verdict_is_whether_a_mean_or_every_layer_meets_the_range() -> None:
    assert verdict([ours(0.1, 0.3)], (0.2, 0.4)) == ("matches", "")
    assert verdict([ours(0.1, 0.2), ours(0.3, 0.35)], (0.2, 0.4)) == ("matches", "")
    assert verdict([ours(0.0, 0.1)], (0.2, 0.4)) == ("differs", "lower")
    assert verdict([ours(0.5, 0.6), ours(0.3, 0.35)], (0.2, 0.4)) == ("differs", "higher; 1 of 2 in")


@pytest.mark.parametrize(
    ("value", "null", "expected"),
    [(0.3, 0.1, True), (0.9, 0.1, True), (0.15, 0.1, False), (0.3, 0.5, True), (0.45, 0.5, False), (0.3, 0.3, False)],
)
def test_as_far_as_the_printed_range_is_seen_from_the_null(value: float, null: float, expected: bool) -> None:
    assert reaches(value, (0.2, 0.4), null) == expected


def test_a_range_is_held_against_the_range_of_the_looped_layers_and_the_untrained_network_is_named() -> None:
    for values, answer in (([0.9, 0.92], "matches"), ([0.9, 0.7], "differs")):
        for untrained, as_far in ((0.99, True), (0.6, False)):
            rows = [layers("Q cosine, raw", each, 0.5, visit="1 vs 2") for each in (values, [untrained] * 2)]
            results = {("code", SIMILARITY): [measured((rows[0], LOOPED, False), (rows[1], LOOPED, True))]}
            found = pick(reproduction.rows(results), figure="Q cosine")
            assert (found["verdict"], found["least"], found["most"]) == (answer, min(values), max(values))
            assert (AS_FAR in str(found["note"])) == as_far
            assert found["choices"] == "heads separate"


def test_a_mean_is_held_against_a_mean() -> None:
    rows = layers("cosine", [0.43, 0.64], visit="1 vs 2", update="layer")
    found = reproduction.rows({("code", UPDATES): [measured((rows, LOOPED, False))]})
    assert pick(found, figure="update cosine")["verdict"] == "matches"
    mean = pick(found, figure="update cosine, mean")
    assert (mean["verdict"], mean["paper"], mean["note"]) == ("differs", "0.56", "lower")


def test_an_interval_that_holds_chance_too_tells_nothing() -> None:
    """0.56 is printed: an interval from 0.3 to 0.9 meets it, and a chance of 0.35 alike."""
    for null, answer in ((0.35, "not testable"), (0.1, "matches")):
        mean = row("headline", "cosine", 0.6, 0.3, null, layers="looped 2-3", visit="1 vs 2", update="layer")
        found = pick(reproduction.rows({("code", UPDATES): [measured(([mean], LOOPED, False))]}),
                     figure="update cosine, mean")  # fmt: skip
        assert (found["verdict"], found["note"] == NO_POWER) == (answer, answer == "not testable")


def test_the_baseline_stands_beside_on_the_same_layers_and_at_the_same_executed_depth() -> None:
    """Layers 2 and 3 of four run twice: their second visit runs at the depth of the Baseline's layers 4 and 5, of
    which it has one."""
    at = {"head": "mean"}
    looped = [row("headline", "start mass", value, layers="looped 2-3", visit=visit, **at)
              for visit, value in ((1, 0.6), (2, 0.02))]  # fmt: skip
    once = [row("headline", "start mass", 0.5, layers="middle 2-3", visit=1, **at)]
    once += [row("layer", "start mass", layer / 10, layers=str(layer), visit=1, **at) for layer in (1, 2, 3, 4)]
    results = {("dyck", SINK): [measured((looped, LOOPED, False), (once, BASELINE, False))]}
    first, second = (pick(reproduction.rows(results), figure=f"start mass, visit {visit}") for visit in (1, 2))
    assert (first["baseline"], first["equal_depth"]) == (0.5, None)
    assert (second["baseline"], second["equal_depth"]) == (0.5, pytest.approx(0.4))


def test_pairs_are_seeds_whose_spread_is_the_interval() -> None:
    """Means over seeds .50, .56 and .62: their mean meets the printed .56, whatever the documents say."""
    pairs = [measured((layers("cosine", [value, value], visit="1 vs 2", update="layer"), LOOPED, False))
             for value in (0.50, 0.56, 0.62)]  # fmt: skip
    found = pick(reproduction.rows({("code", UPDATES): pairs}), figure="update cosine, mean")
    spread = 4.302653 * 0.06 / np.sqrt(3)
    assert (found["least"], found["low"], found["high"]) == pytest.approx(
        (0.56, 0.56 - spread, 0.56 + spread), abs=1e-6
    )
    assert found["verdict"] == "matches"


def test_the_command_measures_pairs_and_says_what_none_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("looped", LOOPED), ("once", BASELINE)):
        LoopedMoE(replace(config, context=160), seed=1).save_pretrained(tmp_path / name, readme="")
    monkeypatch.setattr(reproduction, "SETS", {name: reproduction.SETS[name] for name in ("dyck", "code")})
    out = tmp_path / "out"
    words = ["--pair", tmp_path / "looped", tmp_path / "once", "--samples", "2", "--episodes", "2", "--items", "2"]
    monkeypatch.setattr(sys, "argv", ["probes.reproduction", *map(str, words), "--out", str(out)])
    reproduction.main()
    printed_lines = capsys.readouterr().out
    assert "The paper's figures against looped" in printed_lines
    card = {row["figure"]: row for row in json.loads((out / "reproduction.json").read_text())["rows"]}
    expected = [claim.what for claim in CLAIMS] + [what for what, *_ in OTHERS]
    assert set(card) == set(expected)
    measured_here = {name for name, found in card.items() if found["least"] is not None}
    assert measured_here >= {claim.what for claim in CLAIMS if claim.probe not in (LENGTH, FEW_SHOT)}
    assert card["start mass, visit 2"]["equal_depth"] is not None
    monkeypatch.setattr(sys, "argv", ["probes.reproduction"])
    with pytest.raises(UserError, match="--pair must name a looped network and its Baseline; got none"):
        reproduction.main()


def test_samples_that_do_not_fit_the_context_are_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in (("looped", LOOPED), ("once", BASELINE)):
        LoopedMoE(config, seed=1).save_pretrained(tmp_path / name, readme="")
    monkeypatch.setattr(reproduction, "SETS", {"tasks": (FEW_SHOT,)})
    pair = (tmp_path / "looped", tmp_path / "once")
    with pytest.raises(UserError, match="the looped networks of pairs must be one or more different values; got"):
        reproduction.CardOptions(pair=(pair, pair))
    options = reproduction.CardOptions(pair=(pair,), items=2)
    found, reasons = reproduction.measure_pair(options, 0)
    assert found == {}
    assert reasons[FEW_SHOT].startswith("rows of copy must have at most 64 tokens; got 91")


def test_experts_are_compared_as_shares_of_all_that_a_token_chooses() -> None:
    rows = layers("experts shared", [1.1, 1.3], 0.4, visit="1 vs 2")
    found = pick(reproduction.rows({("code", OVERLAP): [measured((rows, replace(LOOPED, top_k=4), False))]}), on="code",
                 figure="share of experts kept")  # fmt: skip
    assert (found["least"], found["most"], found["chance"]) == pytest.approx((0.275, 0.325, 0.1))
    assert (found["paper"], found["verdict"]) == ("0.25 to 0.375", "matches")


def test_a_baseline_without_a_second_visit_is_not_testable_and_choices_stand_in_the_row() -> None:
    second = record("headline", "start mass", None, where={"visit": 2, "head": "mean"}, note="one visit")
    value = printed.number("mechanism", "bos_mass", "visit_1")
    first = row("headline", "start mass", value, visit=1, head="mean")
    found = reproduction.rows({("dyck", SINK): [measured(([first, second], BASELINE, False))]})
    assert pick(found, figure="start mass, visit 1")["verdict"] == "matches"
    of_second = pick(found, figure="start mass, visit 2")
    assert (of_second["verdict"], of_second["least"], of_second["note"]) == ("not testable", None, "one visit")
    assert pick(found, figure="content mass, visit 1")["choices"] == "predict answer queries, brackets"


def test_dyck_is_compared_at_the_shots_of_the_paper_or_not_at_all() -> None:
    def at(shots: int) -> list[Record]:
        smelt, baseline, untrained = (
            [row("headline", "exact match", value, 0.01, queries="all", shots=shots)] for value in (0.3, 0.9, 0.0)
        )
        answers = ((smelt, LOOPED, False), (baseline, BASELINE, False), (untrained, LOOPED, True))
        return reproduction.rows({("dyck-shots", DYCK): [measured(*answers)]})

    assert [(entry["verdict"], entry["note"]) for entry in at(32)] == [("matches", ""), ("differs", "higher")]
    few = at(8)
    assert [(entry["verdict"], entry["least"]) for entry in few] == [("not testable", None)] * 2
    assert few[0]["note"] == "3 shots fit the context of 64 tokens"


def test_every_claim_names_a_printed_figure_and_the_table_has_them_all_once() -> None:
    empty = record("headline", "none", None, where={})
    results = {(samples, claim.probe): [measured(([empty], LOOPED, False))]
               for claim in CLAIMS for samples in claim.samples}  # fmt: skip
    card = reproduction.rows(results)
    assert [line[0] for line in reproduction.table(card, "looped").rows] == [
        claim.what for claim in CLAIMS if not claim.over_baseline
    ]
    rest = reproduction.untestable(card, {FEW_SHOT: "no tasks"})
    named = {row["figure"]: row["note"] for row in rest}
    assert list(named) == [*(claim.what for claim in CLAIMS if claim.over_baseline), *(what for what, *_ in OTHERS)]
    assert named["few-shot gap (points), no shot"] == "no tasks"
    assert named["length gain ratio"] == "takes a Baseline"
    assert {row["verdict"] for row in rest} == {"not testable"}
