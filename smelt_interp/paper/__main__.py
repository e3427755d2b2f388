"""`python -m smelt_interp.paper`."""

from smelt_interp.errors import run_command
from smelt_interp.paper.table import main

if __name__ == "__main__":
    run_command(main)
