"""Quantities become rows: means over places, intervals, nulls, paired changes; and tables come back as records."""

import numpy as np
import pytest

from probes.statistics.bootstrap import interval, weights
from probes.statistics.grid import Grid, headline_loops
from probes.statistics.quantities import Quantity, as_table, headline_columns, record, records, rows_of, table
from tests.support.planted import BASELINE, LOOPED, pick

ARCHITECTURE = LOOPED.architecture()
GRID = Grid(architecture=ARCHITECTURE, loops=ARCHITECTURE.loops, steps=tuple(range(6)), heads=(0, 1))
N = 12
X_NLH = np.random.default_rng(0).standard_normal((N, 6, 2))
WEIGHT_RN = weights(0, np.arange(N))
VALUE_RLH = np.einsum("rn,nlh->rlh", WEIGHT_RN, X_NLH) / WEIGHT_RN.sum(1)[:, None, None]


def quantity(**changes: object) -> Quantity:
    values = {"name": "q", "value_RLH": VALUE_RLH, "places": GRID.places(), "n": N, **changes}
    return Quantity(**values)  # type: ignore[arg-type]  # fields by name


def test_every_place_has_its_mean_and_the_interval_of_that_mean() -> None:
    rows = records(table([quantity()]))
    assert [row["level"] for row in rows] == ["headline"] * 2 + ["layer"] * 6 + ["head"] * 12
    found = pick(rows, level="headline", visit=2)
    expected = interval(VALUE_RLH[:, 3:5].mean((1, 2)), N)
    assert (found["value"], found["low"], found["high"], found["n"]) == expected
    assert pick(rows, level="head", layers="3", visit=2, head=2)["value"] == pytest.approx(X_NLH[:, 4, 1].mean())


def test_a_change_is_paired_by_document() -> None:
    same_NLH = X_NLH.copy()
    same_NLH[:, 3:5] = X_NLH[:, 1:3] + 0.25  # visit 2 is visit 1 and a constant
    value_RLH = np.einsum("rn,nlh->rlh", WEIGHT_RN, same_NLH) / WEIGHT_RN.sum(1)[:, None, None]
    found = pick(records(table([quantity(value_RLH=value_RLH, change=True)])), visit="2 - 1")
    assert [found[name] for name in ("value", "low", "high")] == pytest.approx([0.25] * 3)


def test_nulls_are_numbers_or_stand_at_each_step_and_head_and_change_as_it_does() -> None:
    at_LH = np.arange(12.0).reshape(6, 2)
    rows = records(table([quantity(change=True, nulls={"flat": 0.5, "own": at_LH, "none": None})]))
    assert pick(rows, level="headline", visit=1)["null_own"] == at_LH[1:3].mean()
    assert pick(rows, level="head", layers="1", head=2)["null_own"] == 1
    change = pick(rows, visit="2 - 1")
    assert (change["null_flat"], change["null_own"], change["null_none"]) == (0, 4, None)


def test_what_is_not_defined_says_why_and_has_no_number() -> None:
    found = pick(records(table([quantity(undefined="no such tokens", nulls={"flat": 0.5})])), level="headline", visit=1)
    assert (found["value"], found["low"], found["null_flat"], found["note"]) == (None, None, None, "no such tokens")


def test_a_network_that_visits_once_needs_two_for_a_change() -> None:
    once = BASELINE.architecture()
    grid = Grid(architecture=once, loops=headline_loops(once), steps=(0, 1, 2, 3))
    rows = records(table([quantity(value_RLH=VALUE_RLH[:, :4, :1], places=grid.places(), change=True)]))
    change = pick(rows, visit="2 - 1")
    assert (change["value"], "needs two visits" in str(change["note"])) == (None, True)


def test_several_positions_may_make_one_number_their_own_way() -> None:
    whole = quantity(over=lambda positions: VALUE_RLH[:, positions].sum((1, 2)))
    assert pick(records(table([whole])), level="headline", visit=1)["value"] == VALUE_RLH[0, 1:3].sum()


def test_without_resamples_a_row_has_no_interval() -> None:
    found = pick(records(table([quantity(value_RLH=VALUE_RLH[:1])])), level="headline", visit=1)
    assert (found["value"], found["low"], found["n"]) == (VALUE_RLH[0, 1:3].mean(), None, N)


def test_numbers_by_sample_have_one_column_a_headline_row() -> None:
    columns = headline_columns([quantity(value_RLH=X_NLH, where={"update": "layer"}, change=True)], N)
    assert list(columns) == [f"q, looped 2-3, visit {visit}, layer" for visit in ("1", "2", "2 - 1")]
    first, second, change = columns.values()
    np.testing.assert_allclose(second, X_NLH[:, 3:5].mean((1, 2)))
    np.testing.assert_allclose(change, second - first)
    assert headline_columns([quantity(value_RLH=VALUE_RLH[:1])], N) == {}


def test_a_table_keeps_numbers_as_numbers_and_comes_back() -> None:
    rows = [
        record("headline", "a", interval(VALUE_RLH[:, 0, 0], N), where={"visit": 1}, nulls={"x": 0.5}),
        record("layer", "b", None, where={"visit": "2 - 1"}, note="why"),
        record("head", "c", float("inf"), where={"visit": 2}),
    ]
    frame = as_table(rows)
    assert list(frame.columns) == ["level", "quantity", "visit", "value", "low", "high", "n", "null_x", "note"]
    assert str(frame["value"].dtype) == str(frame["null_x"].dtype) == "float64"
    back = records(frame)
    assert [row["value"] for row in back] == [rows[0]["value"], None, None]
    assert [row["n"] for row in back] == [N, None, None]
    assert [row["visit"] for row in back] == [1, "2 - 1", 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"level": ["head"]}, "row 2 has no level or quantity"),
        ({"quantity": None}, "row 2 has no level or quantity"),
        ({"level": "layer"}, "row 2 has no layers"),
        ({"low": "x"}, "low of row 2 is 'x'"),
        ({"null_uniform": [1]}, r"null_uniform of row 2 is \[1\]"),
        ({"in_other": {}}, "in_other of row 2 is {}"),
        ({"n": 0.5}, "n of row 2 is 0.5"),
        ({"n": 10**30}, "n of row 2 is 1000"),
        ({"note": 3}, "note of row 2 is 3"),
        ({"visit": [1]}, r"visit of row 2 is \[1\]"),
    ],
)
def test_rows_of_a_file_are_taken_as_they_are_or_refused(changed: dict[str, object], message: str) -> None:
    row = {"level": "headline", "quantity": "loss", "value": None, "low": 1, "n": 3, "note": "", "visit": 2}
    assert rows_of([row, row], "value") == [row, row]
    with pytest.raises(ValueError, match=message):
        rows_of([row, row | changed], "value")
    with pytest.raises(ValueError, match="row 1 has no high"):
        rows_of([row], "high")
    with pytest.raises(ValueError, match="rows must be a list; got dict"):
        rows_of(row)
