"""What can be said about a looped Mixture-of-Experts transformer without running one."""

from pathlib import Path

from smelt_interp.terminal.command_modules import refuse_no_command

__version__ = "0.1.0"

refuse_no_command(Path(__file__).parents[1])
