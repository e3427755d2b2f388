"""Every option of every command of numbers takes any text: an answer that is JSON, or one line and exit 2."""

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from smelt_interp.costs import budget, matching, residual_variance, serving, sparsity
from smelt_interp.errors import LONGEST_MESSAGE
from smelt_interp.paper import table as paper
from smelt_interp.scaling import command as scaling
from tests.support.commands import Main, run_to_the_end, valid_json

TEXTS = ("-1", "0", "1e30", "1" + "0" * 12, "nan", "inf", "1e-300", "9" * 5000, "x\x1b[31m\ny", "", "\udcff", "3-4")
COMMANDS: list[tuple[Main, list[str], type]] = [
    (budget.main, ["--pair", "demo"], budget.BudgetOptions),
    (matching.main, ["--baseline", "demo"], matching.MatchingOptions),
    (serving.main, ["--pair", "demo"], serving.ServingOptions),
    (sparsity.main, ["--pair", "demo"], sparsity.SparsityOptions),
    (residual_variance.main, ["--pair", "demo", "--samples", "10"], residual_variance.VarianceOptions),
    (scaling.main, ["printed"], scaling.PrintedOptions),
    (paper.main, [], paper.PaperOptions),
]


def options_of(record: type) -> Iterator[str]:
    for field in fields(record):
        if is_dataclass(field.default):
            yield from options_of(type(field.default))
        elif field.name != "json":
            yield "--" + field.name.replace("_", "-")


@pytest.mark.parametrize(("main", "words", "record"), COMMANDS, ids=lambda value: getattr(value, "__module__", ""))
def test_any_text_is_answered_or_refused_in_one_line(
    main: Main, words: list[str], record: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, option in enumerate(options_of(record)):
        # Each option meets every third text, each text many options.
        for text in TEXTS[index % 3 :: 3]:
            monkeypatch.setattr(sys, "argv", ["command", *words, option, text, "--json"])
            code = run_to_the_end(main)
            printed = capsys.readouterr()
            if code == 0:
                valid_json(printed.out)
                continue
            assert (code, printed.out, printed.err.count("\n")) == (2, "", 1), (option, text)
            assert printed.err.strip("\n").isprintable()
            assert len(printed.err) < LONGEST_MESSAGE + len("error: \n")
