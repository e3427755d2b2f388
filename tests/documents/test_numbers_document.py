"""What docs/numbers.md shows of a command is what the command prints, and every command it names is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from smelt_interp.costs import matching, serving
from smelt_interp.costs.budget import budget, mismatch
from smelt_interp.costs.presets import PAPER_ATTENDED_TOKENS, PAPER_PAIRS
from smelt_interp.paper import table as paper
from tests.support.commands import Command

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {block.splitlines()[0]: block for block in re.findall(r"```\n(.*?)```", DOCUMENT, re.DOTALL)}


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("title", "module", "arguments"),
    [
        ("Matched networks, best first", matching, ["--baseline", "200M", "--visits", "2", "--span", "0.5"]),
        ("Serving, batch 1, context 4096, cache l2", serving, ["--pair", "200M"]),
        (
            "Printed figures of arXiv:2609.01343",
            paper,
            ["--verdict", "contradiction", "not printed", "within rounding"],
        ),
    ],
)
def test_a_shown_table_is_what_the_command_prints(
    title: str, module, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert lines(BLOCKS[title]) == lines(Command(monkeypatch, capsys).text(module.main, *arguments))


def test_the_shown_mismatches_of_the_four_baselines_are_found_and_the_papers() -> None:
    percents = r"([\d.]+)% \| ([+-][\d.]+)%"
    row_of_table = rf"^\| ([\d.]+[MB]) \| [\d.]+ s \| (.*?) \| {percents} \| {percents} \|$"
    shown = re.findall(row_of_table, DOCUMENT, re.MULTILINE)
    assert [scale for scale, *_ in shown] == list(PAPER_PAIRS)
    for scale, network, ours, shape, papers, papers_shape in shown:
        found = matching.search(matching.MatchingOptions(baseline=scale)).best[0]
        pair = PAPER_PAIRS[scale]
        row = mismatch(*(budget(config, PAPER_ATTENDED_TOKENS) for config in (pair.smelt, pair.baseline)))
        assert network in matching.shape_text(found.config)
        assert ours == f"{100 * found.mismatch.largest:.2f}"
        assert papers == f"{100 * row.largest:.2f}"
        assert shape == f"{100 * found.shape_mismatch:+.2f}"
        ratios = [config.expert_width / config.width for config in (pair.smelt, pair.baseline)]
        assert papers_shape == f"{100 * (ratios[0] / ratios[1] - 1):+.2f}"


@pytest.mark.parametrize("text", [DOCUMENT, README], ids=["numbers.md", "README.md"])
def test_every_named_command_of_numbers_is_a_module_with_a_main(text: str) -> None:
    named = set(re.findall(r"python -m (smelt_interp\.[\w.]+)", text))
    modules = (
        *(f"costs.{name}" for name in ("budget", "matching", "sparsity", "serving", "residual_variance")),
        *("scaling", "scaling.calibration", "paper"),
    )
    assert named >= {f"smelt_interp.{module}" for module in modules}
    for name in named:
        command = import_module(name)
        assert callable((import_module(f"{name}.__main__") if hasattr(command, "__path__") else command).main)
