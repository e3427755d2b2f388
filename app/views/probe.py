"""One probe on one capture: its question, options, table, figure, rows, files, and the command that gives the same."""

import inspect
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st
from pandas import DataFrame, Series

from app.widgets.capture_folder import chosen_capture, other_capture_names
from app.widgets.options import choose_options, option_words
from cache.store import Capture
from probes.running import catalog, command, report
from probes.running.source import Source
from smelt_interp.errors import UserError
from smelt_interp.terminal.tables import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WIDTHS = {
    name: st.column_config.TextColumn(width=width)
    for name, width in (("quantity", 180), ("value [95%]", 185), ("note", 130))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One set of samples of a capture, measured: what is shown of it."""

    data: str
    table: Table
    """The headline, as the terminal shows it."""
    frame: DataFrame
    """Every row."""
    figures: "dict[str, dict[str, Figure]]"
    """For each network its figures by name, the capture's own first."""


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
    with st.sidebar.form("options", border=False):
        others = st.multiselect(
            "Beside", other_capture_names(folder, capture), key="against", bind="query-params",
            help="Captures of the same samples from other networks: its Baseline, the same network untrained.",
        )  # fmt: skip
        options: object = None
        try:
            options = choose_options(probe.Options)
        except UserError as error:
            page.error(str(error))
        st.form_submit_button("Measure", type="primary", width="stretch")
    if options is None:
        return
    against = [folder / other for other in others]
    words = ["--capture", str(capture.path), *(["--against", *map(str, against)] if against else [])]
    line = shlex.join(["python", "-m", f"probes.{name}", *words, *option_words(options)])
    source = Source(capture=capture.path, against=tuple(against))
    asked = command.Run(source=source, data=probe.DATA, measure=options, output=command.Output())
    try:
        digests = (capture.digest, *(Capture(path).digest for path in against))
        document, answers, remarks = _measured(name, line, digests, asked)
    except UserError as error:
        st.error(str(error))
        return
    for answer in answers:
        _show(name, answer)
    st.caption("  \n".join(remarks))
    st.subheader("The same on the command line")
    st.code(line, language="bash", wrap_lines=True)
    st.download_button("Result as JSON", document, f"{name}.json", "application/json", on_click="ignore")


@st.cache_data(max_entries=64, show_spinner="Measuring …", show_time=True)
def _measured(
    name: str, line: str, digests: tuple[str, ...], _asked: command.Run[object]
) -> tuple[str, list[Answer], list[str]]:
    """The result as JSON text, what is shown of it, and remarks. `line` and `digests` say all that it depends on."""
    probe = catalog.load(name)
    measured = command.measure_all(name, probe, _asked)
    answers = []
    for each in measured:
        results = zip(each.subjects, each.results, strict=True)
        figures = {subject.name: result.figures for subject, result in results}
        for drawn in (figure for of_network in figures.values() for figure in of_network.values()):
            drawn.update_layout(title_text="", margin_t=50)  # the page has a title
        answers.append(Answer(data=each.data.name, table=each.readable(), frame=each.table(), figures=figures))
    document = report.json_text(command.describe(_asked, measured, line))
    return document, answers, command.remarks(_asked, measured)


def _show(name: str, answer: Answer) -> None:
    title, _, facts = answer.table.title.partition("; ")
    st.subheader(title.partition(": ")[2])
    places = [st.container()] if len(answer.figures) == 1 else st.tabs(list(answer.figures))
    for place, (network, figures) in zip(places, answer.figures.items(), strict=True):
        for words, figure in figures.items():
            if figure.data:  # a comparison of visits draws nothing on a Baseline, as its table says
                place.plotly_chart(figure, key=f"figure {answer.data} {network} {words}")
    if facts:
        st.caption(f"In every row: {facts}")
    st.dataframe(
        DataFrame(answer.table.texts()), hide_index=True, height="content", row_height=30, column_config=WIDTHS,
        key=f"headline {answer.data}",
    )  # fmt: skip
    if answer.table.notes:
        st.caption("  \n".join(answer.table.notes))
    details = answer.frame[answer.frame["level"] != "headline"].dropna(axis=1, how="all")
    if len(details):
        with st.expander(f"Every other row: {len(details)}"):
            st.dataframe(details.apply(_texts), hide_index=True, height=420, key=f"details {answer.data}")
    st.download_button(
        "All rows as CSV", answer.frame.to_csv(index=False), f"{name}-{answer.data}.csv", "text/csv", on_click="ignore",
        key=f"csv {answer.data}",
    )  # fmt: skip


def _texts(column: Series) -> Series:
    """A column of words and numbers as text, which a browser's table needs; one of numbers as it is."""
    return column.map(lambda cell: "" if cell is None else str(cell)) if column.dtype == object else column
