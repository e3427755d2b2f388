"""The one kind of error a user can cause, and how a command ends on it."""

import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user gave is outside its rule; the message names the value, the rule and the way out."""


EXIT_USER = 2
EXIT_INTERRUPTED = 130
EXIT_DISK = 1


def run_command(main: Callable[[], None]) -> None:
    """Run a command line's main; a `UserError` prints one line and exits 2, a full disk 1, Ctrl-C 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER) from None
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or 'output'}", file=sys.stderr)
        raise SystemExit(EXIT_DISK) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
