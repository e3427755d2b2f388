"""The one kind of error a user can cause, and how a command ends on it."""

import errno
import os
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user gave is outside its rule; the message names the value, the rule and the way out."""


EXIT_USER = 2
EXIT_INTERRUPTED = 130
EXIT_DISK = 1
_PATH_MISTAKES = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
"""What the system says of a path that the user should have given otherwise; the rest is a disk or a device."""


def run_command(main: Callable[[], None]) -> None:
    """Run a main. What stops it is one line: exit 2 a `UserError` or a path that cannot be
    used, 1 a full disk or closed pipe, 130 Ctrl-C."""
    try:
        try:
            main()
        finally:
            _flush_output()
    except UserError as error:
        _say(str(error))
        raise SystemExit(EXIT_USER) from None
    except ModuleNotFoundError as error:
        _say(f"{error.name} must be installed for this; pip install -r requirements.lock")
        raise SystemExit(EXIT_USER) from None
    except OSError as error:
        _say(f"{error.strerror or error}: {error.filename or 'output'}")
        raise SystemExit(EXIT_USER if error.errno in _PATH_MISTAKES else EXIT_DISK) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


def _say(message: str) -> None:
    """One line on stderr: a path or name inside may hold line breaks."""
    print("error:", " ".join(message.splitlines()), file=sys.stderr)


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # What is left in the buffer would fail once more at exit, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
