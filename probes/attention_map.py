"""Attention of one head on one sample as a picture: a map for each visit, and the difference of two."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.store import Capture
from smelt_interp.data.samples import Role, Samples, role_name
from smelt_interp.errors import UserError
from smelt_interp.plan import Step

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

PATTERN = "attn.hook_pattern"
ROLE_COLOURS: Mapping[Role, str] = {
    Role.PAD: "#9aa3ad",
    Role.BOS: "#111827",
    Role.INSTRUCTION: "#7d6b5d",
    Role.DEMONSTRATION_INPUT: "#2b7a78",
    Role.DEMONSTRATION_ANSWER: "#b3388f",
    Role.QUERY: "#3f51b5",
    Role.ANSWER: "#c0392b",
    Role.TEXT: "#4b5563",
}
VISIT_COLOURS = ("#2f6db5", "#c8641b")
"""Earlier and later visit: hue of their maps and ends of the difference's scale."""
# Most attention is small: half of the hue is spent below 0.2.
_DEPTHS = ((0.0, 0.0), (0.02, 0.14), (0.2, 0.5), (1.0, 1.0))


Scale = list[list[float | str]]
"""A plotly colour scale: pairs of a position from 0 to 1 and a colour."""


def visible(
    pattern_TS: NDArray[np.generic], segment_start_T: NDArray[np.integer], *, causal: bool = True
) -> NDArray[np.float32]:
    """The pattern of the first T tokens, NaN for keys that a query cannot see: other segments, later ones if causal."""
    key_S = np.arange(pattern_TS.shape[1])
    same_TS = segment_start_T[:, None] == segment_start_T
    seen_TS = same_TS & (key_S <= key_S[:, None]) if causal else same_TS
    return np.where(seen_TS, pattern_TS, np.nan).astype(np.float32)


class Drawable(NamedTuple):
    """What attention a capture holds; all numbers count from 0."""

    visits: Mapping[int, tuple[int, ...]]
    """Each recorded layer with its recorded visits."""
    heads: tuple[int, ...]

    def revisited(self) -> list[int]:
        """The layers with more than one recorded visit."""
        return [layer for layer, visits in self.visits.items() if len(visits) > 1]


def drawable(capture: Capture) -> Drawable:
    """What can be drawn of a capture. Raises UserError when it holds no attention."""
    if PATTERN not in capture.kept:
        raise UserError(
            f"a capture must hold {PATTERN} to draw it; {capture.path} holds {', '.join(capture.sites) or 'no site'}: "
            "record it again with that site"
        )
    kept = capture.kept[PATTERN]
    visits: dict[int, tuple[int, ...]] = {}
    for layer, visit in sorted(capture.architecture.steps[index] for index in kept.steps):
        visits[layer] = (*visits.get(layer, ()), visit)
    return Drawable(visits, kept.heads)


def read_patterns(
    capture: Capture, *, sample: int, layer: int, head: int, visits: Sequence[int]
) -> dict[int, NDArray[np.generic]]:
    """The (T, S) matrix of one head on one sample for each of the visits; nothing else is read.

    All numbers count from 0. Raises UserError for a sample, layer, head or visit that was not recorded.
    """
    recorded = drawable(capture)
    for what, number, known in (
        ("sample", sample, range(len(capture.samples))),
        ("layer", layer, tuple(recorded.visits)),
        ("head", head, recorded.heads),
        *(("visit", visit, recorded.visits.get(layer, ())) for visit in visits),
    ):
        if number not in known:
            raise UserError(f"{what} must be a recorded one, {min(known)} to {max(known)} from 0; got {number}")
    steps = {visit: capture.architecture.steps.index(Step(layer, visit)) for visit in visits}
    row = slice(sample, sample + 1)
    return {visit: capture.read(PATTERN, step, row, head)[0] for visit, step in steps.items()}


def attention_frame(
    patterns: Mapping[int, NDArray[np.generic]], samples: Samples, sample: int, *, causal: bool = True
) -> "DataFrame":
    """A row for each query and each key that it can see, from 1, with their tokens: attention on every visit, and the
    share that uniform attention would give."""
    from pandas import DataFrame

    row = samples.rows(slice(sample, sample + 1))
    length = int(row.length_N[0])
    shown = {
        visit: visible(pattern_TS[:length, :length], row.segment_start_NT[0, :length], causal=causal)
        for visit, pattern_TS in sorted(patterns.items())
    }
    seen_TS = ~np.isnan(next(iter(shown.values())))
    query_N, key_N = np.nonzero(seen_TS)
    labels = np.array(row.labels(0)[:length], dtype=object)
    columns = {"query": query_N + 1, "key": key_N + 1, "query token": labels[query_N], "key token": labels[key_N]}
    columns |= {f"visit {visit + 1}": values_TS[seen_TS] for visit, values_TS in shown.items()}
    return DataFrame(columns | {"uniform": (1 / seen_TS.sum(1))[query_N]})


def attention_figure(
    patterns: Mapping[int, NDArray[np.generic]], samples: Samples, sample: int, *, causal: bool = True, where: str = ""
) -> "Figure":
    """One map a visit, side by side; with two visits a third one, the later minus the earlier.

    patterns: one or two visits, each with the (T, S) matrix of one head on the sample of that number; both count from
    0. Axes are the sample's tokens without padding, coloured by role; zooming into one map zooms into all. The pointer
    reads `where` (layer and head), both tokens, the share of attention on every visit, and a uniform one.
    """
    if not 1 <= len(patterns) <= 2:
        raise UserError(f"visits to draw must be one or two; got {len(patterns)}")
    row = samples.rows(slice(sample, sample + 1))
    length = int(row.length_N[0])
    visits = sorted(patterns)
    start_T = row.segment_start_NT[0, :length]
    maps = [visible(patterns[visit][:length, :length], start_T, causal=causal) for visit in visits]
    titles = [f"visit {visit + 1}" for visit in visits]
    seen_TS = ~np.isnan(maps[0])
    uniform_TS = np.broadcast_to(1 / seen_TS.sum(1, keepdims=True), seen_TS.shape)
    readings_TSV = np.stack([*maps, uniform_TS], axis=-1).astype(np.float32)
    lines = [f"{title} <b>%{{customdata[{at}]:.4f}}</b>" for at, title in enumerate([*titles, "uniform"])]
    hover = "<br>".join([where, "query %{y}, key %{x}", "share of the query's attention:", *lines]).removeprefix("<br>")
    hues: list[Scale] = [[[at, _mixed(VISIT_COLOURS[i], depth)] for at, depth in _DEPTHS] for i in range(len(visits))]
    lowest = [0.0] * len(visits)
    if len(visits) == 2:
        maps.append(maps[1] - maps[0])
        titles.append(f"visit {visits[1] + 1} − visit {visits[0] + 1}")
        hues.append(_diverging(*VISIT_COLOURS))
        lowest.append(-1.0)
    figure = _drawn(maps, titles, hues, lowest, axis_names(row), row.role_NT[0, :length])
    figure.update_traces(
        customdata=readings_TSV,
        hovertemplate=hover + "<extra>%{fullData.name} %{z:.4f}</extra>",
        selector={"type": "heatmap"},
    )
    return figure


def axis_names(samples: Samples) -> list[str]:
    """One name a token of the first row: its position from 1 and its label, coloured by role."""
    length = int(samples.length_N[0])
    labels = samples.labels(0)[:length]
    escaped = [label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for label in labels]
    roles = [Role(role) for role in samples.role_NT[0, :length]]
    return [
        f'<span style="color:{ROLE_COLOURS[role]}">{position} <b>{label}</b></span>'
        for position, (label, role) in enumerate(zip(escaped, roles, strict=True), start=1)
    ]


def _drawn(
    maps: list[NDArray[np.float32]],
    titles: list[str],
    hues: list[Scale],
    lowest: list[float],
    names: list[str],
    role_T: NDArray[np.uint8],
) -> "Figure":
    from plotly.graph_objects import Heatmap, Scatter
    from plotly.subplots import make_subplots

    count = len(maps)
    width = 0.6 if count == 1 else 1.0  # a single map across the page would be stretched out of shape
    figure = make_subplots(1, count, shared_xaxes="all", shared_yaxes="all", horizontal_spacing=0.03)
    for column, (values_TS, title, hue, low) in enumerate(zip(maps, titles, hues, lowest, strict=True), start=1):
        figure.add_trace(
            Heatmap(
                z=values_TS, x=names, y=names, zmin=low, zmax=1, colorscale=hue, hoverongaps=False, name=title,
                colorbar={
                    "orientation": "h", "thickness": 8, "y": 1.0, "yanchor": "bottom",
                    "x": width * (column - 0.5) / count, "len": width * 0.8 / count,
                    "title": {"text": title, "side": "top"},
                    "tickvals": [-1, -0.5, 0, 0.5, 1] if low < 0 else [0, 0.5, 1], "tickangle": 0,
                },
            ),
            1, column,
        )  # fmt: skip
    present = [Role(role) for role in sorted(set(role_T.tolist()))]
    for role in present:
        figure.add_trace(
            Scatter(
                x=[None], y=[None], mode="markers", name=role_name(role), hoverinfo="skip",
                marker={"color": ROLE_COLOURS[role], "size": 10, "symbol": "square"},
            ),
            1, 1,
        )  # fmt: skip
    figure.update_xaxes(
        title_text="key", title_standoff=22, tickangle=-90, tickfont_size=10, showgrid=False, constrain="domain"
    )
    figure.update_yaxes(autorange="reversed", tickfont_size=10, showgrid=False)
    figure.update_yaxes(title_text="query", row=1, col=1)
    if count == 1:
        figure.update_xaxes(domain=[0, width])
    figure.update_layout(
        height=620,
        margin={"l": 70, "r": 10, "t": 80, "b": 90},
        legend={"orientation": "h", "y": -0.24, "x": 0, "title": {"text": "tokens are", "side": "left"}},
    )
    return figure


def _mixed(colour: str, depth: float) -> str:
    """The colour at a depth from white (0) to itself (1)."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * depth):02x}" for part in parts)


def _diverging(negative: str, positive: str) -> Scale:
    below: Scale = [[(1 - at) / 2, _mixed(negative, depth)] for at, depth in reversed(_DEPTHS)]
    above: Scale = [[(1 + at) / 2, _mixed(positive, depth)] for at, depth in _DEPTHS[1:]]
    return below + above
