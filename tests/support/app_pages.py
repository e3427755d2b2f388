"""Pages of the dashboard, run in process on planted captures."""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

APP = Path(__file__).parents[2] / "app"


def cut_short(capture: Path) -> None:
    """The manifest of a capture as a full disk or a bad copy would leave it."""
    (capture / "manifest.json").write_bytes((capture / "manifest.json").read_bytes()[:500])


def page(module: str, folder: Path, *names: str, **query: str) -> AppTest:
    """A page as it is right after its address is opened."""

    def script(module: str, names: tuple[str, ...], folder: str) -> None:
        from functools import partial
        from importlib import import_module
        from pathlib import Path

        from app.widgets.address import show_mistakes
        from app.widgets.capture_folder import choose_capture

        choose_capture(Path(folder))
        partial(getattr(import_module(f"app.views.{module}"), f"{module}_page"), *names)(Path(folder))
        show_mistakes()

    test = AppTest.from_function(script, default_timeout=60, args=(module, names, str(folder)))
    test.query_params.update(query)
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def probe(name: str, folder: Path, **query: str) -> AppTest:
    return page("probe", folder, name, **query)


def main_page(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **query: str) -> AppTest:
    monkeypatch.setattr(sys, "argv", ["app/main.py", *(arguments or ("--captures", str(folder)))])
    test = AppTest.from_file(str(APP / "main.py"), default_timeout=60)
    test.query_params.update(query)
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def drawn(test: AppTest) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """What the browser is sent: the scene, and its arrays by name."""
    (canvas,) = (each for each in test.get("bidi_component") if each.proto.bytes)
    line, _, body = canvas.proto.bytes.partition(b"\n")
    scene = json.loads(line)
    body = zlib.decompress(body) if scene["deflated"] else body
    arrays, at = {}, 0
    for each in scene["arrays"]:
        size = int(np.prod(each["shape"])) * np.dtype(each["type"]).itemsize
        arrays[each["name"]] = np.frombuffer(body[at : at + size], each["type"]).reshape(each["shape"])
        at += size
    assert at == len(body)
    return scene, arrays
