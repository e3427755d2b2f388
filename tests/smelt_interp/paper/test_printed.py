"""Printed figures are read by their path, and a path that leads nowhere says so."""

import pytest

from smelt_interp.paper import printed


def test_a_figure_is_what_the_file_holds() -> None:
    assert printed.figure("scaling_law", "baseline", "E").text == printed.entry("scaling_law")["baseline"]["E"]
    assert printed.number("scaling_law", "baseline", "E") == float(printed.text("scaling_law", "baseline", "E"))
    assert printed.text("grid", "rows", 0, "scale") == "100M"
    assert printed.integer("architecture", "top_k") == printed.number("architecture", "top_k")
    assert len(printed.numbers("sparsity", "levels")) == printed.length("sparsity", "levels")
    assert set(printed.names("mechanism", "bos_mass")) == {"visit_1", "visit_2"}


@pytest.mark.parametrize(
    ("read", "path"),
    [
        (printed.entry, ("grid", "absent")),
        (printed.entry, ("grid", "rows", 8)),
        (printed.entry, ("grid", "rows", -1)),
        (printed.number, ("grid", "rows", 0, "scale")),
        (printed.integer, ("scaling_law", "baseline", "E")),
        (printed.text, ("architecture", "top_k")),
        (printed.figure, ("architecture", "top_k")),
        (printed.figure, ("grid", "rows", 0, "scale")),
        (printed.numbers, ("grid",)),
        (printed.names, ("grid", "rows")),
        (printed.length, ("scaling_law", "baseline", "E")),
    ],
)
def test_a_path_to_nothing_or_to_another_kind_raises(read, path) -> None:
    with pytest.raises(KeyError):
        read(*path)


@pytest.mark.parametrize(
    ("text", "value", "unit", "shown"),
    [("0.60", 0.6, 0.01, "0.60"), ("3.70e9", 3.7e9, 1e7, "3.70G"), ("102e6", 1.02e8, 1e6, "102M"), ("56", 56, 1, "56"),
     ("1975e3", 1.975e6, 1e3, "1975k"), ("2.2e21", 2.2e21, 1e20, "2.2e21"), ("-0.320", -0.32, 1e-3, "-0.320")],
)  # fmt: skip
def test_a_figure_is_known_to_half_of_its_last_digit(text: str, value: float, unit: float, shown: str) -> None:
    figure = printed.Figure(text)
    assert (figure.value, figure.shown()) == (value, shown)
    assert figure.unit == pytest.approx(unit)
    assert figure.bounds == pytest.approx((value - unit / 2, value + unit / 2))
    assert all(figure.agrees(bound) for bound in figure.bounds)
    assert not any(figure.agrees(value + sign * 0.51 * unit) for sign in (-1, 1))


def test_every_figure_that_is_printed_is_a_string() -> None:
    for path in (("mechanism",), ("downstream",), ("ablations_200M", "loop_span_val_loss"), ("scaling_law", "smelt")):
        pending = [printed.entry(*path)]
        while pending:
            value = pending.pop()
            if isinstance(value, dict | list):
                pending += value.values() if isinstance(value, dict) else value
            else:
                assert isinstance(value, str), (path, value)
