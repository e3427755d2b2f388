"""The paper's figures against ours: verdicts follow from the numbers, whatever made them."""

from dataclasses import dataclass, replace

import pytest

from probes import reproduction
from probes.reproduction import AS_FAR, CLAIMS, OVERLAP, SIMILARITY, SINK, known_to, reaches, verdict
from probes.running import report
from probes.running.command import Measured
from probes.running.contract import Estimate, Row, row
from probes.running.source import DataSet, Network
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role
from smelt_interp.paper import printed
from tests.support.planted import BASELINE, LOOPED, dyck_samples_of, pick


@dataclass(frozen=True)
class Given:
    """A result with these rows."""

    table: tuple[Row, ...]

    def rows(self) -> list[Row]:
        return list(self.table)


def headline(
    quantity: str, value: float, spread: float = 0.0, null: dict[str, float] | None = None, **where: object
) -> Given:
    estimate = Estimate(value, value - spread, value + spread, 9)
    return Given((row("headline", quantity, estimate, where=where, nulls=null),))


def measured(*answers: tuple[Given, ModelConfig, bool]) -> Measured:
    """Each answer is a result, the network's config, and whether it is the untrained one."""
    samples = dyck_samples_of([[("(:", Role.QUERY), (")\n", Role.ANSWER)]], [(0, 1, 1, False, False)])
    networks = tuple(
        Network(
            name=f"network {i}", config=config, described={}, batches=lambda data, sites: iter(()), untrained=untrained
        )
        for i, (_, config, untrained) in enumerate(answers)
    )
    return Measured(
        data=DataSet(name="dyck", parts=(samples,)), networks=networks, results=tuple(a[0] for a in answers)
    )


def test_a_figure_is_known_to_half_of_its_last_digit() -> None:
    assert known_to((0.24, 0.24)) == pytest.approx((0.235, 0.245))
    assert known_to((2.0, 3.0)) == pytest.approx((1.5, 3.5))


def test_the_verdict_is_whether_two_ranges_meet() -> None:
    assert verdict((0.1, 0.3), (0.2, 0.4)) == ("matches", "")
    assert verdict((0.1, 0.2), (0.2, 0.4)) == ("matches", "")
    assert verdict((0.0, 0.1), (0.2, 0.4)) == ("differs", "lower")
    assert verdict((0.5, 0.6), (0.2, 0.4)) == ("differs", "higher")


@pytest.mark.parametrize(
    ("value", "null", "expected"),
    [(0.3, 0.1, True), (0.9, 0.1, True), (0.15, 0.1, False), (0.3, 0.5, True), (0.45, 0.5, False), (0.3, 0.3, False)],
)
def test_as_far_as_the_printed_range_is_seen_from_the_null(value: float, null: float, expected: bool) -> None:
    assert reaches(value, (0.2, 0.4), null) == expected


def test_a_cosine_in_the_printed_range_matches_and_the_untrained_network_is_named() -> None:
    low, high = printed.numbers("mechanism", "q_k_cosine_across_visits")
    null = {"shuffled": 0.5}
    for value, answer in (((low + high) / 2, "matches"), (low - 0.2, "differs")):
        for untrained, as_far in ((0.99, True), (low - 0.05, False)):
            ours, other = (headline("Q cosine, raw", x, 0.01, null, visit="1 vs 2") for x in (value, untrained))
            results = {("dyck", SIMILARITY): measured((ours, LOOPED, False), (other, LOOPED, True))}
            found = pick(reproduction.rows(results), quantity="Q cosine")
            assert (found["verdict"], found["value"], found["n"]) == (answer, value, 9)
            assert found["in_untrained"] == untrained
            assert found["null_chance"] == 0.5
            assert (AS_FAR in str(found["note"])) == as_far
            assert ("lower" in str(found["note"])) == (answer == "differs")


def test_experts_are_compared_as_shares_of_all_that_a_token_chooses() -> None:
    config = replace(LOOPED, top_k=4)
    ours = headline("experts shared", 1.2, 0.1, {"popularity": 0.4}, visit="1 vs 2")
    found = pick(reproduction.rows({("code", OVERLAP): measured((ours, config, False))}), on="code",
                 quantity="share of experts kept")  # fmt: skip
    assert (found["value"], found["low"], found["null_chance"]) == pytest.approx((0.3, 0.275, 0.1))
    assert (found["paper"], found["verdict"]) == ("0.25 to 0.375", "matches")


def test_a_baseline_without_a_second_visit_is_not_testable() -> None:
    second = row("headline", "start mass", None, where={"visit": 2, "head": "mean"}, note="one visit")
    first = headline("start mass", printed.number("mechanism", "bos_mass", "visit_1"), visit=1, head="mean")
    found = reproduction.rows({("dyck", SINK): measured((Given((*first.table, second)), BASELINE, False))})
    assert pick(found, quantity="start mass, visit 1")["verdict"] == "matches"
    of_second = pick(found, quantity="start mass, visit 2")
    assert (of_second["verdict"], of_second["value"], of_second["note"]) == ("not testable", None, "one visit")


def test_dyck_is_compared_at_the_shots_of_the_paper_or_not_at_all() -> None:
    def at(shots: int) -> list[Row]:
        smelt, baseline, untrained = (
            headline("exact match", value, 0.01, queries="all", shots=shots) for value in (0.3, 0.9, 0.0)
        )
        answers = ((smelt, LOOPED, False), (baseline, BASELINE, False), (untrained, LOOPED, True))
        return reproduction.rows({("shots", reproduction.DYCK): measured(*answers)})

    assert [(entry["verdict"], entry["note"]) for entry in at(32)] == [("matches", ""), ("differs", "higher")]
    few = at(8)
    assert [(entry["verdict"], entry["value"]) for entry in few] == [("not testable", None)] * 2
    assert few[0]["note"] == "3 shots fit the context of 64 tokens"


def test_every_claim_names_a_printed_figure_and_the_table_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    for claim in CLAIMS:
        printed.entry("mechanism", *claim.figure.split("."))
    results = {
        (samples, claim.probe): measured((Given(()), LOOPED, False)) for claim in CLAIMS for samples in claim.samples
    }
    report.print_tables([reproduction.table(results, "looped")], [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "The paper's figures against looped; verdict not testable"
    for claim in CLAIMS:
        assert sum(line.startswith(f"{claim.what} ") for line in lines) == len(claim.samples)
