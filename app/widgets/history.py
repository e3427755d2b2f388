"""Makes each choice on a page a step of the browser's history."""

from pathlib import Path

import streamlit as st

SCRIPT = Path(__file__).with_name("history.js").read_text(encoding="utf-8")


def keep_history() -> None:
    """Mount the script that no page shows; once a visit is enough."""
    st.components.v2.component("history", js=SCRIPT)(key="history", height=0)
