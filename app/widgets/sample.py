"""Which sample the pages show, of which layer, visit and head: the address says it, and counts from 1.

The sample stays chosen from page to page.
"""

from collections.abc import Sequence

import streamlit as st

from app.widgets.address import carry_over, check_one_of
from cache.store import Capture

KEY = "sample"
"""Of the widget and in the address."""
_SEEN = "address of the sample"
"""The page, the sample in its address, and the sample that was shown, of the run before."""


def choose_sample(capture: Capture) -> int:
    """The widget; the sample from 0.

    Not bound to the address: Streamlit takes what a page has bound out of the address of the next page.
    """
    most, page, asked = len(capture), st.context.url, st.query_params.get(KEY)
    was_page, was_asked, kept = st.session_state.get(_SEEN, (None, None, 1))
    if asked is not None and (page, asked) != (was_page, was_asked):  # a link, or Back
        st.session_state.pop(KEY, None)
        check_one_of(KEY, [str(number) for number in range(1, most + 1)], 1)
        number = int(asked)
    elif page != was_page:
        number = kept
    elif asked is None and was_asked is not None:  # Back to before the first choice
        number = 1
    else:
        number = st.session_state.get(KEY, kept)
    st.session_state[KEY] = number if number <= most else 1
    chosen = int(st.number_input(f"Sample, 1 to {most}", 1, most, key=KEY))
    if str(chosen) != (asked or "1"):
        st.query_params[KEY] = asked = str(chosen)
    st.session_state[_SEEN] = (page, asked, chosen)
    return chosen - 1


def choose_number(label: str, numbers: Sequence[int], start: int = 0) -> int:
    """A choice among numbers from 0, the one at `start` at first. -> from 0"""
    shown = [number + 1 for number in numbers]
    carry_over(label.lower(), shown)  # a probe's page has a layer "all"
    check_one_of(label.lower(), [str(number) for number in shown], shown[start])
    return st.selectbox(label, shown, start, key=label.lower(), bind="query-params") - 1
