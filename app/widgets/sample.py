"""Which sample the pages show, of which layer, visit and head: the address says it, and counts from 1.

The sample stays chosen from page to page.
"""

from collections.abc import Sequence

import streamlit as st

from app.widgets.address import carry_over, check_one_of
from cache.store import Capture

KEY = "sample"
"""Of the widget and in the address."""
_KEPT = "chosen sample"


def choose_sample(capture: Capture) -> int:
    """The widget; the sample from 0."""
    most = len(capture)
    check_one_of(KEY, [str(number) for number in range(1, most + 1)], 1)
    kept = st.session_state.get(_KEPT, 1)
    if KEY not in st.session_state and KEY not in st.query_params and kept <= most:
        st.session_state[KEY] = kept
    chosen = st.number_input(f"Sample, 1 to {most}", 1, most, key=KEY, bind="query-params")
    st.session_state[_KEPT] = chosen  # a widget's own state ends with its page
    return int(chosen) - 1


def choose_number(label: str, numbers: Sequence[int], start: int = 0) -> int:
    """A choice among numbers from 0, the one at `start` at first. -> from 0"""
    shown = [number + 1 for number in numbers]
    carry_over(label.lower(), shown)  # a probe's page has a layer "all"
    check_one_of(label.lower(), [str(number) for number in shown], shown[start])
    return st.selectbox(label, shown, start, key=label.lower(), bind="query-params") - 1
