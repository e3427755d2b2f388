"""Matrices as files: PNG and SVG of maps side by side, under lines that say what they are of."""

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from probes.running.exports import Facts, lines

COLOURS = ("#2f6db5", "#c8641b")
"""Below and above zero; also earlier and later."""
UNSEEN = (212, 216, 220)
Scale = Literal["linear", "square root", "clip"]
"""How deep a colour is for a share: itself, its root, or itself up to what 99 of 100 cells do not reach."""
SCALES: tuple[Scale, ...] = get_args(Scale)
SIDE, GAP, LINE = 400, 40, 16


class Map(NamedTuple):
    """One matrix."""

    title: str
    values_TS: NDArray[np.float32]
    """Shares, or differences of two; NaN is drawn grey, 0 white."""
    above: str = COLOURS[1]
    """The colour of what is above 0, one of `COLOURS`."""
    difference: bool = False
    """Of two others, whose shares alone say where colours are clipped."""


def png_bytes(rows: Sequence[Sequence[Map]], scale: Scale, facts: Facts) -> bytes:
    """The maps as one picture; the facts stand on it and in its text chunks."""
    placed, texts, (width, height) = _layout(rows, scale, facts)
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    for x, y, image in placed:
        picture.paste(image.resize((SIDE, SIDE), Image.Resampling.BOX if image.width > SIDE else 0), (x, y))
    for x, y, text in texts:
        draw.text((x, y - 11), text, fill="#1f2630", font_size=12)
    kept = PngInfo()
    for name, value in facts.items():
        kept.add_itxt(name, str(value))
    out = BytesIO()
    picture.save(out, "PNG", pnginfo=kept)
    return out.getvalue()


def svg_text(rows: Sequence[Sequence[Map]], scale: Scale, facts: Facts) -> str:
    """The same with words as text and each map as its own cells, a pixel a cell."""
    placed, texts, (width, height) = _layout(rows, scale, facts)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    parts += [f"<desc>{escape(chr(10).join(lines(facts)))}</desc>", '<rect width="100%" height="100%" fill="#fff"/>']
    for x, y, image in placed:
        out = BytesIO()
        image.save(out, "PNG")
        data = base64.b64encode(out.getvalue()).decode()
        parts.append(
            f'<image x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" style="image-rendering:pixelated" '
            f'href="data:image/png;base64,{data}"/>'
        )
    parts += [f'<text x="{x}" y="{y}" font-size="12" fill="#1f2630">{escape(text)}</text>' for x, y, text in texts]
    return "\n".join([*parts, "</svg>\n"])


def coloured(values: NDArray[np.floating], scale: Scale, most: float, above: str = COLOURS[1]) -> NDArray[np.uint8]:
    """White at 0, `above` above it, the first colour below, grey where NaN. -> the shape of `values` and (3,)"""
    share = np.minimum(np.abs(np.nan_to_num(values)) / most, 1)
    depth = np.sqrt(share) if scale == "square root" else share
    low, high = (np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) for colour in (COLOURS[0], above))
    hue = np.where((values < 0)[..., None], low, high)
    mixed = np.where(np.isnan(values)[..., None], UNSEEN, np.round(255 + (hue - 255) * depth[..., None]))
    painted: NDArray[np.uint8] = mixed.astype(np.uint8)
    return painted


def most_of(rows: Sequence[Sequence[Map]], scale: Scale) -> float:
    """The value of the deepest colour, one for all maps."""
    if scale != "clip":
        return 1.0
    shown = [each.values_TS for row in rows for each in row if not each.difference]
    shares = np.concatenate([values_TS[~np.isnan(values_TS)] for values_TS in shown])
    return max(float(np.quantile(shares, 0.99)), 1e-4)


def _layout(
    rows: Sequence[Sequence[Map]], scale: Scale, facts: Facts
) -> tuple[list[tuple[int, int, Image.Image]], list[tuple[int, int, str]], tuple[int, int]]:
    """Where each map and each line of text stands (the left end of its base line), and the size of it all."""
    header = [*lines(facts), f"white is 0, the deepest colour {most_of(rows, scale):.3g} ({scale}), grey is not seen"]
    texts = [(GAP, GAP + LINE * at, line[:160]) for at, line in enumerate(header)]
    top = GAP + LINE * len(header)
    placed: list[tuple[int, int, Image.Image]] = []
    for row_at, row in enumerate(rows):
        y = top + LINE + row_at * (SIDE + GAP)
        for column, each in enumerate(row):
            x = GAP + column * (SIDE + GAP)
            pixels = coloured(each.values_TS, scale, most_of(rows, scale), each.above)
            placed.append((x, y, Image.fromarray(pixels)))
            shape = "query 1 to {} down, key 1 to {} across".format(*each.values_TS.shape)
            texts.append((x, y - 5, f"{each.title}: {shape}"))
    width = GAP + max(len(row) for row in rows) * (SIDE + GAP)
    return placed, texts, (width, top + LINE + len(rows) * (SIDE + GAP))
