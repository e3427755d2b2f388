"""Networks that run: the looped Mixture-of-Experts transformer, its hooks, checkpoints and training."""

from pathlib import Path

from smelt_interp.terminal.command_modules import refuse_no_command

refuse_no_command(Path(__file__).parents[1])
