"""Attention of one head on one sample: visit 1, visit 2 and their difference side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from app.widgets.address import check_one_of
from app.widgets.capture_folder import chosen_capture
from cache.store import Capture
from probes.attention_map import PATTERN, attention_figure, attention_frame, drawable, read_patterns
from probes.running.exports import Facts, csv_text, file_name, html_text, json_text
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

SNIPPET = """\
from cache.store import Capture
from probes.attention_map import attention_figure, read_patterns

capture = Capture({path!r})
patterns = read_patterns(capture, sample={sample}, layer={layer}, head={head}, visits={visits})
figure = attention_figure(patterns, capture.samples, sample={sample}, causal={causal}, where={where!r})
figure.show()
"""


def attention_page(folder: Path) -> None:
    """The maps of the sample, layer and head in the address."""
    st.title("Attention, both visits")
    capture = chosen_capture(folder)
    if capture is None:
        return
    try:
        recorded = drawable(capture)
    except UserError as error:
        st.error(str(error))
        return
    layers, several = list(recorded.visits), recorded.revisited()
    with st.sidebar:
        num_samples = len(capture)
        check_one_of("sample", [str(number) for number in range(1, num_samples + 1)], 1)
        sample = st.number_input(f"Sample, 1 to {num_samples}", 1, num_samples, key="sample", bind="query-params") - 1
        start = layers.index(several[0]) if several else 0
        layer = _numbered("Layer", layers, start)
        head = _numbered("Head", recorded.heads)
        visits = recorded.visits[layer]
        if len(visits) > 2:
            earlier = _numbered("Earlier visit", visits[:-1])
            visits = (earlier, _numbered("Later visit", [visit for visit in visits if visit > earlier]))
    if len(visits) == 1:
        st.info(_why_one_map(capture, layer, several))
    try:
        patterns = read_patterns(capture, sample=sample, layer=layer, head=head, visits=visits)
    except UserError as error:
        st.error(str(error))
        return
    causal, at = capture.architecture.causal, f"layer {layer + 1}, head {head + 1}"
    figure = attention_figure(patterns, capture.samples, sample, causal=causal, where=at)
    name = (capture.path.name, f"sample-{sample + 1}", f"layer-{layer + 1}", f"head-{head + 1}")
    picture = {"filename": file_name("attention", *name, suffix="png").removesuffix(".png"), "scale": 2}
    st.plotly_chart(figure, key="maps", config={"displaylogo": False, "toImageButtonOptions": picture})
    st.caption(
        "A row is a query, a column a key; a key that a query cannot see is left white. "
        "Drag to zoom into all maps at once, double-click to come back."
    )
    facts = {
        "capture": capture.path.name, "digest": capture.digest, "site": PATTERN, "sample": sample + 1,
        "layer": layer + 1, "head": head + 1, "visits": [visit + 1 for visit in visits],
    }  # fmt: skip
    _show_downloads(figure, attention_frame(patterns, capture.samples, sample, causal=causal), name, facts)
    with st.expander("The sample as text"):
        st.code(capture.text(sample), language=None, wrap_lines=True)
    with st.expander("The same in Python"):
        st.code(
            SNIPPET.format(
                path=str(capture.path), sample=sample, layer=layer, head=head, visits=visits, causal=causal, where=at
            )
        )


def _show_downloads(figure: "Figure", frame: "DataFrame", name: Sequence[str], facts: Facts) -> None:
    """The numbers of the maps and the maps themselves, as files that say what they are of."""
    made = {
        "csv": ("text/csv", csv_text(frame, facts)),
        "json": ("application/json", json_text(frame.to_dict("list"), facts)),
        "html": ("text/html", html_text([figure], " ".join(name), facts)),
    }
    row = st.container(horizontal=True)
    for kind, (mime, text) in made.items():
        label = f"Attention as {kind.upper()}"
        row.download_button(label, text, file_name("attention", *name, suffix=kind), mime, on_click="ignore", key=kind)


def _numbered(label: str, numbers: Sequence[int], start: int = 0) -> int:
    """A choice among numbers from 0, which the page and its address count from 1."""
    shown = [number + 1 for number in numbers]
    check_one_of(label.split()[0].lower(), [str(number) for number in shown], shown[start])
    return st.selectbox(label, shown, start, key=label.split()[0].lower(), bind="query-params") - 1


def _why_one_map(capture: Capture, layer: int, several: list[int]) -> str:
    loops = capture.architecture.loops
    if not loops:
        return "This network visits each layer once (a Baseline), so there is one map and no difference."
    inside = any(layer in loop.layers for loop in loops)
    reason = "was recorded on one visit only" if inside else "lies outside the loop and is visited once"
    both = ", ".join(str(number + 1) for number in several) or "none"
    return f"Layer {layer + 1} {reason}, so there is one map and no difference. Layers with two visits: {both}."
