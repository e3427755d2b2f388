"""What all tests share: one thread, no downloads, and the choice to run as where torch is not installed."""

import gc
import os
from pathlib import Path

import pytest

from tests.support.without_torch import needs_torch, take_away

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy and torch are loaded, which is later


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--torch without` runs the files that need no torch, in a process that finds none; `--torch with` the others."""
    parser.addoption("--torch", choices=("any", "with", "without"), default="any", help="which files of tests run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--torch") == "without":
        take_away()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption("--torch")
    if chosen == "any" or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    return True if needs_torch(collection_path) == (chosen == "without") else None


def pytest_collection_finish() -> None:
    """What was imported stays and is not looked through again: Streamlit collects garbage after each run of a page."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end everything goes: nanobind calls what is left a leak."""
    gc.unfreeze()
