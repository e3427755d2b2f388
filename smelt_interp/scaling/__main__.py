"""`python -m smelt_interp.scaling`."""

from smelt_interp.errors import run_command
from smelt_interp.scaling.command import main

if __name__ == "__main__":
    run_command(main)
