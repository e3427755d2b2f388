"""One probe on one capture: its question, options, figures, table, rows, files, and the command that gives the same."""

import inspect
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import streamlit as st
from pandas import DataFrame, Series

from app.widgets.address import check_each_of
from app.widgets.capture_folder import chosen_capture, other_capture_names
from app.widgets.options import choose_options, option_words
from cache.store import Capture
from probes.running import catalog, command, exports, report
from probes.running.comparison import comparison_figure
from probes.running.probe import Probe, refusal
from probes.running.source import Source
from probes.running.stored import stored_result
from probes.statistics.quantities import Record, as_table
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WIDTHS = {
    name: st.column_config.TextColumn(width=width)
    for name, width in (("quantity", 180), ("value [95%]", 185), ("note", 130))
}
Document = dict[str, object]
"""A result as `command.describe` writes it: what a page shows is made of it, whether measured now or kept."""


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
        known = other_capture_names(folder, capture)
        check_each_of("against", known)
        others = st.multiselect(
            "Beside", known, known, key="against", bind="query-params",
            help="Captures of the same samples from other networks: its Baseline, the same network untrained.",
        )  # fmt: skip
        try:
            options = choose_options(probe.Options)
        except UserError as error:
            page.error(str(error))
            return
    captures = [capture, *(Capture(folder / other) for other in others)]
    try:
        _show_answer(name, probe, captures, options)
    except UserError as error:
        st.error(str(error))


def _show_answer(name: str, probe: Probe, captures: list[Capture], options: object) -> None:
    """What is kept of this question, or what is measured now. Raises UserError for captures that cannot be measured."""
    for each in captures:
        each.check_shards()  # a shard that was replaced has other numbers than those kept
    capture, *others = captures
    against = [str(other.path) for other in others]
    words = ["--capture", str(capture.path), *(["--against", *against] if against else [])]
    line = shlex.join(["python", "-m", f"probes.{name}", *words, *option_words(options)])
    source = Source(capture=capture.path, against=tuple(other.path for other in others))
    asked = command.Run(source=source, data=probe.DATA, measure=options, output=command.Output())
    able = [each for each in captures if not refusal(probe.needs(each.architecture), each.architecture)]
    stored = stored_result(capture.path, name, command.plain_options(options), [each.digest for each in able])
    figures: dict[tuple[str, str], dict[str, Figure]] = {}
    draw = st.session_state.get(f"draw {line}", False)
    if stored is None or draw:
        stored, figures = _measured(name, line, tuple(each.digest for each in captures), asked)
    for result in cast("list[Document]", stored["results"]):
        _show_result(stored, result, figures, line)
    if not figures:
        st.button(
            "Draw the probe's own figures", key=f"ask {line}", on_click=st.session_state.update,
            args=({f"draw {line}": True},), help="The numbers were measured before and kept; this measures again.",
        )  # fmt: skip
    st.caption("  \n".join(command.remarks(stored)))
    st.subheader("The same on the command line")
    st.code(line, language="bash", wrap_lines=True)
    st.download_button(
        "Result as JSON", report.json_text(stored | {"command": line}),
        exports.file_name(name, capture.path.name, capture.digest[:12], suffix="json"), "application/json",
        on_click="ignore", key="json",
    )  # fmt: skip


@st.cache_data(max_entries=64, show_spinner="Measuring …", show_time=True)
def _measured(
    name: str, line: str, digests: tuple[str, ...], _asked: command.Run[object]
) -> "tuple[Document, dict[tuple[str, str], dict[str, Figure]]]":
    """The result and the probe's own figures. `line` and `digests` say all that they depend on."""
    measured = command.measure_all(name, catalog.load(name), _asked)
    figures = {
        (each.data.name, subject.name): result.figures
        for each in measured
        for subject, result in zip(each.subjects, each.results, strict=True)
    }
    for drawn in (figure for of_network in figures.values() for figure in of_network.values()):
        drawn.update_layout(title_text="", margin_t=50)  # the page has a title
    return command.describe(_asked, measured, line), figures


def _show_result(
    document: Document, result: Document, own: "Mapping[tuple[str, str], dict[str, Figure]]", line: str
) -> None:
    """One set of samples: every network on common axes, the headline, all rows, the probe's own figures, files."""
    name, data = str(document["probe"]), str(result["data"])
    networks = [str(network["name"]) for network in cast("list[Document]", document["networks"])]
    rows = cast("list[Record]", result["rows"])
    called = report.short_names(networks[0], networks[1:])
    counted = f"{result['documents']} documents, {result['tokens']} tokens"
    table = report.readable(rows, "", called, "headline", cast("list[str]", result["notes"]))
    facts = exports.result_facts(document | {"command": line}) | {"data": data}
    stem = (name, networks[0], data)
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
    frame = as_table(rows)
    details = frame[frame["level"] != "headline"].dropna(axis=1, how="all")
    if len(details):
        with st.expander(f"Every other row: {len(details)}"):
            st.dataframe(details.apply(_texts), hide_index=True, height=420, key=f"details {data}")
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


def _own_figures(
    own: "Mapping[tuple[str, str], dict[str, Figure]]", data: str, stem: tuple[str, ...]
) -> "list[Figure]":
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
