"""What is done with one capture: every byte checked, held against another, pinned, deleted after a question."""

from collections.abc import Mapping
from pathlib import Path

import streamlit as st

from app.widgets.address import check_one_of, link_to
from app.widgets.capture_folder import KEY, capture_names, first_to_show
from cache import keeping
from cache.store import Capture, is_capture
from smelt_interp.errors import UserError
from smelt_interp.terminal.tables import compact

NONE = "none"
WIDEST = 44
"""Characters of a cell."""


def show_keeper(folder: Path, capture: Capture, pages: Mapping[str, st.Page]) -> list[dict[str, str]]:
    """A row of buttons, and what they came to; the differences from the capture that is held against it, as rows."""
    path = capture.path
    pinned = keeping.is_pinned(path)
    row = st.columns([1, 1, 1, 3], vertical_alignment="bottom")
    if row[0].button("Verify", help="Reads every byte: python -m cache.verify", width="stretch"):
        _verify(path)
    row[1].button("Unpin" if pinned else "Pin", on_click=_pin, args=(path, not pinned), width="stretch",
                  help="What is pinned stands first and cannot be deleted.")  # fmt: skip
    if row[2].button("Delete …", disabled=pinned, width="stretch"):
        _ask(folder, capture)
    others = [name for name in capture_names(folder) if name != path.name and is_capture(folder / name)]
    with row[3]:
        check_one_of("with", [NONE, *others], NONE)
        other = st.selectbox("Compare with", [NONE, *others], key="with", bind="query-params")
    if other == NONE:
        return []
    return _compared(capture, folder / other, pages)


def _verify(path: Path) -> None:
    from cache.verify import verify  # tyro comes with it

    try:
        with st.spinner("Reading every byte …"):
            found = verify(path)
    except UserError as error:
        st.error(str(error))
        return
    st.success(f"{path.name} {found.said()}")


def _pin(path: Path, pinned: bool) -> None:
    try:
        keeping.pin(path, pinned)
    except UserError as error:
        st.session_state["keeper said"] = str(error)


@st.dialog("Delete a capture")
def _ask(folder: Path, capture: Capture) -> None:
    """The question, with what would be gone."""
    size = compact(sum(shard.num_bytes for shard in capture.manifest.shards), digits=3)
    results = len(list((capture.path / keeping.RESULTS).glob("*.json")))
    st.markdown(f"Delete **{capture.path.name}**: {len(capture)} samples, {size}B, {results} results? "
                "It can be recorded again with its command; nothing brings it back.")  # fmt: skip
    st.code(capture.manifest.command or "-", language=None, wrap_lines=True)
    if st.button(f"Delete {capture.path.name}", type="primary", on_click=_delete, args=(folder, capture)):
        st.rerun()


def _delete(folder: Path, capture: Capture) -> None:
    """Another one is shown then, and named in the address."""
    try:
        keeping.delete(capture.path)
    except UserError as error:
        st.session_state["keeper said"] = str(error)
        return
    names = capture_names(folder)
    st.session_state[KEY] = first_to_show(folder, names) if names else None


def _compared(capture: Capture, path: Path, pages: Mapping[str, st.Page]) -> list[dict[str, str]]:
    try:
        other = Capture(path)
    except UserError as error:
        st.error(str(error))
        return []
    found = keeping.differences(capture, other)
    if capture.samples_digest == other.samples_digest:
        asked = {KEY: capture.path.name, "against": path.name}
        link_to(pages, "overview", "Both read the same samples: every measure side by side", **asked)
    else:
        st.caption("They read other samples, so that no probe holds them against each other.")
    if not found:
        st.info("They differ in nothing that fixes their numbers.")
    names = ("what differs", capture.path.name, path.name)
    return [dict(zip(names, map(_cut, row), strict=True)) for row in found]


def _cut(text: str) -> str:
    """As much as a column has room for."""
    return text if len(text) <= WIDEST else f"{text[:WIDEST]} …"
