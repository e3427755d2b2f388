"""The folder of captures that the pages show."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from streamlit.components.v2 import manifest_scanner

from cache.recording import write_capture
from tests.support.app_captures import episodes
from tests.support.app_pages import cut_short
from tests.support.planted import BASELINE, LOOPED


@pytest.fixture(scope="session", autouse=True)
def components_looked_for_once() -> Iterator[None]:
    """Streamlit reads what every installed package says of itself before it opens a page; here before the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole captures, one cut short, one not finished."""
    folder = tmp_path_factory.mktemp("captures")
    for name, config in (("looped", LOOPED), ("baseline", BASELINE)):
        write_capture(folder / name, [episodes(config)], dtype="float32", command=f"record {name}")
    shutil.copytree(folder / "looped", folder / "cut")
    cut_short(folder / "cut")
    (folder / "half").mkdir()
    request = {"command": "record half", "request": {"samples": {"number": 3}}}
    (folder / "half" / "request.json").write_text(json.dumps(request))
    return folder
