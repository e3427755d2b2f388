"""What all tests share: one thread, no network, and the tiny network most of them use."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator  # noqa: E402  # the variables above must be set before torch is imported

import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    yield
