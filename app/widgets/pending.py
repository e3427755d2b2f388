"""Marks a form whose texts were changed and not run."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

SCRIPT = Path(__file__).with_name("pending.js").read_text(encoding="utf-8")
STYLE = ".pending { color: var(--st-text-color); font-weight: 600 }"


def mark_pending(texts: Sequence[str]) -> None:
    """Call below the form; `texts` are those that are run, of its areas from the first to the last."""
    st.components.v2.component("pending", js=SCRIPT, css=STYLE)(key="pending", data=list(texts))
