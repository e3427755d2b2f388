"""The memory table of docs/training.md is the budget's, and its lines are lines that the command reads."""

import re
import shlex
from pathlib import Path

from model.training.options import PRESETS, TrainOptions
from smelt_interp.costs.budget import budget
from smelt_interp.terminal.command_line import parse

DOCUMENT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_memory_of_each_preset_is_sixteen_bytes_a_parameter():
    expected = []
    for name, config in PRESETS.items():
        stored = budget(config).parameters.stored
        memory = " | ".join(f"{16 * stored / 2**30 / ranks:.3g}" for ranks in (1, 8, 32, 64))
        expected.append(f"| {name} | {config.num_experts} | {stored:,} | {memory} |")
    assert re.findall(r"^\| [\w.-]+-(?:smelt|baseline) .*$", DOCUMENT, re.MULTILINE) == expected


def test_each_shown_line_of_training_is_read_as_options():
    shown = re.findall(r"-m model\.training\.train (.*)$", DOCUMENT.replace("\\\n", ""), re.MULTILINE)
    read = [
        parse(TrainOptions, prog="", description="", args=shlex.split(line.replace("…", "--out x"))) for line in shown
    ]
    assert [options.expert_parallel for options in read] == [1, 1, 1, 8, 8]
