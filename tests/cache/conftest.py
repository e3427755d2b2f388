"""A capture that the tests of this folder read, and may damage."""

import shutil
from pathlib import Path

import pytest

from cache.batch import Batch
from tests.support.planted_captures import (
    planted_capture,
    random_batch,
)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> Path:
    return planted_capture(tmp_path_factory.mktemp("written") / "a", batch, dtype="float32").path


@pytest.fixture
def path(tmp_path: Path, written: Path) -> Path:
    """A capture of float32, shards of 3, 3 and 1 samples, that the test may damage."""
    return Path(shutil.copytree(written, tmp_path / "a"))
