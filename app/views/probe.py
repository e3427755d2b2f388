"""One probe on one capture: its question, options, table, figure, rows, files, and the command that gives the same."""

import inspect
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import streamlit as st
from rich.text import Text

from app.widgets.capture_folder import chosen_capture, other_capture_names
from app.widgets.options import choose_options, option_words
from cache.store import Capture
from probes.running import catalog, command, report
from probes.running.contract import Cell, Row
from probes.running.source import Data, Source
from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WIDTHS = {
    name: st.column_config.TextColumn(width=width)
    for name, width in (("quantity", 180), ("value [95%]", 185), ("note", 130))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the page asks of a probe: the same record that its command reads."""

    source: Source
    measure: object
    data: Data = field(default_factory=Data)
    output: command.Output = field(default_factory=command.Output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One data set of a capture, measured: what is shown of it."""

    data: str
    title: str
    facts: str
    """What is the same in every row of the headline."""
    table: dict[str, list[str]]
    """The columns of the headline table, as the terminal shows them."""
    footnotes: str
    rows: list[Row]
    figures: "dict[str, Figure]"
    """For each network its figure, the capture's own first."""


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
    asked = cast(command.Arguments, Asked(source=source, measure=options))  # frozen, and never set there
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
    name: str, line: str, digests: tuple[str, ...], _asked: command.Arguments
) -> tuple[str, list[Answer], list[str]]:
    """The result as JSON text, what is shown of it, and remarks. `line` and `digests` say all that it depends on."""
    probe = catalog.load(name)
    measured = command.measure_all(probe, _asked)
    answers = []
    for each, table in zip(measured, command.tables(probe, measured, "headline"), strict=True):
        title, _, facts = Text.from_markup(str(table.title)).plain.removeprefix(f"{probe.TITLE}: ").partition("; ")
        figures = {
            network.name: probe.figure(result) for network, result in zip(each.networks, each.results, strict=True)
        }
        for figure in figures.values():
            figure.update_layout(title_text="", margin_t=50)  # the page has a title
        answers.append(
            Answer(
                data=each.data.name,
                title=title,
                facts=facts,
                table={
                    str(column.header).replace("\n", "") or "note": [str(cell) for cell in column.cells]
                    for column in table.columns
                    if any(column.cells)
                },
                footnotes=Text.from_markup(str(table.caption)).plain,
                rows=each.rows(),
                figures=figures,
            )
        )
    document = report.json_text(command.describe(name, probe, _asked, measured, line))
    return document, answers, command.remarks(_asked, measured)


def _show(name: str, answer: Answer) -> None:
    st.subheader(answer.title)
    places = [st.container()] if len(answer.figures) == 1 else st.tabs(list(answer.figures))
    for place, (network, figure) in zip(places, answer.figures.items(), strict=True):
        if figure.data:  # a comparison of visits draws nothing on a Baseline, as its table says
            place.plotly_chart(figure, key=f"figure {answer.data} {network}")
    if answer.facts:
        st.caption(f"In every row: {answer.facts}")
    st.dataframe(
        answer.table, hide_index=True, height="content", row_height=30, column_config=WIDTHS,
        key=f"headline {answer.data}",
    )  # fmt: skip
    if answer.footnotes:
        st.caption(answer.footnotes.replace("\n", "  \n"))
    details = [row for row in answer.rows if row["level"] != "headline"]
    if details:
        with st.expander(f"Every other row: {len(details)}"):
            st.dataframe(columns_of(details), hide_index=True, height=420, key=f"details {answer.data}")
    st.download_button(
        "All rows as CSV", report.csv_text(answer.rows), f"{name}-{answer.data}.csv", "text/csv", on_click="ignore",
        key=f"csv {answer.data}",
    )  # fmt: skip


def columns_of(rows: Sequence[Row]) -> dict[str, list[Cell]]:
    """The rows as columns; one that mixes text with numbers becomes text, and one that is empty is left out."""
    columns: dict[str, list[Cell]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        if any(isinstance(cell, str) for cell in cells):
            cells = ["" if cell is None else str(cell) for cell in cells]
        if any(cell not in (None, "") for cell in cells):
            columns[name] = cells
    return columns
