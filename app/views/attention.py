"""Attention of one head on one sample: visit 1, visit 2 and their difference side by side."""

from pathlib import Path

import streamlit as st

from app.widgets.capture_folder import chosen_capture
from cache.store import Capture
from probes.attention_map import attention_figure, drawable, read_patterns, sample_text
from smelt_interp.errors import UserError

SNIPPET = """\
from cache.store import Capture
from probes.attention_map import attention_figure, read_patterns

capture = Capture({path!r})
patterns = read_patterns(capture, sample={sample}, layer={layer}, head={head}, visits={visits})
attention_figure(patterns, capture.samples, sample={sample}).show()
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
        num_samples = len(capture.samples)
        sample = st.number_input(f"Sample, 1 to {num_samples}", 1, num_samples, key="sample", bind="query-params")
        start = layers.index(several[0]) if several else 0
        layer = st.selectbox("Layer", layers, start, key="layer", bind="query-params")
        head = st.selectbox("Head", recorded.heads, key="head", bind="query-params")
        visits = recorded.visits[layer]
        if len(visits) > 2:
            earlier = st.selectbox("Earlier visit", visits[:-1], key="earlier", bind="query-params")
            later_ones = [visit for visit in visits if visit > earlier]
            visits = (earlier, st.selectbox("Later visit", later_ones, key="later", bind="query-params"))
    if len(visits) == 1:
        st.info(_why_one_map(capture, layer, several))
    try:
        patterns = read_patterns(capture, sample=sample, layer=layer, head=head, visits=visits)
    except UserError as error:
        st.error(str(error))
        return
    st.plotly_chart(attention_figure(patterns, capture.samples, sample), key="maps")
    st.caption(
        "A row is a query, a column a key; a key that a query cannot see is left white. "
        "Drag to zoom into all maps at once, double-click to come back."
    )
    with st.expander("The sample as text"):
        st.code(sample_text(capture, sample), language=None, wrap_lines=True)
    with st.expander("The same in Python"):
        st.code(SNIPPET.format(path=str(capture.path), sample=sample, layer=layer, head=head, visits=visits))


def _why_one_map(capture: Capture, layer: int, several: list[int]) -> str:
    config = capture.config
    if config.num_visits == 1:
        return "This network visits each layer once (a Baseline), so there is one map and no difference."
    inside = config.loop_start < layer <= config.loop_stop
    reason = "was recorded on one visit only" if inside else "lies outside the loop and is visited once"
    both = ", ".join(map(str, several)) or "none"
    return f"Layer {layer} {reason}, so there is one map and no difference. Layers with two visits: {both}."
