"""Command lines from dataclasses: help is their docstrings, and what is wrong is said in one line."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import tyro

from smelt_interp.errors import UserError

Parsed = TypeVar("Parsed")
_RULE = re.compile(r"^[^\w]*[─-]{8,}[^\w]*$")
_PREFIX = re.compile(r"^Error parsing (?!--)[\w.-]+: ")
_NO_WHOLE_NUMBER = re.compile(r"^Error parsing (--[\w.-]+): invalid literal for int\(\) with base 10: (.+)$")
_NO_NUMBER = re.compile(r"^Error parsing (--[\w.-]+): could not convert string to float: (.+)$")
_LONG_NUMBER = re.compile(r"^Error parsing (--[\w.-]+): Exceeds the limit \(\d+ digits\).* value has (\d+ digits).*$")
_NO_CHOICE = re.compile(
    r"^Error parsing (--[\w.-]+): no type matching (\S+) could be instantiated from \[(.*?)\]\. .*$"
)


def parse(
    kind: Callable[..., Parsed],
    *,
    prog: str,
    description: str,
    args: Sequence[str] | None = None,
    config: Sequence[object] = (),
    default: Parsed | None = None,
) -> Parsed:
    """The command line (`sys.argv` when `args` is None) as an instance of a dataclass.

    `kind` is the dataclass, or a function that returns the one of several that was given. It must do no work: what is
    written to stderr meanwhile is taken for a complaint about the command line. `default`: an instance whose values
    stand in for those of the class.
    Raises `UserError` with the first thing that is wrong: an option that is unknown, missing, not of its type, or
    outside a rule of the dataclass. `--help` prints and exits 0.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: Parsed = tyro.cli(
                cast("type[Parsed]", kind),  # for the checker, which knows no default of a function
                prog=prog,
                description=description,
                args=args,
                config=tuple(config),
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_complaint(said.getvalue())}; see {prog} --help") from None
    return parsed


def _complaint(box: str) -> str:
    """What a box of tyro's says, below its title and above its first rule, in one line."""
    lines = [line.strip("│ ").strip() for line in box.splitlines()]
    below_title = lines[1:] if box.startswith("╭") else lines[2:]  # a terminal without UTF-8 gets a title and a rule
    last = next((index for index, line in enumerate(below_title) if _RULE.match(line)), len(below_title))
    said = _PREFIX.sub("", " ".join(line for line in below_title[:last] if line))
    said = _NO_CHOICE.sub(r"\1 must be \2; got \3", said)
    said = _LONG_NUMBER.sub(r"\1 must be a number; got \2", said)
    said = _NO_WHOLE_NUMBER.sub(r"\1 must be a whole number; got \2", said)
    return _NO_NUMBER.sub(r"\1 must be a number; got \2", said)
