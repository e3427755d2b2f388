"""Attention of one sample: every head of a layer, then one head on both visits beside other networks, by token."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import streamlit as st
from numpy import generic
from numpy.typing import NDArray
from pandas import DataFrame

from app.widgets.address import check_address, check_each_of, check_one_of
from app.widgets.canvas import show_canvas, tokens_of
from app.widgets.capture_folder import chosen_capture, other_capture_names
from app.widgets.sample import choose_number, choose_sample
from cache.store import Capture
from probes import attention_map
from probes.attention_map import PATTERN, Drawable
from probes.running.exports import csv_text, file_name, json_text
from probes.running.pictures import SCALES, Map, Scale, png_bytes, svg_text
from smelt_interp.errors import UserError
from smelt_interp.plan import Step

SNIPPET = """\
from cache.store import Capture
from probes.attention_map import attention_frame, read_patterns

capture = Capture({path!r})
patterns = read_patterns(capture, sample={sample}, layer={layer}, head={head}, visits={visits})
frame = attention_frame(patterns, capture.sample({sample}).samples, causal={causal})
"""
HINT = (
    "Click a head, or press ← →; ↑ ↓ layer, Page Up and Down sample. Point to read a cell, click it or a token to pin "
    "its query, Escape lets go. Drag a square to zoom, + and − zoom too, a double click or 0 shows all. "
    "Grey is what a query cannot see, white is 0."
)
NONE = "none"
FIELDS = (140, 90, 90, 140, 130, 140, 240)
"""Pixels of each choice: none is cut."""


class Choice(NamedTuple):
    """What the page is asked to show; numbers from 0."""

    sample: int
    layer: int
    head: int
    visits: tuple[int, ...]
    query: int | None
    """From 1, as the canvas has it."""
    zoom: str
    """The square that is shown, as the canvas has it; empty for all."""
    scale: Scale
    second: str
    """The capture of the second row, or NONE."""


def attention_page(folder: Path) -> None:
    """The heads and maps of the sample, layer and head in the address."""
    st.title("Attention, both visits")
    capture = chosen_capture(folder)
    if capture is None:
        return
    try:
        recorded = attention_map.drawable(capture)
    except UserError as error:
        st.error(str(error))
        return
    _shown(folder, capture, recorded, other_capture_names(folder, capture))


@st.fragment
def _shown(folder: Path, capture: Capture, recorded: Drawable, others: Sequence[str]) -> None:
    """All that changes with a choice. A fragment: the rest of the page is not run again."""
    try:
        choice = _choose(capture, recorded, others)
        if len(recorded.visits[choice.layer]) == 1:
            st.info(_why_one_map(capture, choice.layer, recorded.revisited()))
        _draw(folder, capture, recorded, choice)
    except UserError as error:
        st.error(str(error))


def _choose(capture: Capture, recorded: Drawable, others: Sequence[str]) -> Choice:
    """A row of widgets, or as many as the page's width asks for; the canvas changes them too. Raises UserError for a
    capture that cannot be read."""
    several, layers = recorded.revisited(), list(recorded.visits)
    line = st.container(horizontal=True)
    row = [line.container(width=pixels) for pixels in FIELDS]
    with row[0]:
        sample = choose_sample(capture)
    with row[1]:
        layer = choose_number("Layer", layers, layers.index(several[0]) if several else 0)
    with row[2]:
        head = choose_number("Head", recorded.heads)
    most = capture.manifest.num_tokens
    with row[3]:
        check_one_of("query", [str(number) for number in range(1, most + 1)], "none")
        query = st.number_input("Pinned query", 1, most, None, key="query", bind="query-params", placeholder="none")
    with row[4]:
        zoom = _choose_zoom(int(capture.samples.length_N[sample]))
    with row[5]:
        check_one_of("scale", [*SCALES], SCALES[1])
        scale = st.selectbox("Colour scale", SCALES, 1, key="scale", bind="query-params")
    with row[6]:
        check_one_of("second", [NONE, *others], NONE)
        second = st.selectbox(
            "Second row", [NONE, *others], key="second", bind="query-params",
            help="Another capture of the same samples, at the same steps of its plan: the Baseline at the same depth, "
            "the network untrained, another span looped.",
        )  # fmt: skip
    visits = recorded.visits[layer]
    if len(visits) > 2:
        shown = [visit + 1 for visit in visits]
        check_each_of("visits", [str(number) for number in shown])
        pair = st.select_slider("Visits", shown, (shown[0], shown[-1]), key="visits", bind="query-params")
        visits = tuple(sorted({visit - 1 for visit in pair}))
    return Choice(sample, layer, head, visits, query, zoom, scale, second)


def _choose_zoom(size: int) -> str:
    """The square of a sample of that many tokens; another sample may be too short for the one that was chosen."""
    check_address("zoom", partial(attention_map.check_square, size), "all")
    try:
        attention_map.check_square(size, st.session_state.get("zoom", ""))
    except UserError as error:
        st.session_state["zoom"] = ""
        st.warning(f"{error}: shown is all")
    return st.text_input("Zoom", key="zoom", bind="query-params", placeholder="all",
                         help="The first query, the first key, and how many cells: drag a square.")  # fmt: skip


def _draw(folder: Path, capture: Capture, recorded: Drawable, choice: Choice) -> None:
    """The canvas and the files of what it shows. Raises UserError for a capture that cannot be read."""
    steps = tuple(capture.architecture.steps.index(Step(choice.layer, visit)) for visit in choice.visits)
    captures = [capture, *([Capture(folder / choice.second)] if choice.second != NONE else [])]
    rows, arrays = [], {}
    for each in captures:
        sent = attention_map.row_of(each, choice.sample, steps, choice.head)
        if sent is None:
            st.info(f"{each.path.name} has no recorded attention at these steps and this head.")
            continue
        rows.append({
            "name": each.path.name, "heads": [head + 1 for head in sent.heads], "titles": sent.titles,
            "difference": sent.difference,
        })  # fmt: skip
        arrays[f"row {len(rows) - 1}"] = sent.cells
    grid = _grid(str(capture.path), capture.digest, choice.sample, steps)
    sample = capture.sample(choice.sample).samples
    scene = {
        **tokens_of(sample), "causal": capture.architecture.causal, "scale": choice.scale, "rows": rows, "hint": HINT,
        "grid": {
            "heads": [head + 1 for head in recorded.heads], "order": grid.order, "about": grid.about,
            "caption": grid.caption,
        },
        "label": f"sample {choice.sample + 1}, layer {choice.layer + 1}",
        "chosen": {
            "sample": choice.sample + 1, "layer": choice.layer + 1, "head": choice.head + 1, "query": choice.query,
            "zoom": choice.zoom,
        },
    }  # fmt: skip
    known = {
        "sample": list(range(1, len(capture) + 1)), "layer": [layer + 1 for layer in recorded.visits],
        "head": [head + 1 for head in recorded.heads], "query": [None, *range(1, capture.manifest.num_tokens + 1)],
    }  # fmt: skip
    size = int(sample.length_N[0])
    checks = {"zoom": partial(attention_map.check_square, size)}
    show_canvas("canvas", scene, {"thumbnails": grid.thumbnails, **arrays}, known, checks)
    _show_downloads(capture, choice)


@st.cache_data(max_entries=256, show_spinner=False)
def _grid(path: str, digest: str, sample: int, steps: tuple[int, ...]) -> attention_map.HeadGrid:
    """Of one layer, whatever head is chosen. `digest` says that the capture is the same."""
    return attention_map.head_grid(Capture(path), sample, steps)


def _show_downloads(capture: Capture, choice: Choice) -> None:
    """The numbers and the picture of one head as files that say what they are of, made when they are asked for."""
    causal = capture.architecture.causal
    facts = {
        "capture": capture.path.name, "digest": capture.digest, "site": PATTERN, "sample": choice.sample + 1,
        "layer": choice.layer + 1, "head": choice.head + 1, "visits": [visit + 1 for visit in choice.visits],
        "scale": choice.scale,
    }  # fmt: skip

    def read() -> Mapping[int, NDArray[generic]]:
        return attention_map.read_patterns(
            capture, sample=choice.sample, layer=choice.layer, head=choice.head, visits=choice.visits
        )

    sample = capture.sample(choice.sample).samples

    def maps() -> list[Map]:
        return attention_map.attention_maps(read(), sample, causal=causal)

    def frame() -> DataFrame:
        return attention_map.attention_frame(read(), sample, causal=causal)

    made: dict[str, tuple[str, Callable[[], str | bytes]]] = {
        "png": ("image/png", lambda: png_bytes([maps()], choice.scale, facts)),
        "svg": ("image/svg+xml", lambda: svg_text([maps()], choice.scale, facts)),
        "csv": ("text/csv", lambda: csv_text(frame(), facts)),
        "json": ("application/json", lambda: json_text(frame().to_dict("list"), facts)),
    }
    name = (f"sample-{choice.sample + 1}", f"layer-{choice.layer + 1}", f"head-{choice.head + 1}")
    row = st.container(horizontal=True)
    for kind, (mime, make) in made.items():
        called = file_name("attention", capture.path.name, *name, suffix=kind)
        row.download_button(f"Attention as {kind.upper()}", make, called, mime, on_click="ignore", key=kind)
    with st.expander("The sample as text"):
        st.code(capture.text(choice.sample), language=None, wrap_lines=True)
    with st.expander("The same in Python"):
        st.code(
            SNIPPET.format(
                path=str(capture.path), sample=choice.sample, layer=choice.layer, head=choice.head,
                visits=choice.visits, causal=causal,
            )
        )  # fmt: skip


def _why_one_map(capture: Capture, layer: int, several: Sequence[int]) -> str:
    loops = capture.architecture.loops
    if not loops:
        return "This network visits each layer once (a Baseline), so there is one map and no difference."
    inside = any(layer in loop.layers for loop in loops)
    reason = "was recorded on one visit only" if inside else "lies outside the loop and is visited once"
    both = ", ".join(str(number + 1) for number in several) or "none"
    return f"Layer {layer + 1} {reason}, so there is one map and no difference. Layers with two visits: {both}."
