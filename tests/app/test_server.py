"""The dashboard's own settings: who may talk to its server, how much it takes, whose wish its colours are."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit import config
from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

SETTINGS = tomllib.loads((Path(__file__).parents[2] / "app" / ".streamlit" / "config.toml").read_text())


@pytest.fixture
def allowed_hosts() -> Iterator[None]:
    """Streamlit as the dashboard sets it."""
    before = config.get_option("server.allowedHosts")
    config.set_option("server.allowedHosts", SETTINGS["server"]["allowedHosts"])
    yield
    config.set_option("server.allowedHosts", before)


@pytest.mark.parametrize("host", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501"])
def test_this_machine_may_open_a_websocket(host: str, allowed_hosts: None) -> None:
    assert is_host_allowed(host)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8501", "localhost.evil.example", "", None])
def test_a_foreign_host_may_not(host: str | None, allowed_hosts: None) -> None:
    assert not is_host_allowed(host)


def test_an_upload_is_at_most_five_megabytes() -> None:
    assert SETTINGS["server"]["maxUploadSize"] == 5


def test_light_and_dark_are_the_browsers_wish() -> None:
    theme = SETTINGS["theme"]
    assert "base" not in theme
    colours = {name for name in theme["light"] if name.endswith("Color")}
    assert colours == {name for name in theme["dark"] if name.endswith("Color")} >= {"backgroundColor", "textColor"}
