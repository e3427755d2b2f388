"""The page of samples, run in process on planted captures."""

from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from cache.store import Capture
from probes.sample_values import coloured, sample_frame
from tests.support.app_pages import drawn, page


def test_the_table_is_filtered_and_sorted_as_the_address_says(folder: Path) -> None:
    address = {"capture": "looped", "measured": "none", "by": "tokens", "largest": "true"}
    test = page("samples", folder, **address, show="wrong", sample="2")
    frame = sample_frame(Capture(folder / "looped"))
    shown = test.dataframe[0].value
    assert shown["tokens"].tolist() == sorted(frame["tokens"], reverse=True)  # every planted answer is wrong
    assert [each.value for each in test.subheader] == ["Sample 2"]
    assert len(page("samples", folder, **address, show="right").dataframe[0].value) == 0
    bounded = page("samples", folder, **address, least="46", most="47").dataframe[0].value
    assert bounded["tokens"].tolist() == sorted((n for n in frame["tokens"] if 46 <= n <= 47), reverse=True)


def test_the_text_is_coloured_by_what_is_chosen(folder: Path) -> None:
    test = page("samples", folder, capture="looped", measured="none", sample="3", colour="cosine", layer="2")
    scene, arrays = drawn(test)
    capture = Capture(folder / "looped")
    expected = coloured(capture, 2, "cosine", 1, 0)
    np.testing.assert_array_equal(arrays["values"], expected.values_T)
    assert scene["readings"] == expected.readings
    assert "".join(scene["tokens"][1:]) == capture.text(2).replace("\n", "\\n").replace(" ", "␣")
    assert {scene["roleNames"][str(role)] for role in scene["roles"]} > {"demonstration answer", "query"}


def test_the_address_takes_what_the_list_offers(folder: Path) -> None:
    last = page("samples", folder, capture="looped", measured="none").selectbox(key="measured").options[-1]
    test = page("samples", folder, capture="looped", measured=last)
    assert test.selectbox(key="measured").value == last
    assert not test.warning


@pytest.mark.parametrize(("before", "shown"), [(3, 3), (4, 1)])
def test_a_sample_chosen_on_one_page_is_that_of_the_next_if_it_has_it(folder: Path, before: int, shown: int) -> None:
    def script(path: str, before: int) -> None:
        import streamlit as st

        from app.widgets.sample import choose_sample
        from cache.store import Capture

        st.session_state.setdefault("address of the sample", ("another page", None, before))
        choose_sample(Capture(path))

    test = AppTest.from_function(script, args=(str(folder / "looped"), before), default_timeout=30).run()
    assert test.number_input(key="sample").value == shown == test.session_state["address of the sample"][2]
    test.number_input(key="sample").set_value(2).run()
    assert test.session_state["address of the sample"][2] == 2


def test_wrong_choices_fall_back_and_say_so(folder: Path) -> None:
    test = page("samples", folder, capture="looped", measured="x", colour="blood", by="weight", least="inf", most="nan",
                largest="maybe")  # fmt: skip
    said = [each.value for each in test.warning]
    assert [line.split()[2] for line in said] == ["measured", "by", "least", "most", "largest", "colour"]
    assert not test.error
