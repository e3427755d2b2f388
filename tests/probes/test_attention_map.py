"""Attention maps: what is read, what is drawn, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.recording import write_capture
from cache.store import Capture
from probes import attention_map
from probes.attention_map import (
    ROLE_COLOURS,
    attention_frame,
    attention_maps,
    drawable,
    head_grid,
    moved_share,
    read_patterns,
    seen_keys,
    thumbnails,
)
from probes.running.pictures import COLOURS, most_of
from smelt_interp.data.samples import Role
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
    maps = attention_maps(patterns, capture.sample(1).samples)
    length = int(capture.samples.length_N[1])
    difference_TS = maps[2].values_TS
    assert difference_TS.shape == (length, length)
    np.testing.assert_allclose(difference_TS[1:, 0], VISIT_MASS[1] - VISIT_MASS[0], atol=1e-6)
    assert [each.title for each in maps] == ["visit 1", "visit 2", "visit 2 - visit 1"]  # letters of a PNG's font
    assert [each.above for each in maps] == [*COLOURS, COLOURS[1]]  # as the page has them
    assert most_of([maps], "clip") == most_of([maps[:2]], "clip")


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


def test_keys_out_of_sight_are_not_seen() -> None:
    # Two documents in one row: the second one begins at position 3.
    samples = replace(text_samples(1, 5), segment_start_NT=np.array([[0, 0, 0, 3, 3]], np.int32))
    expected = ["#....", "##...", "###..", "...#.", "...##"]
    assert ["".join("#" if seen else "." for seen in row) for row in seen_keys(samples, causal=True)] == expected
    both_ways = ["".join("#" if seen else "." for seen in row) for row in seen_keys(samples, causal=False)]
    assert both_ways == ["###.."] * 3 + ["...##"] * 2


def test_a_query_that_gives_half_of_its_attention_to_another_key_moves_half() -> None:
    seen_TS = np.tril(np.ones((3, 3), bool))
    earlier_TS = np.array([[1, 0, 0], [1, 0, 0], [0.5, 0.5, 0]])
    later_TS = np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]])
    # The first query has no choice; the second moves a half, the third all.
    assert moved_share(earlier_TS[None], later_TS[None], seen_TS).tolist() == [0.75]
    assert moved_share(earlier_TS[None], earlier_TS[None], seen_TS).tolist() == [0.0]
    assert np.isnan(moved_share(earlier_TS[None, :1, :1], later_TS[None, :1, :1], seen_TS[:1, :1])).all()


def test_a_thumbnail_is_the_mean_of_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    values_TS, seen_TS = np.arange(16.0).reshape(4, 4), np.tril(np.ones((4, 4), bool))
    np.testing.assert_array_equal(thumbnails(values_TS[None], seen_TS)[0], np.where(seen_TS, values_TS, np.nan))
    monkeypatch.setattr(attention_map, "THUMBNAIL", 2)
    np.testing.assert_allclose(thumbnails(values_TS[None], seen_TS)[0], [[3, np.nan], [10.5, 13]], equal_nan=True)
    # 0, 4, 5; 8, 9, 12, 13; 10, 14, 15


def test_heads_are_sorted_by_how_much_they_move(capture: Capture) -> None:
    grid = head_grid(capture, 1, (2, 4))
    assert sorted(grid.order) == [0, 1, 2, 3]
    moved = [int(grid.about[at].removesuffix("%")) for at in grid.order]
    assert moved == sorted(moved, reverse=True)
    assert grid.thumbnails.dtype == np.float16
    assert head_grid(capture, 1, (0,)).order == [0, 1, 2, 3]


def test_every_role_has_a_colour_of_its_own() -> None:
    assert len(set(ROLE_COLOURS.values())) == len(Role)


def test_padding_is_not_drawn(capture: Capture) -> None:
    shortest = int(capture.samples.length_N.argmin())
    patterns = read_patterns(capture, sample=shortest, layer=0, head=0, visits=(0,))
    length = int(capture.samples.length_N[shortest])
    (drawn,) = attention_maps(patterns, capture.sample(shortest).samples)
    assert drawn.values_TS.shape == (length, length)
    assert not np.isnan(np.diag(drawn.values_TS)).any()


def test_the_table_of_a_map_has_every_key_in_sight_on_every_visit(capture: Capture) -> None:
    patterns = read_patterns(capture, sample=1, layer=2, head=3, visits=(0, 1))
    frame = attention_frame(patterns, capture.sample(1).samples)
    length = int(capture.samples.length_N[1])
    assert len(frame) == length * (length + 1) // 2
    first = frame[(frame["key"] == 1) & (frame["query"] > 1)]
    np.testing.assert_allclose(first[["visit 1", "visit 2"]], [VISIT_MASS] * (length - 1), atol=1e-6)
    np.testing.assert_allclose(frame["uniform"], 1 / frame["query"])
    assert frame["query token"].iloc[-1] == capture.samples.labels(1)[length - 1]


def test_a_capture_without_attention_is_refused(tmp_path: Path) -> None:
    batch = episodes(LOOPED)
    kept = {key: array for key, array in batch.sites.items() if key[1] == "hook_resid_pre"}
    other = write_capture(tmp_path / "resid.h5", [replace(batch, sites=kept, heads={})])
    with pytest.raises(UserError, match=r"a capture must hold attn\.hook_pattern to draw it; .* holds hook_resid_pre"):
        drawable(other)
