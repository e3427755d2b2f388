"""What the pages of numbers share: which networks they are about, a command's table, and the command itself."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from smelt_interp.costs.presets import PAIRS
from smelt_interp.terminal.tables import Table, json_text

FILES = "config files"
DEFAULT_PAIR = "200M"


def choose_networks() -> tuple[str | None, tuple[Path, ...]]:
    """A named pair, or the config files whose names are typed instead; both as the commands take them."""
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
    return None, tuple(map(Path, shlex.split(names or "")))


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
    st.code(shlex.join(["python", "-m", f"smelt_interp.{module}", *words]), language="bash", wrap_lines=True)
    st.download_button(
        "Result as JSON", json_text(report), f"{module}.json", "application/json", on_click="ignore", key="json"
    )
