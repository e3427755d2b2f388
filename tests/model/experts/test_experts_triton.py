"""The Triton kernels without a GPU: interpreted in a process of their own, because the choice is made at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "support" / "interpreted_experts.py"


@pytest.mark.timeout(900)
def test_the_interpreted_kernels_pass_all_their_tests():
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FILE)],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    summary = finished.stdout.strip().splitlines()[-1]
    assert " passed" in summary
    assert "skipped" not in summary
