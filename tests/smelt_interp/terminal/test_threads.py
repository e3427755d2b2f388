"""The limit on threads holds for what is loaded and for what is loaded later."""

import subprocess
import sys

SCRIPT = """
import os
import numpy
from threadpoolctl import threadpool_info
from smelt_interp.terminal.threads import limit_threads
limit_threads(3)
print({pool["num_threads"] for pool in threadpool_info()}, os.environ["OMP_NUM_THREADS"])
from smelt_interp.errors import run_command
run_command(lambda: print({pool["num_threads"] for pool in threadpool_info()}))
"""


def test_a_command_takes_one_thread_and_as_many_as_it_asks_for() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert printed == "{3} 3\n{1}\n"
