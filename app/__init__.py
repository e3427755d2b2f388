"""Shows answers and computes nothing: the dashboard."""

from pathlib import Path

from smelt_interp.terminal.command_modules import refuse_no_command

refuse_no_command(Path(__file__).parents[1])
