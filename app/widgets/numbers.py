"""What the pages of numbers share: which networks they are about, a command's table, and the command itself."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.widgets.address import check_one_of
from probes.running.exports import file_name
from smelt_interp.costs.presets import PAIRS
from smelt_interp.errors import UserError
from smelt_interp.terminal.tables import Table, json_text

FILES = "config files"
DEFAULT_PAIR = "200M"


def choose_networks() -> tuple[str | None, tuple[Path, ...]]:
    """A named pair, or the config files whose names are typed instead; both as the commands take them.

    Raises UserError for names that are no words, and for files elsewhere.
    """
    check_one_of("pair", [*PAIRS, FILES], DEFAULT_PAIR)
    pair = st.selectbox(
        "Pair", [*PAIRS, FILES], [*PAIRS].index(DEFAULT_PAIR), key="pair", bind="query-params",
        help="A matched pair: the paper's grid, or the demo. With config files, the network and what it is matched to.",
    )  # fmt: skip
    if pair != FILES:
        return pair, ()
    names = st.text_input(
        "Config", key="config", bind="query-params", placeholder="looped.json baseline.json",
        help="One config file (JSON), or two: the network, then the one that it is matched to.",
    )  # fmt: skip
    try:
        words = shlex.split(names or "")
    except ValueError as error:
        raise UserError(
            f"config must be names of files, in quotes where they hold spaces; got {names}: {error}"
        ) from None
    return None, tuple(below_root(word) for word in words)


def below_root(name: str) -> Path:
    """A file that an address names. Raises UserError for one elsewhere: no link opens any file of this machine."""
    root = Path.cwd()
    try:
        inside = (root / name).resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):  # no name that a file can have, or links in a circle
        inside = False
    if not inside:
        raise UserError(f"a config file on a page must lie below {root}; got {name}: the command reads any")
    return Path(name)


def show_table(table: Table, key: str, texts: Sequence[str] = ("",)) -> None:
    """A command's table, numbers to the right; the columns `texts` hold words."""
    shown = table.texts()
    right = {column: st.column_config.TextColumn(alignment="right") for column in shown if column.strip() not in texts}
    st.dataframe(shown, hide_index=True, height="content", width="content", row_height=30, column_config=right, key=key)
    for note in table.notes:
        st.caption(note)


def show_command(module: str, words: Sequence[str], report: object) -> None:
    """The command that gives what the page shows, and its result as the command's JSON."""
    st.subheader("The same on the command line")
    st.code(shlex.join(["python", "-m", f"smelt_interp.{module}", *words]), language=None, wrap_lines=True)
    st.download_button(
        "Result as JSON", json_text(report), file_name(module, *words, suffix="json"), "application/json",
        on_click="ignore", key="json",
    )  # fmt: skip


def metric_row() -> DeltaGenerator:
    """Where metrics stand side by side as far as the page is wide: none is cut."""
    return st.container(horizontal=True)
