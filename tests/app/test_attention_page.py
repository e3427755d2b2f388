"""The attention page, run in process on planted captures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from cache.recording import write_capture
from cache.store import Capture
from probes import attention_map
from probes.attention_map import PATTERN, check_square
from smelt_interp.errors import UserError
from tests.support.app_captures import episodes
from tests.support.app_pages import drawn, page
from tests.support.planted import LOOPED, planted_batch, random_sites
from tests.support.planted_captures import shard_paths


@pytest.mark.parametrize("sample", ["inf", "0", "4", "1.5", "1e400", "x"])
def test_a_sample_that_is_none_falls_back_and_says_so(sample: str, folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample=sample, layer="9")
    assert [each.value for each in test.warning] == [
        f"The address: sample must be one of 1, 2, 3; got '{sample}': shown is 1",
        "The address: layer must be one of 1, 2, 3, 4; got '9': shown is 2",
    ]


def test_every_head_is_sent_on_both_visits_and_nothing_that_is_not_seen(folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample="2", layer="3", head="4", query="7")
    scene, arrays = drawn(test)
    capture = Capture(folder / "looped")
    length = int(capture.samples.length_N[1])
    seen = np.tril(np.ones((length, length), bool))
    for visit, step in enumerate((2, 4)):
        expected_QTS = capture.read("attn.hook_pattern", step, slice(1, 2))[0][:, :length, :length]
        np.testing.assert_array_equal(arrays["row 0"][:, visit], expected_QTS[:, seen].astype(np.float16))
    assert scene["chosen"] == {"sample": 2, "layer": 3, "head": 4, "query": 7, "zoom": ""}
    assert scene["rows"][0]["heads"] == [1, 2, 3, 4]
    assert scene["rows"][0]["titles"] == ["layer 3, visit 1", "layer 3, visit 2"]
    assert scene["rows"][0]["difference"] == "visit 2 − visit 1"
    assert scene["tokens"] == list(capture.samples.labels(1)[:length])
    assert not test.info


def test_of_a_long_sample_one_head_is_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_map, "MOST_CELLS", 100)
    read, asked = Capture.read, []

    def watched(self: Capture, suffix: str, step: int, samples: slice, head: int | str = "all") -> np.ndarray:
        asked.append((step, samples, head))
        return read(self, suffix, step, samples, head)

    monkeypatch.setattr(Capture, "read", watched)
    test = page("attention", folder, capture="looped", sample="3", layer="2", head="2")
    assert asked[:2] == [(step, slice(2, 3), 1) for step in (1, 3)]
    scene, arrays = drawn(test)
    assert scene["rows"][0]["heads"] == [2]
    np.testing.assert_array_equal(
        arrays["row 0"][0, 0][:1], read(Capture(folder / "looped"), PATTERN, 1, slice(2, 3), 1)[0, :1, 0]
    )


def test_a_link_opens_the_same_view_and_its_python_gives_its_numbers(folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample="3", layer="2", head="2", scale="clip", second="baseline")
    assert (test.number_input(key="sample").value, test.selectbox(key="layer").value) == (3, 2)
    assert test.selectbox(key="head").value == 2
    scene, arrays = drawn(test)
    assert scene["scale"] == "clip"
    # The Baseline stands beside at the same executed depth: steps 2 and 4 of its plan.
    assert [row["titles"] for row in scene["rows"]][1] == ["layer 2, visit 1", "layer 4, visit 1"]
    scope: dict[str, object] = {}
    exec(test.code[-1].value, scope)
    for visit in (0, 1):
        np.testing.assert_allclose(scope["frame"][f"visit {visit + 1}"], arrays["row 0"][1, visit], atol=1e-3)


def test_what_is_chosen_on_the_canvas_is_what_the_widgets_show(folder: Path) -> None:
    def script(chosen: dict[str, object]) -> None:
        from functools import partial

        import streamlit as st

        from app.widgets.canvas import _keep
        from probes.attention_map import check_square

        st.session_state["canvas"] = {"chosen": chosen}
        st.session_state["layer"] = 2
        _keep("canvas", {"layer": [2, 3], "query": [None, 1, 2]}, {"zoom": partial(check_square, 40)})

    right = {"layer": 3, "query": 2, "zoom": "9 1 32", "serial": 5}
    for told, layer in ((right, 3), ({"layer": 9, "query": "x", "zoom": "10 1 32"}, 2), ("nonsense", 2)):
        test = AppTest.from_function(script, args=(told,), default_timeout=30).run()
        assert not test.exception
        assert test.session_state["layer"] == layer
        assert ("query" in test.session_state) == ("zoom" in test.session_state) == (layer == 3)


@pytest.mark.parametrize(("kept", "shown"), [("3", 3), ("all", 2), (9, 2)])
def test_a_layer_that_another_page_left_is_carried_over_or_forgotten(kept: str | int, shown: int) -> None:
    def script(kept: str | int) -> None:
        import streamlit as st

        from app.widgets.sample import choose_number

        st.session_state["layer"] = kept
        st.session_state["chosen"] = choose_number("Layer", [0, 1, 2], 1)

    test = AppTest.from_function(script, args=(kept,), default_timeout=30).run()
    assert not test.exception
    assert test.session_state["chosen"] + 1 == test.selectbox(key="layer").value == shown


@pytest.mark.parametrize(
    ("zoom", "rule"),
    [("1 2", "three numbers"), ("1 ² 9", "three numbers"), ("0 1 9", "4 cells or more"), ("1 1 999", "three numbers"),
     ("30 1 30", "4 cells or more"), ("1 1 3", "4 cells or more")],
)  # fmt: skip
def test_a_zoom_is_a_square_of_the_sample(zoom: str, rule: str) -> None:
    with pytest.raises(UserError, match=f"zoom must be {rule}.*; got '{zoom}'"):
        check_square(40, zoom)


def test_the_zoom_is_in_the_address_and_gives_way_to_a_shorter_sample(folder: Path) -> None:
    test = page("attention", folder, capture="looped", zoom="5 2 8")
    assert drawn(test)[0]["chosen"]["zoom"] == test.text_input(key="zoom").value == "5 2 8"
    test.text_input(key="zoom").set_value("5 2 99").run()
    (warning,) = test.warning
    assert "zoom must be" in warning.value
    assert drawn(test)[0]["chosen"]["zoom"] == ""
    (warning,) = page("attention", folder, capture="looped", zoom="x").warning
    assert warning.value.endswith("got 'x': shown is all")


def test_a_baseline_has_one_map_and_says_so(folder: Path) -> None:
    test = page("attention", folder, capture="baseline", layer="2")
    assert [info.value for info in test.info] == [
        "This network visits each layer once (a Baseline), so there is one map and no difference."
    ]
    scene, arrays = drawn(test)
    assert arrays["row 0"].shape[1] == len(scene["rows"][0]["titles"]) == 1


def test_a_layer_outside_the_loop_says_where_the_loop_is(folder: Path) -> None:
    test = page("attention", folder, capture="looped", layer="1")
    assert test.info[0].value.startswith("Layer 1 lies outside the loop and is visited once")
    assert test.info[0].value.endswith("Layers with two visits: 2, 3.")


def test_of_three_visits_any_two_are_compared(tmp_path: Path) -> None:
    config = replace(LOOPED, num_visits=3)
    samples = episodes().samples
    batch = planted_batch(config, samples, random_sites(config, samples, ("attn.hook_pattern",)))
    write_capture(tmp_path / "three", [batch], dtype="float32")
    test = page("attention", tmp_path, capture="three", layer="2", visits=["2", "3"])
    assert not test.warning
    seen = np.tril(np.ones((length := int(samples.length_N[0]),) * 2, bool))
    for at, step in enumerate((3, 5)):
        expected = batch.sites[step, PATTERN][0, 0, :length, :length][seen].astype(np.float16)
        np.testing.assert_array_equal(drawn(test)[1]["row 0"][0, at], expected)
    assert drawn(test)[0]["rows"][0]["difference"] == "visit 3 − visit 2"
    (warning,) = page("attention", tmp_path, capture="three", layer="2", visits=["2", "9"]).warning
    assert "visits must be among 1, 2, 3; got '9': shown are all" in warning.value


def test_a_capture_without_attention_says_what_it_lacks(tmp_path: Path) -> None:
    batch = episodes()
    kept = {key: array for key, array in batch.sites.items() if key[1] == "hook_resid_pre"}
    write_capture(tmp_path / "resid", [replace(batch, sites=kept, heads={})])
    (error,) = page("attention", tmp_path, capture="resid").error
    assert error.value.startswith("a capture must hold attn.hook_pattern to draw it")


def test_a_capture_that_is_damaged_while_its_page_is_open_is_told_in_a_line(tmp_path: Path) -> None:
    write_capture(tmp_path / "open", [episodes()])
    test = page("attention", tmp_path, capture="open")
    (shard,) = shard_paths(tmp_path / "open")
    shard.write_bytes(shard.read_bytes()[:200])
    test.run()
    assert not test.exception
    assert "a shard must be as it was written" in test.error[0].value
