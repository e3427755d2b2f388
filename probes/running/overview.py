"""Every measure along the executed steps: a row a measure, a line a network at its own depth, its null beside it.

What stands for a probe in `OVERVIEW` is drawn at each step, and what `MORE` names. A comparison of two visits stands at
the later one's step. Another network stands at its own steps, so that a second visit is seen beside the layer that is
as deep there.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple, cast

from cache.store import Capture
from probes.running import catalog
from probes.running.comparison import NETWORK_COLOURS, NULL_COLOUR, Drawn, visit_shade
from probes.running.depth import AT_DEPTH
from probes.running.probe import refusal
from probes.running.report import nulls_of
from probes.statistics.grid import Where
from probes.statistics.quantities import NULL_PREFIX, Record, error_bars
from smelt_interp.architecture import Architecture
from smelt_interp.plan import label

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MORE: Mapping[str, tuple[Where, ...]] = {
    "expert_load": ({"quantity": "router entropy"}, {"quantity": "MaxVio"}),
    "residual_updates": ({"quantity": "stream variance"},),
}
"""Beside what stands for these probes, by their columns."""
FIRST = {"attention_sink", "residual_updates", "massive_activations"}
"""Their measures have a number at every step, and stand above those that compare visits."""
ROW_HEIGHT = 130
AROUND = 120
"""Pixels above and below the rows."""


class Line(NamedTuple):
    """One network's numbers of one measure."""

    network: str
    steps: list[int]
    """Steps of its own plan, from 0."""
    rows: list[Record]
    """One a step."""
    labels: list[str]
    """`layer 5, visit 2`."""


class Measure(NamedTuple):
    """One row of the figure."""

    probe: str
    title: str
    lines: list[Line]
    """Of the first network, then of those beside it that have any."""
    null: str
    """Its column; empty for none."""


def probes(capture: Capture) -> list[str]:
    """The names of those that are drawn of a capture, in order: they read sites that it has."""
    found = []
    for name in catalog.NAMES:
        probe = catalog.load(name)
        needed = probe.needs(capture.architecture)
        known = needed and not refusal(needed, capture.architecture) and set(needed) <= set(capture.kept)
        if known and (name in MORE or probe.OVERVIEW):
            found.append(name)
    return sorted(found, key=lambda name: name not in FIRST)


def measures(document: Mapping[str, object], architectures: Mapping[str, Architecture]) -> list[Measure]:
    """The rows that a kept result gives. architectures: of its networks, by name; the others are left out."""
    name = str(document["probe"])
    first, *_ = [str(network["name"]) for network in cast("list[Mapping[str, object]]", document["networks"])]
    found = []
    for result in cast("list[Mapping[str, object]]", document["results"]):
        of_network = {first: result["rows"], **cast("Mapping[str, object]", result.get("others", {}))}
        for where in (*catalog.load(name).OVERVIEW, *MORE.get(name, ())):
            lines = [
                line for network, rows in of_network.items() if network in architectures
                if (line := _line(network, cast("list[Record]", rows), where, architectures[network])).steps
            ]  # fmt: skip
            if lines and lines[0].network == first:
                words = [str(where["quantity"]), *(str(where[key]) for key in where if key in ("update",))]
                named = [null for null in nulls_of(lines[0].rows) if not null.endswith(AT_DEPTH)
                         and any(row.get(null) is not None for row in lines[0].rows)]  # fmt: skip
                found.append(Measure(name, ", ".join(words), lines, named[0] if named else ""))
    return found


def _line(network: str, rows: Sequence[Record], where: Where, architecture: Architecture) -> Line:
    """The rows of single steps that `where` describes, in the order of the plan."""
    steps = {(str(step.layer + 1), str(step.visit + 1)): index for index, step in enumerate(architecture.steps)}
    wanted = where.items() - {("head", "largest")}
    found: dict[int, Record] = {}
    for row in rows:
        later = str(row.get("visit")).rpartition(" vs ")[2]  # of a comparison; of one visit itself
        at = steps.get((str(row.get("layers")), later))
        if row["level"] == "layer" and at is not None and row["value"] is not None and wanted <= row.items():
            found.setdefault(at, row)
    order = sorted(found)
    return Line(network, order, [found[at] for at in order], [label(architecture.steps[at]) for at in order])


def figure(shown: Sequence[Measure], architecture: Architecture) -> "Figure":
    """The rows on one axis of steps, the visits of the first network's loops shaded; each point knows its probe and
    layer (`customdata`)."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    # A panel a measure, whose names stand once in the legend: its null, then each network.
    height = ROW_HEIGHT * len(shown)
    drawn: Figure = make_subplots(len(shown), 1, shared_xaxes=True, subplot_titles=[each.title for each in shown],
                                  vertical_spacing=min(26 / height, 1 / max(len(shown) - 1, 1)))  # fmt: skip
    names = list(dict.fromkeys(line.network for each in shown for line in each.lines))
    colour_of = dict(zip(names, cycle(NETWORK_COLOURS)))
    seen: set[str] = set()
    for at, each in enumerate(shown, start=1):
        if each.null:
            own = each.lines[0]
            drawn.add_trace(
                Scatter(x=own.steps, y=[row.get(each.null) for row in own.rows], mode="lines", name="null",
                        legendgroup="null", showlegend="null" not in seen, line={"color": NULL_COLOUR, "dash": "dot"},
                        customdata=_custom(each, own),
                        hovertemplate=f"null: {each.null.removeprefix(NULL_PREFIX)} %{{y:.4g}}<extra></extra>"),
                row=at, col=1,
            )  # fmt: skip
            seen.add("null")
        for line in each.lines:
            drawn.add_trace(
                Scatter(x=line.steps, y=[row["value"] for row in line.rows], name=line.network, text=line.labels,
                        legendgroup=line.network, showlegend=line.network not in seen, mode="lines+markers",
                        line={"color": colour_of[line.network], "width": 2}, marker_size=6,
                        error_y={"type": "data", "symmetric": False, "thickness": 1, "width": 2,
                                 **error_bars(line.rows)},
                        customdata=_custom(each, line),
                        hovertemplate=f"{each.title}<br>%{{text}} <b>%{{y:.4g}}</b><extra>{line.network}</extra>"),
                row=at, col=1,
            )  # fmt: skip
            seen.add(line.network)
    # One axis of steps below all, and the visits behind them.
    ticks = list(range(len(architecture.steps)))
    drawn.update_xaxes(tickvals=ticks, ticktext=[str(step.layer + 1) for step in architecture.steps], showgrid=False,
                       range=[-0.5, len(ticks) - 0.5])  # fmt: skip
    named = f"layer of {names[0]}, in the order of execution"  # the others stand at its ticks by number of step
    drawn.update_xaxes(title_text=named, row=len(shown), col=1)
    shades, marks = _shades(architecture, len(shown))
    drawn.update_layout(
        shapes=shades, annotations=[*drawn.layout.annotations, *marks], height=height + AROUND, hovermode="closest",
        margin={"l": 50, "r": 10, "t": 80, "b": 40},
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0},
    )  # fmt: skip
    drawn.update_annotations(font_size=12)
    return drawn


def _custom(each: Measure, line: Line) -> list[list[str]]:
    """Where a click on each point leads."""
    return [[each.probe, str(row["layers"])] for row in line.rows]


def _shades(architecture: Architecture, rows: int) -> tuple[list[Drawn], list[Drawn]]:
    """The visits of each loop behind every row, and their names in the first."""
    shades: list[Drawn] = []
    marks: list[Drawn] = []
    for loop in architecture.loops:
        for visit in range(loop.num_visits):
            inside = loop.steps(architecture.steps, visit)
            drawn = [visit_shade(inside[0], inside[-1], visit + 1, str(at + 1) if at else "") for at in range(rows)]
            shades += [shade for shade, _ in drawn]
            marks.append(drawn[0][1])
    return shades, marks
