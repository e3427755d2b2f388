"""What is done with captures on their page: recorded, verified, compared, pinned, deleted."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cache import background, keeping
from cache.record import DEFAULT_SITES
from smelt_interp.terminal.tables import compact
from tests.app.test_folder import tables
from tests.support.app_pages import main_page
from tests.support.planted import BASELINE, LOOPED


@pytest.fixture
def two(folder: Path, tmp_path: Path) -> Path:
    """A folder of two captures."""
    for name in ("looped", "baseline"):
        shutil.copytree(folder / name, tmp_path / "captures" / name, ignore=shutil.ignore_patterns("results"))
    return tmp_path / "captures"


def test_a_capture_is_verified_compared_pinned_and_deleted(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = main_page(two, monkeypatch, capture="looped", **{"with": "baseline"})
    differing = tables(test)[1]
    assert "loop_factors" in differing["what differs"]
    assert "width" not in differing["what differs"]
    (link,) = [each.proto for each in test.get("page_link") if each.proto.page == "overview"]
    assert link.query_string == "capture=looped&against=baseline"

    def press(label: str) -> None:
        (button,) = [each for each in test.button if each.label == label]
        button.click().run()
        assert not test.exception

    press("Verify")
    assert test.success[0].value.startswith("looped is whole: 3 samples in 1 shard,")
    press("Pin")
    assert tables(test)[0]["capture"] == ["looped (pinned)", "baseline"]
    assert [each.disabled for each in test.button if each.label == "Delete …"] == [True]
    press("Unpin")
    press("Delete …")
    assert (two / "looped").exists()
    other = main_page(two, monkeypatch, capture="looped")
    press("Delete looped")
    assert not (two / "looped").exists()
    assert (test.selectbox(key="capture").value, len(test.error)) == ("baseline", 0)
    (error,) = other.run().error  # another visitor's page
    assert "a capture must be one of those in" in error.value
    assert keeping.is_pinned(two / "baseline") is False


def test_a_shard_that_was_changed_is_told_by_verify(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = (two / "looped").glob("*.h5")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    test = main_page(two, monkeypatch, capture="looped")
    (button,) = [each for each in test.button if each.label == "Verify"]
    button.click().run()
    (error,) = test.error
    assert "a shard must be as it was written" in error.value


def test_recording_says_its_size_and_command_first_and_starts_that_command(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "tiny").mkdir(parents=True)
    (tmp_path / "checkpoints" / "tiny" / "config.json").write_text(json.dumps(asdict(LOOPED)))
    (tmp_path / "checkpoints" / "once").mkdir()
    (tmp_path / "checkpoints" / "once" / "config.json").write_text(json.dumps(asdict(BASELINE)))
    (tmp_path / "runs" / "pair" / "looped" / "checkpoint").mkdir(parents=True)
    shutil.copy(tmp_path / "checkpoints" / "tiny" / "config.json", tmp_path / "runs" / "pair" / "looped" / "checkpoint")
    monkeypatch.chdir(tmp_path)
    started: list[tuple[Path, list[str]]] = []
    running = cast(background.Background, SimpleNamespace(code=None, last_line=lambda: "recorded 8 of 64"))
    monkeypatch.setattr(background, "RUNNING", {})

    def start(out: Path, words: list[str]) -> None:
        started.append((out, words))
        background.RUNNING[out] = running

    monkeypatch.setattr(background, "start", start)
    test = main_page(two, monkeypatch, capture="looped")
    size = compact(keeping.recorded_bytes(LOOPED.architecture(), DEFAULT_SITES, 64, 64), digits=3)
    assert any(f"At most 64 × 64 tokens, about **{size}B**" in each.value for each in test.markdown)
    line = f"python -m cache.record --ckpt checkpoints/tiny --data dyck --samples 64 --out {two / 'tiny-dyck-64'}"
    assert line in [each.value for each in test.code]
    (button,) = [each for each in test.button if each.label == "Record"]
    button.click().run()
    assert started == [(two / "tiny-dyck-64", line.split()[3:-2])]
    assert [each.value for each in test.info] == ["tiny-dyck-64: recorded 8 of 64"]
    test.selectbox(key="record ckpt").set_value("runs/pair/looped/checkpoint").run()  # a trained one, by its run's name
    assert any(each.value.endswith("/looped-dyck-64") for each in test.code)
    test.text_input(key="record name").set_value("../x").run()
    assert [each.value for each in test.error] == [f"a name of a capture must be that of a folder in {two}; got '../x'"]
    for name in ("x" * 300, "a\x00b"):
        test.text_input(key="record name").set_value(name).run()
        assert not test.exception
        assert "a name of a capture must be that of a folder in" in test.error[0].value
    test.text_input(key="record name").set_value("looped").run()
    assert [each.disabled for each in test.button if each.label == "Record"] == [True]
