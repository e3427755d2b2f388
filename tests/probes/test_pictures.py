"""Pictures of matrices: white at zero, grey where nothing is seen, one depth for every map."""

import base64
import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from probes.running.pictures import COLOURS, SCALES, SIDE, UNSEEN, Map, coloured, most_of, png_bytes, svg_text

FACTS = {"capture": "a & b", "layer": 3}


def colours_of(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


@pytest.mark.parametrize("scale", SCALES)
def test_zero_is_white_one_is_the_colour_and_the_unseen_is_grey(scale: str) -> None:
    painted = coloured(np.array([0, 1, -1, np.nan]), scale, 1.0).tolist()
    assert painted == [[255] * 3, colours_of(COLOURS[1]), colours_of(COLOURS[0]), list(UNSEEN)]


def test_a_quarter_is_half_deep_by_its_root_and_whole_where_colours_are_clipped() -> None:
    depths = {scale: 255 - int(coloured(np.array([0.25]), scale, most)[0, 0])
              for scale, most in (("linear", 1.0), ("square root", 1.0), ("clip", 0.25))}  # fmt: skip
    whole = 255 - colours_of(COLOURS[1])[0]
    assert [depths[scale] for scale in SCALES] == pytest.approx([whole / 4, whole / 2, whole], abs=1)
    maps = [Map("x", np.array([[0.1] * 99 + [1.0]]))]
    assert most_of([maps], "clip") == pytest.approx(0.1, abs=0.02)
    assert most_of([maps], "linear") == 1


def test_png_and_svg_hold_the_same_cells_and_facts() -> None:
    values_TS = np.array([[1.0, np.nan], [0.25, 0.75]], np.float32)
    rows, cells = [[Map("visit 1", values_TS, COLOURS[0])]], coloured(values_TS, "linear", 1.0, COLOURS[0])
    assert cells[0, 0].tolist() == colours_of(COLOURS[0])
    with Image.open(BytesIO(png_bytes(rows, "linear", FACTS))) as picture:
        assert picture.text == {"capture": "a & b", "layer": "3"}
        pixels = np.asarray(picture)
    text = svg_text(rows, "linear", FACTS)
    assert "capture: a &amp; b" in text
    assert "visit 1: query 1 to 2 down, key 1 to 2 across" in text
    (data,) = re.findall(r"base64,([^\"]+)", text)
    with Image.open(BytesIO(base64.b64decode(data))) as embedded:
        np.testing.assert_array_equal(np.asarray(embedded), cells)
    left, top = (int(re.search('<image x="(\\d+)" y="(\\d+)"', text)[at]) for at in (1, 2))
    quarter = SIDE // 4
    for (row, column), cell in zip(((0, 0), (0, 1), (1, 0), (1, 1)), cells.reshape(-1, 3), strict=True):
        at = (top + quarter + row * SIDE // 2, left + quarter + column * SIDE // 2)
        assert pixels[at].tolist() == cell.tolist()
