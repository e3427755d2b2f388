"""Everything that a probe measured along the steps, as curves: a panel a quantity, a line a network, its nulls beside.

All lines of a panel share their axes, so that a network stands against its Baseline, its untrained self and what chance
gives. A quantity without steps is drawn at its headline rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, groupby
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from probes.running.report import cell_text, keys_of, nulls_of
from probes.statistics.quantities import NULL_PREFIX, OTHER_PREFIX, Record, error_bars

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NETWORK_COLOURS = ("#3f7fd0", "#d9752b", "#2a9d8f", "#b3388f", "#8d7a3b", "#7d5fc4")
NULL_COLOUR = "#8a94a3"
NULL_DASHES = ("dot", "dash", "dashdot", "longdash", "longdashdot")
VISIT_SHADES = ("rgba(63,127,208,0.10)", "rgba(217,117,43,0.12)", "rgba(42,157,143,0.12)")
"""Behind the steps of a loop, a visit each."""
LOG_FROM = 20
"""An axis is logarithmic where the largest number is so many times the median, which a linear one would draw flat."""
COLUMNS = 3
PANEL_HEIGHT = 230
MARKS_WIDTH = 40
"""Characters that stand below a panel without touching."""


Drawn = dict[str, object]
"""A shape or a mark, as plotly takes it."""


class Panel(NamedTuple):
    """One quantity: its rows in the order of the plan."""

    title: str
    rows: list[Record]
    """Each has a value of some network."""
    marks: list[str]
    """What stands below each row on the axis."""
    shades: list[tuple[int, int, int]]
    """First and last row of a visit of a loop, and the visit, from 1."""


def panels(rows: Sequence[Record]) -> list[Panel]:
    """The rows along the steps, or where there are none the headline, a panel for each quantity and kind.

    A line joins what follows on an axis: where a kind is a number, as shots are, it is the axis, and the others part.
    """
    level = "layer" if any(row["level"] == "layer" for row in rows) else "headline"
    shown = [row for row in rows if row["level"] == level and _numbers(row)]
    kinds = [name for name in keys_of(shown) if name not in ("quantity", "layers", "visit")]
    # What is the same in every row says nothing; without steps the kinds are the places of the axis.
    kinds = [name for name in kinds if len({row.get(name) for row in shown}) > 1]
    counted = [name for name in kinds if all(isinstance(row.get(name), int | float) for row in shown)][:1]
    by = kinds if level == "layer" else [name for name in kinds if counted and name not in counted]
    found: dict[tuple[str, ...], list[Record]] = {}
    for row in shown:
        title = (str(row["quantity"]), *(str(row[name]) for name in by if row.get(name) is not None))
        found.setdefault(title, []).append(row)
    return [_panel(", ".join(title), of, level, kinds) for title, of in found.items()]


def _panel(title: str, rows: list[Record], level: str, kinds: Sequence[str]) -> Panel:
    if level == "layer":
        return Panel(title, rows, [str(row["layers"]) for row in rows], list(_visits(rows)))
    names = [name for name in ("layers", "visit", *kinds) if len({row.get(name) for row in rows}) > 1]
    return Panel(title, rows, [", ".join(f"{name} {cell_text(row.get(name))}" for name in names) for row in rows], [])


def _visits(rows: Sequence[Record]) -> Iterator[tuple[int, int, int]]:
    """Runs of rows of one visit, of layers that have rows on several."""
    visits: dict[object, set[object]] = {}
    for row in rows:
        visits.setdefault(row["layers"], set()).add(row.get("visit"))
    first = 0
    for visit, run in groupby(rows, lambda row: row.get("visit") if len(visits[row["layers"]]) > 1 else None):
        last = first + len(list(run)) - 1
        if isinstance(visit, int):
            yield first, last, visit
        first = last + 1


def _numbers(row: Record) -> list[float]:
    """Every number that is drawn of a row: each network's and each null."""
    names = [name for name in row if name.startswith((NULL_PREFIX, OTHER_PREFIX))]
    return [float(cell) for name in ("value", *names) if isinstance(cell := row.get(name), int | float)]


def needs_log(panel: Panel) -> bool:
    """Whether a linear axis would draw most of a panel flat."""
    numbers = [number for row in panel.rows for number in _numbers(row)]
    return min(numbers) > 0 and max(numbers) > LOG_FROM * median(numbers)


def comparison_figure(rows: Sequence[Record], name: str, others: Mapping[str, str]) -> "Figure | None":
    """The panels of joined rows (`report.join_networks`); None without any row to draw.

    name: of the first network; others: of each network beside it, with what it is called.
    """
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    drawn = panels(rows)
    if not drawn:
        return None
    columns = min(COLUMNS, len(drawn))
    lines = ceil(len(drawn) / columns)
    height = PANEL_HEIGHT * lines
    # Room for the axis below a panel, and for the title above the next.
    figure: Figure = make_subplots(lines, columns, subplot_titles=[panel.title for panel in drawn],
                                   vertical_spacing=min(70 / (height + 60), 1 / max(lines - 1, 1)))  # fmt: skip
    networks = {"": name, **{OTHER_PREFIX + column: called for column, called in others.items()}}
    shades: list[Drawn] = []
    marks: list[Drawn] = []
    named: set[str] = set()
    for index, panel in enumerate(drawn):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        _add_nulls(figure, panel, place, named)
        for (column, called), colour in zip(networks.items(), cycle(NETWORK_COLOURS)):
            _add_network(figure, panel, column, called, colour, place, named)
        for shade, mark in _shades(panel, str(index + 1) if index else ""):
            shades.append(shade)
            marks.append(mark)
        every = ceil(sum(len(mark) + 1 for mark in panel.marks) / MARKS_WIDTH)
        ticks = list(range(0, len(panel.marks), every))
        figure.update_xaxes(tickvals=ticks, ticktext=[panel.marks[tick] for tick in ticks], showgrid=False,
                            range=[-0.5, len(panel.marks) - 0.5], title_standoff=4, **place,
                            title_text="layer" if panel.rows[0]["level"] == "layer" else "")  # fmt: skip
        if needs_log(panel):
            figure.update_yaxes(type="log", title_text="log", title_standoff=2, **place)
    # All at once: plotly's own shading of a panel checks every shape and mark drawn before it, again for each.
    figure.update_layout(
        shapes=shades, annotations=[*figure.layout.annotations, *marks],
        height=height + 90, margin={"l": 50, "r": 10, "t": 80, "b": 50}, hovermode="closest",
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0},
    )  # fmt: skip
    figure.update_annotations(font_size=13)
    return figure


def _shades(panel: Panel, number: str) -> Iterator[tuple[Drawn, Drawn]]:
    """Behind each visit's rows a rectangle as high as the panel, and its name. number: as plotly writes an axis's."""
    for first, last, visit in panel.shades:
        yield visit_shade(first, last, visit, number)


def visit_shade(first: int, last: int, visit: int, number: str) -> tuple[Drawn, Drawn]:
    """The same of one visit, which counts from 1, from its first to its last row."""
    axes = {"xref": f"x{number}", "yref": f"y{number} domain"}
    left, colour = first - 0.5, VISIT_SHADES[(visit - 1) % len(VISIT_SHADES)]
    shade = {"type": "rect", "x0": left, "x1": last + 0.5, "y0": 0, "y1": 1, "fillcolor": colour, "line_width": 0}
    mark = {"text": f"visit {visit}", "x": left, "y": 1, "xanchor": "left", "yanchor": "top", "opacity": 0.8}
    return shade | axes | {"layer": "below"}, mark | axes | {"showarrow": False}


def _add_nulls(figure: "Figure", panel: Panel, place: Mapping[str, int], named: set[str]) -> None:
    from plotly.graph_objects import Scatter

    for column, dash in zip(nulls_of(panel.rows), cycle(NULL_DASHES)):
        called = "null: " + column.removeprefix(NULL_PREFIX).replace("_", " ")
        if all(row.get(column) is None for row in panel.rows):
            continue
        figure.add_trace(
            Scatter(x=list(range(len(panel.rows))), y=[row.get(column) for row in panel.rows], name=called,
                    legendgroup=called, showlegend=called not in named, mode="lines+markers",
                    marker={"symbol": "line-ew-open", "size": 7}, line={"color": NULL_COLOUR, "dash": dash, "width": 2},
                    text=[_place(row) for row in panel.rows],
                    hovertemplate=f"{panel.title}<br>%{{text}}<br><b>%{{y:.4g}}</b><extra>{called}</extra>"),
            **place,
        )  # fmt: skip
        named.add(called)


def _add_network(
    figure: "Figure", panel: Panel, column: str, called: str, colour: str, place: Mapping[str, int], named: set[str]
) -> None:
    """One network's values with their intervals. `column`: of its values, empty for the first network's."""
    from plotly.graph_objects import Scatter

    names = value, low, high = (column, f"{column}_low", f"{column}_high") if column else ("value", "low", "high")
    if all(row.get(value) is None for row in panel.rows):
        return
    figure.add_trace(
        Scatter(x=list(range(len(panel.rows))), y=[row.get(value) for row in panel.rows], name=called,
                legendgroup=called, showlegend=called not in named, mode="lines+markers",
                line={"color": colour, "width": 2}, marker_size=5,
                text=[_place(row) + _bracket(row.get(low), row.get(high)) for row in panel.rows],
                error_y={"type": "data", "symmetric": False, "thickness": 1, "width": 3,
                         **error_bars(panel.rows, names)},
                hovertemplate=f"{panel.title}<br><b>%{{y:.4g}}</b> %{{text}}<extra>{called}</extra>"),
        **place,
    )  # fmt: skip
    named.add(called)


def _place(row: Record) -> str:
    """`layer 5, visit 2`: where a row stands, as the pointer reads it."""
    names = {"layers": "layer" if row["level"] == "layer" else "layers"}
    return ", ".join(
        f"{names.get(name, name)} {row[name]}"
        for name in keys_of([row])
        if name != "quantity" and row[name] is not None
    )


def _bracket(low: object, high: object) -> str:
    return "" if low is None or high is None else f"<br>95% [{low:.4g}, {high:.4g}]"
