"""The attention page, run in process on planted captures."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from cache.recording import write_capture
from cache.store import Capture
from tests.support.app_captures import episodes
from tests.support.app_pages import page
from tests.support.planted import LOOPED, planted_batch, random_sites


def maps_of(test: AppTest) -> list[np.ndarray]:
    """The matrices of the heatmaps of the only figure, top row first."""
    (chart,) = test.get("plotly_chart")
    drawn = json.loads(chart.proto.spec)["data"]
    maps = [trace["z"] for trace in drawn if trace["type"] == "heatmap"]
    arrays = [np.frombuffer(base64.b64decode(z["bdata"]), z["dtype"]) for z in maps]
    return [array.reshape([int(n) for n in z["shape"].split(",")]) for array, z in zip(arrays, maps, strict=True)]


@pytest.mark.parametrize("sample", ["inf", "0", "4", "1.5", "1e400", "x"])
def test_a_sample_that_is_none_falls_back_and_says_so(sample: str, folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample=sample, layer="9")
    assert [each.value for each in test.warning] == [
        f"The address: sample must be one of 1, 2, 3; got '{sample}': shown is 1",
        "The address: layer must be one of 1, 2, 3, 4; got '9': shown is 2",
    ]


def test_the_maps_are_both_visits_and_their_difference(folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample="2", layer="3", head="4")
    capture = Capture(folder / "looped")
    length = int(capture.samples.length_N[1])
    first, second = (capture.read("attn.hook_pattern", step, slice(1, 2), 3)[0][:length, :length] for step in (2, 4))
    seen = np.tril(np.ones((length, length), bool))
    for drawn, expected in zip(maps_of(test), (first, second, second - first), strict=True):
        np.testing.assert_array_equal(np.isnan(drawn), ~seen)
        np.testing.assert_array_equal(drawn[seen], expected[seen])
    assert not test.info


def test_only_the_matrices_on_the_page_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = Capture.read, []

    def watched(self: Capture, suffix: str, step: int, samples: slice, head: int) -> np.ndarray:
        asked.append((suffix, step, samples, head))
        return read(self, suffix, step, samples, head)

    monkeypatch.setattr(Capture, "read", watched)
    page("attention", folder, capture="looped", sample="3", layer="2", head="1")
    assert asked == [("attn.hook_pattern", step, slice(2, 3), 0) for step in (1, 3)]


def test_a_link_opens_the_same_view_and_its_python_gives_the_same_figure(folder: Path) -> None:
    test = page("attention", folder, capture="looped", sample="3", layer="2", head="2")
    assert (test.number_input(key="sample").value, test.selectbox(key="layer").value) == (3, 2)
    assert test.selectbox(key="head").value == 2
    scope: dict[str, object] = {}
    exec(test.code[-1].value.replace("figure.show()", ""), scope)
    (chart,) = test.get("plotly_chart")
    assert json.loads(chart.proto.spec)["data"] == json.loads(scope["figure"].to_json())["data"]


def test_a_baseline_has_one_map_and_says_so(folder: Path) -> None:
    test = page("attention", folder, capture="baseline", layer="2")
    assert [info.value for info in test.info] == [
        "This network visits each layer once (a Baseline), so there is one map and no difference."
    ]
    assert len(maps_of(test)) == 1


def test_a_layer_outside_the_loop_says_where_the_loop_is(folder: Path) -> None:
    test = page("attention", folder, capture="looped", layer="1")
    assert test.info[0].value.startswith("Layer 1 lies outside the loop and is visited once")
    assert test.info[0].value.endswith("Layers with two visits: 2, 3.")


def test_of_three_visits_any_two_are_compared(tmp_path: Path) -> None:
    config = replace(LOOPED, num_visits=3)
    samples = episodes().samples
    batch = planted_batch(config, samples, random_sites(config, samples, ("attn.hook_pattern",)))
    write_capture(tmp_path / "three", [batch], dtype="float32")
    test = page("attention", tmp_path, capture="three", layer="2", earlier="2", later="3")
    length = int(samples.length_N[0])
    second, third = (batch.sites[step, "attn.hook_pattern"][0, 0, :length, :length] for step in (3, 5))
    np.testing.assert_array_equal(maps_of(test)[2], np.where(np.isnan(maps_of(test)[0]), np.nan, third - second))
    test = page("attention", tmp_path, capture="three", layer="2", earlier="2")
    assert test.selectbox(key="later").options == ["3"]


def test_a_capture_without_attention_says_what_it_lacks(tmp_path: Path) -> None:
    batch = episodes()
    kept = {key: array for key, array in batch.sites.items() if key[1] == "hook_resid_pre"}
    write_capture(tmp_path / "resid", [replace(batch, sites=kept, heads={})])
    (error,) = page("attention", tmp_path, capture="resid").error
    assert error.value.startswith("a capture must hold attn.hook_pattern to draw it")
