"""Every sample of a capture in a table, and the text of one, coloured by what the network did with each token."""

from pathlib import Path

import streamlit as st
from pandas import DataFrame
from pandas.api.types import is_numeric_dtype

from app.widgets.address import check_address, check_one_of
from app.widgets.canvas import show_canvas, tokens_of
from app.widgets.capture_folder import show_capture
from app.widgets.options import parse_option
from app.widgets.sample import choose_number, choose_sample
from cache.store import Capture
from probes import sample_values
from probes.running.exports import csv_text, file_name
from probes.sample_values import SHOWN, Colouring, Shown
from smelt_interp.errors import UserError

NONE = "none"
HINT = (
    "Each token is underlined in the colour of its role; ␣ is a space, \\n a newline, \\x.. a byte that is no "
    "character. Point at a token to read it."
)


def samples_page(folder: Path) -> None:
    """The table as the address filters and sorts it, and the sample that it names."""
    st.title("Samples")
    st.markdown("What the network read, how well it predicted it, and what each probe measured on each sample.")
    show_capture(folder, _show)


def _show(capture: Capture) -> None:
    """Raises UserError for a capture that cannot be read or measured."""
    able = sample_values.able(capture)
    with st.sidebar:
        sample = choose_sample(capture)
        known = [NONE, *able]
        start = "attention_sink" if "attention_sink" in able else NONE
        check_one_of("measured", known, start)
        measured = st.selectbox(
            "Measured by", known, known.index(start), key="measured", bind="query-params",
            help="A probe, by its command's name, whose numbers of each sample stand in the table.",
        )  # fmt: skip
    frame = _frame(str(capture.path), capture.digest, "" if measured == NONE else measured)
    _table(capture, _filtered(frame))
    st.subheader(f"Sample {sample + 1}")
    _text(capture, sample)


@st.cache_data(max_entries=16, show_spinner="Measuring each sample …")
def _frame(path: str, digest: str, measured: str) -> DataFrame:
    """`digest` says that the capture is the same."""
    capture = Capture(path)
    capture.check_shards()
    return sample_values.sample_frame(capture, measured)


def _filtered(frame: DataFrame) -> DataFrame:
    """The rows that the widgets let through, as they sort them."""
    columns = [name for name in frame if is_numeric_dtype(frame[name])]
    row = st.columns([1, 2, 1, 1, 1], vertical_alignment="bottom")
    with row[0]:
        check_one_of("show", [*SHOWN], SHOWN[0])
        show: Shown = st.selectbox(
            "Answers", SHOWN, key="show", bind="query-params", help="Wrong ones are the list of failures."
        )
    with row[1]:
        check_one_of("by", columns, columns[0])
        by = st.selectbox("Sort by", columns, key="by", bind="query-params")
    with row[2]:
        least = _bound("least", "At least")
    with row[3]:
        most = _bound("most", "At most")
    check_one_of("largest", ["true", "false"], "false")
    descending = row[4].toggle("Largest first", key="largest", bind="query-params")
    return sample_values.chosen_samples(frame, show=show, by=by, descending=descending, least=least, most=most)


def _bound(key: str, label: str) -> float | None:
    check_address(key, lambda text: parse_option(key, text, float), "none")
    return st.number_input(label, value=None, format="%g", key=key, bind="query-params", placeholder="any")


def _table(capture: Capture, shown: DataFrame) -> None:
    """A click on a row opens the sample, here and on every page."""

    def choose() -> None:
        picked = st.session_state["samples"]["selection"]["rows"]
        if picked:
            st.session_state["sample"] = int(shown["sample"].iloc[picked[0]])

    st.caption(f"{len(shown)} of {len(capture)} samples; click a row to open it.")
    st.dataframe(
        shown, hide_index=True, height=300, row_height=28, key="samples", on_select=choose, selection_mode="single-row"
    )
    facts = {"capture": capture.path.name, "digest": capture.digest, "samples": len(shown)}
    st.download_button(
        "Samples as CSV", lambda: csv_text(shown, facts), file_name("samples", capture.path.name, suffix="csv"),
        "text/csv", on_click="ignore", key="csv",
    )  # fmt: skip


@st.fragment
def _text(capture: Capture, sample: int) -> None:
    """A fragment: another colouring does not measure the samples again."""
    name, layer, visit = _colouring(capture)
    try:
        found = sample_values.coloured(capture, sample, name, layer, visit)
    except UserError as error:
        st.error(str(error))
        return
    scene = {
        **tokens_of(capture.sample(sample).samples), "hint": HINT, "most": found.most, "readings": found.readings,
        "summary": found.summary, "categories": found.categories, "label": f"text of sample {sample + 1}",
        "chosen": {"sample": sample + 1, "query": None}, "breaks": True,
    }  # fmt: skip
    show_canvas("text", scene, {"values": found.values_T}, {})


def _colouring(capture: Capture) -> tuple[Colouring, int, int]:
    """What colours the text, of which layer and visit; both from 0."""
    layers = sorted({step.layer for step in capture.architecture.steps})
    several = [layer for loop in capture.architecture.loops for layer in loop.layers]
    row = st.columns(3)
    with row[1]:
        layer = choose_number("Layer", layers, layers.index(several[0]) if several else 0)
    known = sample_values.colourings(capture, layer)
    with row[0]:
        check_one_of("colour", [*known], known[0])
        name = st.selectbox("Coloured by", known, key="colour", bind="query-params")
    with row[2]:
        visits = [step.visit for step in capture.architecture.steps if step.layer == layer]
        visit = choose_number("Visit", visits, 0)
    return name, layer, visit
