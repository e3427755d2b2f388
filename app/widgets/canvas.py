"""The canvas: cells, grids of heads and strips of tokens, drawn by canvas.js, and what is chosen on it."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import streamlit as st
from numpy import generic
from numpy.typing import NDArray

from probes.attention_map import ROLE_COLOURS
from probes.running.pictures import COLOURS
from smelt_interp.data.samples import Samples, role_name
from smelt_interp.errors import UserError

SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
LARGE = 2**20
"""Bytes of arrays from which they are deflated on the way."""

Scene = Mapping[str, object]
"""What is drawn, as JSON values; canvas.js reads it."""
Known = Mapping[str, Sequence[int | None]]
"""What may be chosen, by the key of the widget that shows it."""
Checks = Mapping[str, Callable[[str], object]]
"""The same of texts: each raises UserError for one that may not be chosen."""


def tokens_of(sample: Samples) -> dict[str, object]:
    """The first sample's tokens as every scene has them: labels, roles, colours."""
    length = int(sample.length_N[0])
    return {
        "tokens": sample.labels(0)[:length],
        "roles": sample.role_NT[0, :length].tolist(),
        "starts": sample.segment_start_NT[0, :length].tolist(),
        "roleNames": {role: role_name(role) for role in ROLE_COLOURS},
        "roleColours": dict(ROLE_COLOURS),
    }


def packed(scene: Scene, arrays: Mapping[str, NDArray[generic]]) -> bytes:
    """A line of JSON, then the numbers of the arrays that it names, in order: what the browser is sent."""
    named = [{"name": name, "type": str(array.dtype), "shape": array.shape} for name, array in arrays.items()]
    body = b"".join(array.tobytes() for array in arrays.values())
    deflated = len(body) > LARGE
    line = json.dumps({**scene, "colours": COLOURS, "arrays": named, "deflated": deflated})
    return b"\n".join([line.encode(), zlib.compress(body, 1) if deflated else body])


def show_canvas(
    key: str, scene: Scene, arrays: Mapping[str, NDArray[generic]], known: Known, checks: Checks = MappingProxyType({})
) -> None:
    """Draw a scene; what is chosen on it goes to the widgets of these keys.

    `scene["chosen"]` says what is chosen now, by the same keys.
    """
    serial = st.session_state.get(f"{key} serial", 0)
    data = packed({**scene, "known": known, "serial": serial}, arrays)
    mount = st.components.v2.component("canvas", js=SCRIPT, css=STYLE)
    mount(key=key, data=data, on_chosen_change=partial(_keep, key, known, checks))


def _keep(key: str, known: Known, checks: Checks) -> None:
    """Keep what a visitor chose; what is none of the known values is no choice."""
    chosen = st.session_state[key].get("chosen")
    if not isinstance(chosen, dict):
        return
    for name, values in known.items():
        if name in chosen and chosen[name] in values:
            st.session_state[name] = values[values.index(chosen[name])]
    for name, check in checks.items():
        text = chosen.get(name) or ""
        try:
            if isinstance(text, str):
                check(text)
                st.session_state[name] = text
        except UserError:
            continue
    if isinstance(chosen.get("serial"), int):
        st.session_state[f"{key} serial"] = chosen["serial"]
