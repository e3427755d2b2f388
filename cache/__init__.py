"""What was seen: captures of activations, kept apart by visit, on disk (HDF5) and in memory."""

from pathlib import Path

from smelt_interp.terminal.command_modules import refuse_no_command

refuse_no_command(Path(__file__).parents[1])
