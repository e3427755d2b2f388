"""One probe on one capture: its question, options, figures, table, rows, files, and the command that gives the same."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, cast

import streamlit as st
from pandas import DataFrame, Series

from app.widgets.address import carry_over, check_one_of
from app.widgets.answers import Document, Figures, answer_of
from app.widgets.capture_folder import choose_others, chosen_capture
from app.widgets.options import choose_options
from cache.store import Capture
from probes.running import catalog, command, exports, report
from probes.running.comparison import comparison_figure
from probes.statistics.quantities import Record, as_table
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ALL = "all"
WIDTHS = {
    name: st.column_config.TextColumn(width=width)
    for name, width in (("quantity", 180), ("value [95%]", 185), ("note", 130))
}


def probe_page(name: str, folder: Path) -> None:
    """The page of the probe of that name in the catalog."""
    probe = catalog.load(name)
    question, _, definition = inspect.cleandoc(probe.__doc__).partition("\n\n")
    st.title(probe.TITLE)
    st.markdown(question.replace("\n", " "))
    with st.expander("How it is measured"):
        st.code(definition, language=None, wrap_lines=True)
    capture = chosen_capture(folder)
    if capture is None:
        return
    page = st.container()
    with st.sidebar:
        others = choose_others(folder, capture)
        try:
            options = choose_options(probe.Options)
        except UserError as error:
            page.error(str(error))
            return
        layers = [ALL, *(str(layer + 1) for layer in sorted({step.layer for step in capture.architecture.steps}))]
        carry_over("layer", layers)
        check_one_of("layer", layers, ALL)
        layer = st.selectbox("Rows of layer", layers, key="layer", bind="query-params")
    captures = [capture, *(Capture(folder / other) for other in others)]
    try:
        _show_answer(name, captures, options, layer)
    except UserError as error:
        st.error(str(error))


def _show_answer(name: str, captures: list[Capture], options: object, layer: str) -> None:
    """What is kept of this question, or what is measured now. Raises UserError for captures that cannot be measured."""
    capture = captures[0]
    asked = f"draw {name} {[each.digest for each in captures]} {options}"
    stored, figures, line = answer_of(name, captures, options, draw=st.session_state.get(asked, False))
    for result in cast("list[Document]", stored["results"]):
        _show_result(stored, result, figures, line, layer)
    if not figures:
        st.button(
            "Draw the probe's own figures", key=f"ask {asked}", on_click=st.session_state.update,
            args=({asked: True},), help="The numbers were measured before and kept; this measures again.",
        )  # fmt: skip
    st.caption("  \n".join(command.remarks(stored)))
    st.subheader("The same on the command line")
    st.code(line, language=None, wrap_lines=True)
    st.download_button(
        "Result as JSON", report.json_text(stored | {"command": line}),
        exports.file_name(name, capture.path.name, capture.digest[:12], suffix="json"), "application/json",
        on_click="ignore", key="json",
    )  # fmt: skip


def _show_result(document: Document, result: Document, own: Figures, line: str, layer: str) -> None:
    """One set of samples: every network on common axes, the headline, all rows, the probe's own figures, files."""
    name, data = str(document["probe"]), str(result["data"])
    networks = [str(network["name"]) for network in cast("list[Document]", document["networks"])]
    rows = cast("list[Record]", result["rows"])
    called = report.short_names(networks[0], networks[1:])
    counted = f"{result['documents']} documents, {result['tokens']} tokens"
    table = report.readable(rows, "", called, "headline", cast("list[str]", result["notes"]))
    facts = exports.result_facts(document | {"command": line}) | {"data": data}
    stem = (name, networks[0], data)
    # Along the steps, then the headline.
    st.subheader(f"{networks[0]} on {data} ({counted})")
    figures: list[Figure] = []
    compared = comparison_figure(rows, networks[0], called)
    if compared is not None:
        figures.append(compared)
        _chart(compared, f"comparison {data}", exports.file_name(*stem, "by-step", suffix="png")[:-4])
    if facts_of_rows := table.title.removeprefix("; "):
        st.caption(f"In every row: {facts_of_rows}")
    st.dataframe(
        DataFrame(table.texts()), hide_index=True, height="content", row_height=30, column_config=WIDTHS,
        key=f"headline {data}",
    )  # fmt: skip
    if table.notes:
        st.caption("  \n".join(table.notes))
    # Every other row, or those of one layer.
    frame = as_table(rows)
    details = frame[frame["level"] != "headline"]
    of_layer = layer != ALL and "layers" in details
    details = (details[details["layers"].eq(layer)] if of_layer else details).dropna(axis=1, how="all")
    if len(details):
        named = f"Rows of layer {layer}" if of_layer else "Every other row"
        with st.expander(f"{named}: {len(details)}", expanded=of_layer):
            st.dataframe(details.apply(_texts), hide_index=True, height=420, key=f"details {data}")
    # The probe's own figures, and everything as files.
    figures += _own_figures(own, data, stem)
    left, right, _ = st.columns([1, 1, 3])
    left.download_button(
        "All rows as CSV", exports.csv_text(frame, facts), exports.file_name(*stem, suffix="csv"), "text/csv",
        on_click="ignore", key=f"csv {data}", width="stretch",
    )  # fmt: skip
    right.download_button(
        "Figures as HTML", lambda: exports.html_text(figures, " ".join(stem), facts),
        exports.file_name(*stem, suffix="html"), "text/html", on_click="ignore", key=f"html {data}", width="stretch",
    )  # fmt: skip


def _own_figures(own: Figures, data: str, stem: tuple[str, ...]) -> "list[Figure]":
    """The probe's figures under a tab for each network, each under its own heading; those that hold something."""
    found = {
        network: {words: figure for words, figure in figures.items() if figure.data}
        for (of, network), figures in own.items()
        if of == data
    }
    found = {network: figures for network, figures in found.items() if figures}
    if not found:
        return []
    for tab, (network, figures) in zip(st.tabs(list(found)), found.items(), strict=True):
        tab.markdown(f"**{network} on {data}**")
        for words, figure in figures.items():
            with tab:
                name = exports.file_name(stem[0], network, data, words, suffix="png")[:-4]
                _chart(figure, f"figure {data} {network} {words}", name)
    return [figure for figures in found.values() for figure in figures.values()]


def _chart(figure: "Figure", key: str, name: str) -> None:
    st.plotly_chart(
        figure, key=key, config={"displaylogo": False, "toImageButtonOptions": {"filename": name, "scale": 2}}
    )


def _texts(column: Series) -> Series:
    """A column of words and numbers as text, which a browser's table needs; one of numbers as it is."""
    return column.map(lambda cell: "" if cell is None else str(cell)) if column.dtype == object else column
