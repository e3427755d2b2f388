"""Attention maps: what is read, what is drawn, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.recording import write_capture
from cache.store import Capture
from probes.attention_map import (
    ROLE_COLOURS,
    attention_figure,
    attention_frame,
    axis_names,
    drawable,
    read_patterns,
    visible,
)
from smelt_interp.data.samples import Role
from smelt_interp.data.token_text import TokenText
from smelt_interp.errors import UserError
from tests.support.app_captures import VISIT_MASS, episodes
from tests.support.planted import LOOPED, text_samples


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return write_capture(tmp_path_factory.mktemp("captures") / "run.h5", [episodes()], dtype="float32")


def test_layers_come_with_their_visits(capture: Capture) -> None:
    assert drawable(capture).visits == {0: (0,), 1: (0, 1), 2: (0, 1), 3: (0,)}
    assert drawable(capture).heads == (0, 1, 2, 3)
    assert drawable(capture).revisited() == [1, 2]


def test_each_visit_gives_the_mass_that_was_planted_on_it(capture: Capture) -> None:
    patterns = read_patterns(capture, sample=1, layer=2, head=3, visits=(0, 1))
    for visit, mass in zip((0, 1), VISIT_MASS, strict=True):
        np.testing.assert_allclose(patterns[visit][1:, 0], mass, atol=1e-6)
    figure = attention_figure(patterns, capture.samples, sample=1)
    length = int(capture.samples.length_N[1])
    difference_TS = figure.data[2].z
    assert difference_TS.shape == (length, length)
    np.testing.assert_allclose(difference_TS[1:, 0], VISIT_MASS[1] - VISIT_MASS[0], atol=1e-6)
    assert [trace.name for trace in figure.data[:3]] == ["visit 1", "visit 2", "visit 2 − visit 1"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sample": 3}, "sample must be a recorded one, 0 to 2 from 0; got 3"),
        ({"layer": 4}, "layer must be a recorded one, 0 to 3 from 0; got 4"),
        ({"head": -1}, "head must be a recorded one, 0 to 3 from 0; got -1"),
        ({"visits": (0, 2)}, "visit must be a recorded one, 0 to 1 from 0; got 2"),
    ],
)
def test_what_was_not_recorded_is_refused(
    capture: Capture, asked: dict[str, int | tuple[int, ...]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_patterns(capture, **{"sample": 0, "layer": 1, "head": 0, "visits": (0,), **asked})


def test_keys_out_of_sight_are_not_numbers() -> None:
    # Two documents in one row: the second one begins at position 3.
    seen_TS = ~np.isnan(visible(np.ones((5, 5)), np.array([0, 0, 0, 3, 3])))
    expected = ["#....", "##...", "###..", "...#.", "...##"]
    assert ["".join("#" if seen else "." for seen in row) for row in seen_TS] == expected
    both_ways_TS = ~np.isnan(visible(np.ones((5, 5)), np.array([0, 0, 0, 3, 3]), causal=False))
    assert ["".join("#" if seen else "." for seen in row) for row in both_ways_TS] == ["###.."] * 3 + ["...##"] * 2


def test_a_token_is_named_by_position_and_label_in_the_colour_of_its_role() -> None:
    samples = text_samples(1, 4)
    text = TokenText.of([b"", b"<", b" ", b"x"])
    names = axis_names(replace(samples, text=text, length_N=np.array([3], np.int32)))
    assert names == [
        f'<span style="color:{ROLE_COLOURS[Role.BOS]}">1 <b>&lt;bos&gt;</b></span>',
        f'<span style="color:{ROLE_COLOURS[Role.TEXT]}">2 <b>&lt;</b></span>',
        f'<span style="color:{ROLE_COLOURS[Role.TEXT]}">3 <b>␣</b></span>',
    ]


def test_every_role_has_a_colour_of_its_own() -> None:
    assert len(set(ROLE_COLOURS.values())) == len(Role)


def test_padding_is_not_drawn(capture: Capture) -> None:
    shortest = int(capture.samples.length_N.argmin())
    patterns = read_patterns(capture, sample=shortest, layer=0, head=0, visits=(0,))
    (heatmap,) = (
        trace for trace in attention_figure(patterns, capture.samples, shortest).data if trace.type == "heatmap"
    )
    assert len(heatmap.x) == len(heatmap.y) == int(capture.samples.length_N[shortest])
    assert not np.isnan(np.diag(heatmap.z)).any()


def test_the_pointer_reads_head_both_visits_and_uniform(capture: Capture) -> None:
    patterns = read_patterns(capture, sample=1, layer=2, head=3, visits=(0, 1))
    drawn = attention_figure(patterns, capture.samples, 1, where="layer 3, head 4").data[2]
    np.testing.assert_allclose(drawn.customdata[4, 0], [*VISIT_MASS, 1 / 5], atol=1e-6)
    assert drawn.hovertemplate.startswith("layer 3, head 4<br>query %{y}, key %{x}<br>share of the query's attention:")
    for at, title in enumerate(("visit 1", "visit 2", "uniform")):
        assert f"{title} <b>%{{customdata[{at}]:.4f}}</b>" in drawn.hovertemplate


def test_the_table_of_a_map_has_every_key_in_sight_on_every_visit(capture: Capture) -> None:
    patterns = read_patterns(capture, sample=1, layer=2, head=3, visits=(0, 1))
    frame = attention_frame(patterns, capture.samples, 1)
    length = int(capture.samples.length_N[1])
    assert len(frame) == length * (length + 1) // 2
    first = frame[(frame["key"] == 1) & (frame["query"] > 1)]
    np.testing.assert_allclose(first[["visit 1", "visit 2"]], [VISIT_MASS] * (length - 1), atol=1e-6)
    np.testing.assert_allclose(frame["uniform"], 1 / frame["query"])
    assert frame["query token"].iloc[-1] == capture.samples.labels(1)[length - 1]


def test_none_or_three_visits_are_no_picture(capture: Capture) -> None:
    with pytest.raises(UserError, match="visits to draw must be one or two; got 0"):
        attention_figure({}, capture.samples, 0)


def test_a_capture_without_attention_is_refused(tmp_path: Path) -> None:
    batch = episodes(LOOPED)
    kept = {key: array for key, array in batch.sites.items() if key[1] == "hook_resid_pre"}
    other = write_capture(tmp_path / "resid.h5", [replace(batch, sites=kept, heads={})])
    with pytest.raises(UserError, match=r"a capture must hold attn\.hook_pattern to draw it; .* holds hook_resid_pre"):
        drawable(other)
