"""How a command ends, in this process: its code, and what it printed."""

import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from smelt_interp.errors import EXIT_DISK, EXIT_USER, run_command
from tests.campaigns.campaign import check_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command."""

    code: int
    out: str
    errors: str

    def refused(self) -> bool:
        """Whether it ended on one line and nothing else."""
        if self.code == 0:
            return False
        assert self.code in (EXIT_USER, EXIT_DISK), f"exit {self.code}: {self.errors[-500:]}"
        assert self.errors.startswith("error: "), self.errors[-500:]
        assert self.errors.endswith("\n")
        check_line(self.errors.removeprefix("error: ").removesuffix("\n"))
        assert self.out == ""
        return True

    def document(self) -> object:
        """Its JSON, in which every number is one."""
        assert (self.code, self.errors) == (0, "")
        return json.loads(self.out, parse_constant=_refuse)


def ended(main: Callable[[], None], *arguments: str) -> Ended:
    """Run a command's main with these words."""
    out, errors = io.StringIO(), io.StringIO()
    argv, unraisable = sys.argv, sys.unraisablehook
    sys.argv, code = ["command", *arguments], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            run_command(main)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 99
    finally:
        sys.argv, sys.unraisablehook = argv, unraisable
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return Ended(code=code, out=out.getvalue(), errors=errors.getvalue())


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
