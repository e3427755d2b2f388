"""Printed figures are read by their path, and a path that leads nowhere says so."""

import pytest

from smelt_interp.paper import printed


def test_a_figure_is_what_the_file_holds() -> None:
    assert printed.number("scaling_law", "baseline", "E") == printed.entry("scaling_law")["baseline"]["E"]
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
        (printed.text, ("scaling_law", "baseline", "E")),
        (printed.numbers, ("grid",)),
        (printed.names, ("grid", "rows")),
        (printed.length, ("scaling_law", "baseline", "E")),
    ],
)
def test_a_path_to_nothing_or_to_another_kind_raises(read, path) -> None:
    with pytest.raises(KeyError):
        read(*path)
