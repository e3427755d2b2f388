"""How answers to Dyck episodes form along the steps: right against wrong ones, as means and episode by episode."""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import streamlit as st

from app.widgets.address import check_one_of, link_to
from app.widgets.capture_folder import KEY, show_capture
from cache.store import Capture
from probes import answer_lens
from probes.answer_lens import RIGHT, TITLE, WRONG, Answers
from probes.dyck_icl import asking
from probes.running.comparison import comparison_figure
from probes.running.exports import csv_text, file_name
from probes.statistics.quantities import as_table

CHART = {"displaylogo": False}


def answers_page(pages: Mapping[str, st.Page], folder: Path) -> None:
    """The episodes of the capture in the address, and the right and the wrong one that it names. `pages`: those that
    show one."""
    question, _, definition = inspect.cleandoc(answer_lens.__doc__ or "").partition("\n\n")
    st.title(TITLE)
    st.markdown(question.replace("\n", " "))
    with st.expander("How it is measured"):
        st.code(definition, language=None, wrap_lines=True)
    show_capture(folder, partial(_show, pages))


def _show(pages: Mapping[str, st.Page], capture: Capture) -> None:
    """Raises UserError for a result that is damaged or of another capture."""
    answers = answer_lens.read_answers(capture)
    if answers is None and not asking(capture.samples).any():
        st.info(f"{capture.path.name} holds no Dyck episodes; choose a capture that does, recorded with `--data dyck`.",
                icon=":material/inbox:")  # fmt: skip
        return
    if answers is None:
        st.info("The network must read these answers again; this writes them beside the capture, then reload the page:",
                icon=":material/inbox:")  # fmt: skip
        st.code(answer_lens.command_for(capture), language=None, wrap_lines=True)
        return
    with st.sidebar:
        check_one_of("lens", [*answers.lenses], answers.lenses[0])
        lens = st.selectbox(
            "Lens", answers.lenses, key="lens", bind="query-params",
            help="stream: the final norm and the unembedding. coda: the layers after the loop first.",
        )  # fmt: skip
    rows = [row for row in answers.rows if row.get("lens") == lens]
    figure = comparison_figure(rows, RIGHT, {WRONG: WRONG})
    if figure is not None:
        st.plotly_chart(figure, key="means", config=CHART)
    for kind, column in zip((RIGHT, WRONG), st.columns(2), strict=True):
        with column:
            _one_kind(pages, capture, answers, lens, kind)
    st.subheader("The same on the command line")
    st.code(answers.command, language=None, wrap_lines=True)
    facts = {"capture": capture.path.name, "digest": capture.digest, "lens": lens, "command": answers.command}
    st.download_button(
        "Means as CSV", lambda: csv_text(as_table(rows), facts), file_name("answers", capture.path.name, suffix="csv"),
        "text/csv", on_click="ignore", key="csv",
    )  # fmt: skip


def _one_kind(pages: Mapping[str, st.Page], capture: Capture, answers: Answers, lens: str, kind: str) -> None:
    """The episodes that are answered right, or wrong, and one of them; a click on a row opens it."""
    frame = answer_lens.episode_frame(answers, capture, lens, right=kind == RIGHT)
    st.subheader(f"Answered {kind}: {len(frame)} of {len(answers.episodes)}")
    if not len(frame):
        return
    table = f"{kind} episodes"

    def choose() -> None:
        picked = st.session_state[table]["selection"]["rows"]
        if picked:
            st.session_state[kind] = int(frame["sample"].iloc[picked[0]])

    st.dataframe(
        frame, hide_index=True, height=220, row_height=28, key=table, on_select=choose, selection_mode="single-row"
    )
    numbers = frame["sample"].tolist()
    check_one_of(kind, [str(number) for number in numbers], numbers[0])
    chosen = st.selectbox(f"Sample answered {kind}", numbers, key=kind, bind="query-params")
    (episode,) = [each for each in answers.episodes if each.sample + 1 == chosen]
    st.plotly_chart(answer_lens.episode_figure(episode, capture, lens), key=f"{kind} steps", config=CHART)
    st.code(capture.text(episode.sample), language=None, wrap_lines=True)
    asked = {KEY: capture.path.name, "sample": str(chosen)}
    link_to(pages, "attention", f"Attention of sample {chosen}", **asked)
    link_to(pages, "samples", f"Tokens of sample {chosen}", **asked)
