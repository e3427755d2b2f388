"""The curves of a probe along the steps: every network, every null, intervals, on axes that show them."""

import json

from probes.running.comparison import Panel, comparison_figure, needs_log, panels
from probes.statistics.quantities import Record


def row(layer: int, visit: int, value: float | None, **more: object) -> Record:
    given: Record = {"level": "layer", "quantity": "mass", "layers": str(layer), "visit": visit, "value": value}
    ends = {"low": None if value is None else value - 0.01, "high": None if value is None else value + 0.02}
    return {**given, **ends, "n": 3, "null_uniform": 0.25, "note": "", **more}  # type: ignore[dict-item]  # cells


ROWS = [
    row(1, 1, 0.1, in_other=0.3, in_other_low=0.2, in_other_high=0.4),
    row(2, 1, 0.6, in_other=None, in_other_low=None, in_other_high=None),
    row(3, 1, 0.5),
    row(2, 2, 0.02),
    row(3, 2, 0.03),
    row(4, 1, 0.2),
]


def test_the_loop_is_shaded_visit_by_visit_in_the_order_of_the_plan() -> None:
    (panel,) = panels(ROWS)
    assert panel.marks == ["1", "2", "3", "2", "3", "4"]
    assert panel.shades == [(1, 2, 1), (3, 4, 2)]


def test_every_network_and_null_is_drawn_visible_and_named_in_the_legend_once() -> None:
    figure = comparison_figure([*ROWS, *(r | {"quantity": "entropy"} for r in ROWS)], "ours", {"other": "theirs"})
    drawn = json.loads(figure.to_json())
    named = [trace["name"] for trace in drawn["data"] if trace["showlegend"]]
    assert sorted(named) == ["null: uniform", "ours", "theirs"]
    assert [trace["name"] for trace in drawn["data"]] == ["null: uniform", "ours", "theirs"] * 2
    ours = drawn["data"][1]
    assert ours["y"] == [0.1, 0.6, 0.5, 0.02, 0.03, 0.2]
    assert [round(end, 6) for end in ours["error_y"]["array"]] == [0.02] * 6
    assert [round(end, 6) for end in ours["error_y"]["arrayminus"]] == [0.01] * 6
    assert drawn["data"][2]["y"] == [0.3, None, None, None, None, None]
    assert "layer 2, visit 2" in ours["text"][3]
    shapes = [shape for shape in drawn["layout"]["shapes"] if shape["type"] == "rect"]
    assert [(shape["x0"], shape["x1"]) for shape in shapes[:2]] == [(0.5, 2.5), (2.5, 4.5)]


def test_an_axis_is_logarithmic_only_where_a_linear_one_would_be_flat() -> None:
    def panel(*values: float) -> Panel:
        return Panel("mass", [row(n, 1, value, null_uniform=None) for n, value in enumerate(values)], [], [])

    assert needs_log(panel(1, 2, 2, 3, 900))
    assert not needs_log(panel(1, 2, 2, 3, 30))
    assert not needs_log(panel(-1, 2, 2, 3, 900))


def test_a_quantity_without_steps_is_drawn_at_its_headline() -> None:
    rows = [
        {"level": "headline", "quantity": "match", "queries": queries, "shots": 8, "value": value, "low": None,
         "high": None, "n": 4, "null_constant": 0.1, "note": ""}
        for queries, value in (("all", 0.9), ("hidden", 1.0))
    ]  # fmt: skip
    (panel,) = panels(rows)
    assert panel.marks == ["queries all", "queries hidden"]
    figure = comparison_figure(rows, "ours", {})
    assert [(trace["name"], trace["mode"]) for trace in json.loads(figure.to_json())["data"]] == [
        ("null: constant", "lines+markers"),
        ("ours", "lines+markers"),
    ]
    # With several shots these are the axis, and no line leads from some queries to others.
    parted = panels([each | {"shots": shots} for shots in (0, 8) for each in rows])
    assert [(panel.title, panel.marks) for panel in parted] == [
        ("match, all", ["shots 0", "shots 8"]), ("match, hidden", ["shots 0", "shots 8"]),
    ]  # fmt: skip


def test_without_a_number_there_is_no_figure() -> None:
    assert comparison_figure([row(1, 1, None, null_uniform=None)], "ours", {}) is None
