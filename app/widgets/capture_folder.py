"""The folder of captures: what lies in it, which of them a page shows, and what to type when there is none."""

import os
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from app.widgets.address import check_each_of
from cache.store import Capture, is_capture, is_unfinished
from smelt_interp.errors import UserError

RECORD = (
    "python -m cache.record --ckpt checkpoints/demo-smelt --data dyck --samples 64 --out {folder}/smelt-dyck\n"
    "python -m cache.record --ckpt checkpoints/demo-baseline --data dyck --samples 64 --out {folder}/baseline-dyck"
)
KEY = "capture"
"""Name of the choice in the address."""


def capture_names(folder: Path) -> list[str]:
    """Names of everything that is a capture or was meant to become one, sorted; none when there is no folder.

    Raises UserError when the folder cannot be read.
    """
    try:
        found = [Path(name) for name in os.listdir(os.path.join(folder, "."))]  # the dot: to list it and to enter it
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"the folder of captures must be readable; got {folder}: {error.strerror}") from None
    return sorted(path.name for path in found if is_capture(folder / path) or is_unfinished(folder / path))


def other_capture_names(folder: Path, capture: Capture) -> list[str]:
    """The names of the finished and whole ones of the same samples, but this."""
    digest = capture.samples_digest
    others = [folder / name for name in capture_names(folder) if name != capture.path.name]
    return [path.name for path in others if _samples_digest(path) == digest]


def choose_others(folder: Path, capture: Capture) -> list[str]:
    """The names of the captures of the same samples that are shown beside this one; all at first."""
    known = other_capture_names(folder, capture)
    check_each_of("against", known)
    return st.multiselect(
        "Beside", known, known, key="against", bind="query-params",
        help="Captures of the same samples from other networks: its Baseline, the same network untrained.",
    )  # fmt: skip


def _samples_digest(path: Path) -> str:
    """The digest of a capture's samples, empty for one that does not open."""
    try:
        return Capture(path).samples_digest
    except UserError:  # the list of captures shows what is wrong with it
        return ""


def say_how_to_record(folder: Path) -> None:
    """What to type to have a capture to look at."""
    if folder.is_dir():
        st.info(f"There is no capture in `{folder}` yet. Record one, then reload this page:", icon=":material/inbox:")
    else:
        st.warning(
            f"There is no folder `{folder}`. Start the dashboard with the folder of your captures, "
            "`streamlit run app/main.py -- --captures DIR`, or record into this one, then reload this page:",
            icon=":material/folder_off:",
        )
    st.code(RECORD.format(folder=folder), language=None)


def first_to_show(folder: Path, names: list[str]) -> str:
    """The first capture whose network visits a layer more than once, or else the first."""
    for name in names:
        try:
            if Capture(folder / name).architecture.loops:
                return name
        except UserError:  # the list of captures shows what is wrong with it
            continue
    return names[0]


def name_a_capture(page: st.Page, folder: Path) -> None:
    """Go to the page with a capture in the address when it names none.

    The widget has no default for this reason: a link keeps its meaning when more captures are recorded.
    """
    names = capture_names(folder)
    if names and KEY not in st.query_params and st.session_state.get(KEY) is None:
        st.switch_page(page, query_params={**st.query_params.to_dict(), KEY: first_to_show(folder, names)})


def choose_capture(folder: Path) -> None:
    """The widget that says and changes which capture the pages show.

    It belongs to the script that every page shares, so the choice stays from page to page.
    """
    names = capture_names(folder)
    asked = st.query_params.get(KEY)
    if names:
        name = st.sidebar.selectbox("Capture", names, index=None, required=True, key=KEY, bind="query-params")
        if name is None:
            st.error(f"a capture must be one of those in {folder}, {', '.join(names)}; got {asked}: choose one")


def chosen_capture(folder: Path) -> Capture | None:
    """The capture that was chosen. None, and one line on the page that says why, when there is none to open."""
    if not capture_names(folder):
        say_how_to_record(folder)
    name = st.session_state.get(KEY)
    if name is None:
        return None
    try:
        return Capture(folder / name)
    except UserError as error:
        st.error(str(error))
        return None


def show_capture(folder: Path, show: Callable[[Capture], None]) -> None:
    """Show the chosen capture; what is wrong with it stands in its place, in a line."""
    capture = chosen_capture(folder)
    if capture is None:
        return
    try:
        show(capture)
    except UserError as error:
        st.error(str(error))
