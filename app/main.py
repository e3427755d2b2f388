"""The dashboard: its pages, and the folder of captures that they show.

streamlit run app/main.py [-- --captures DIR]
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import streamlit as st

from app.widgets.address import show_mistakes
from app.widgets.capture_folder import choose_capture, name_a_capture
from app.widgets.history import keep_history
from probes.running import catalog
from smelt_interp.errors import UserError
from smelt_interp.terminal.threads import limit_threads

NARROW_MARGINS = "<style>[data-testid=stMainBlockContainer] {padding: 3rem 2.5rem 4rem}</style>"


def captures_folder(arguments: Sequence[str]) -> Path:
    """The folder that follows `--captures`; `captures` when nothing is given."""
    match list(arguments):
        case []:
            return Path("captures")
        case ["--captures", folder]:
            return Path(folder)
        case [word] if word.startswith("--captures=") and word != "--captures=":
            return Path(word.removeprefix("--captures="))
        case given:
            raise UserError(f"what follows `--` must be `--captures DIR`; got {' '.join(given)}")


def main() -> None:
    """Lay out the page that the address names."""
    limit_threads(1)  # as in the commands
    st.set_page_config(page_title="smelt-interp", layout="wide", initial_sidebar_state=300)
    st.html(NARROW_MARGINS)
    try:
        folder = captures_folder(sys.argv[1:])
    except UserError as error:
        st.error(str(error))
        return

    def page(view: str, name: str, title: str, *more: object) -> st.Page:
        # No icon: a page's icon is also its browser symbol, which would come from a font server.
        show = partial(_show, view, *more, folder)
        pages[name] = st.Page(show, title=title, url_path=name, default=name == "")
        return pages[name]

    pages: dict[str, st.Page] = {}  # by what a link names; whole when the chosen one is run
    probes = [page("probe", name, catalog.title(name), name) for name in (*catalog.NAMES, *catalog.APART)]
    answers = pages["answer_lens"] = page("answers", "answers", "Answers along the steps", pages)
    captures = page("captures", "", "Captures", pages)
    # The first page's own address is the root; a link may also say its name.
    named_captures = st.Page(partial(_go_to, captures), title="Captures", url_path="captures", visibility="hidden")
    look = [
        page("overview", "overview", "Overview by step", pages),
        page("samples", "samples", "Samples"),
        page("attention", "attention", "Attention, both visits"),
        page("experts", "experts", "Experts, both visits", pages),
        answers,
    ]
    paper = page("reproduction", "reproduction", "Reproduction")
    live = st.Page(partial(_show, "live", Path()), title="Live", url_path="live")
    numbers = [
        st.Page(partial(_show, "budget"), title="Budget calculator", url_path="budget"),
        st.Page(partial(_show, "matching"), title="Matching", url_path="matching"),
        st.Page(partial(_show, "scaling"), title="Scaling", url_path="scaling"),
        st.Page(partial(_show, "serving"), title="Serving", url_path="serving"),
    ]
    sections = {
        "": [captures, named_captures],
        "Look": [*look, live],
        "Measure": [*probes, paper],
        "Numbers": numbers,
    }
    chosen = st.navigation(sections, expanded=True)  # otherwise links beyond the tenth are hidden
    if chosen not in (*numbers, named_captures, paper, live):
        try:
            name_a_capture(chosen, folder)
            choose_capture(folder)
        except UserError as error:
            st.error(str(error))
            return
    keep_history()
    mistakes = st.container()
    chosen.run()
    with mistakes:
        show_mistakes()


def _show(view: str, *arguments: object) -> None:
    """A page by its name; what it imports is imported when it is first opened, so that the first page need not wait."""
    with st.spinner("Importing torch …" if view == "live" else "Opening …"):
        module = import_module(f"app.views.{view}")
    getattr(module, f"{view}_page")(*arguments)


def _go_to(page: st.Page) -> None:
    st.switch_page(page, query_params=st.query_params.to_dict())


main()
