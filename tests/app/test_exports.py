"""What leaves a page as a file."""

from io import BytesIO
from pathlib import Path

import pytest
import streamlit
from PIL import Image
from streamlit.delta_generator import DeltaGenerator

from cache.store import Capture
from tests.support.app_pages import page, probe


def test_every_export_has_a_name_and_says_what_it_is_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, bytes | str] = {}
    button = streamlit.download_button
    offer = DeltaGenerator.download_button

    def watched(self: DeltaGenerator, label: str, data: object, name: str, *rest: object, **more: object) -> bool:
        held[name] = data() if callable(data) else data
        return offer(self, label, data, name, *rest, **more)

    monkeypatch.setattr(DeltaGenerator, "download_button", watched)
    monkeypatch.setattr(streamlit, "download_button", lambda *args, **more: watched(button.__self__, *args, **more))
    digest = Capture(folder / "looped").digest
    page("attention", folder, capture="looped", sample="2", layer="3", head="4")
    stem = "attention_looped_sample-2_layer-3_head-4"
    with Image.open(BytesIO(held[f"{stem}.png"])) as picture:
        kept = "".join(f"{name} {value}" for name, value in picture.text.items())
    for text in (held[f"{stem}.csv"], held[f"{stem}.json"], held[f"{stem}.svg"], kept):
        assert all(word in text[:600] for word in ("looped", digest, "layer", "head", "visits", "sample"))
    probe("attention_sink", folder, capture="looped", t_min="3")
    for kind in ("csv", "html"):
        text = held[f"attention_sink_looped_dyck.{kind}"]
        assert all(word in text[:1500] for word in ("looped", "baseline", digest, "t_min: 3"))
    assert f"attention_sink_looped_{digest[:12]}.json" in held
