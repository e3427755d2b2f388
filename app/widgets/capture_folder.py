"""The folder of captures: what lies in it, which of them a page shows, and what to type when there is none."""

import os
from pathlib import Path

import streamlit as st

from cache.store import Capture, parts_folder
from smelt_interp.errors import UserError

RECORD = (
    "python -m cache.record --ckpt checkpoints/demo-smelt --data dyck --samples 64 --out {folder}/smelt-dyck.h5\n"
    "python -m cache.record --ckpt checkpoints/demo-baseline --data dyck --samples 64 --out {folder}/baseline-dyck.h5"
)
KEY = "capture"
"""Name of the choice in the address."""


def capture_names(folder: Path) -> list[str]:
    """File names of everything that is a capture or was meant to become one, sorted; none when there is no folder.

    Raises UserError when the folder cannot be read.
    """
    try:
        found = [Path(name) for name in os.listdir(os.path.join(folder, "."))]  # the dot: to list it and to enter it
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"the folder of captures must be readable; got {folder}: {error.strerror}") from None
    files = {path.name for path in found if path.suffix == ".h5"}
    parts = [path for path in found if path.suffix == ".parts" and (folder / path).is_dir()]
    return sorted(files | {path.with_suffix(".h5").name for path in parts})


def other_capture_names(folder: Path, capture: Capture) -> list[str]:
    """The names of the finished and whole ones of the same samples, but this."""
    digest = capture.samples.digest()
    others = [folder / name for name in capture_names(folder) if name != capture.path.name]
    return [path.name for path in others if path.is_file() and _samples_digest_of(path) == digest]


def _samples_digest_of(path: Path) -> str:
    stat = path.stat()
    return _samples_digest(str(path), stat.st_size, stat.st_mtime_ns)


@st.cache_data(max_entries=1024, show_spinner=False)
def _samples_digest(path: str, size: int, changed: int) -> str:
    """The digest of a capture's samples, empty for one that does not open; read again once the file has changed."""
    try:
        return Capture(path).samples.digest()
    except UserError:  # the list of runs shows what is wrong with it
        return ""


def is_unfinished(path: Path) -> bool:
    """Whether only parts of it are there."""
    return not path.exists() and parts_folder(path).is_dir()


def say_how_to_record(folder: Path) -> None:
    """What to type to have a capture to look at."""
    st.info(f"There is no capture in `{folder}` yet. Record one, then reload this page:", icon=":material/folder_open:")
    st.code(RECORD.format(folder=folder), language="bash")


def first_to_show(folder: Path, names: list[str]) -> str:
    """The first capture whose network visits a layer more than once, or else the first."""
    for name in names:
        try:
            if Capture(folder / name).config.num_visits > 1:
                return name
        except UserError:  # the list of runs shows what is wrong with it
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
