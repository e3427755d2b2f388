"""The one kind of error a user can cause, and how a command ends on it."""

import _thread
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable

from smelt_interp.terminal.threads import limit_threads

LONGEST_MESSAGE = 300
LONGEST_VALUE = 120


class UserError(ValueError):
    """Something the user gave is outside its rule; the message names the value, the rule and the way out.

    The message is one line of printable characters, shorter than LONGEST_MESSAGE, whatever a file put into it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str, most: int = LONGEST_MESSAGE - 1) -> str:
    """Text without line breaks and control characters, its middle left out where it is longer than `most`."""
    head, tail = text[:most], text[-most:]  # what is longer may be gigabytes
    line = " ".join((text if len(text) <= 2 * most else head + tail).split())
    line = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    if len(line) <= most:
        return line
    kept = most - len(" ... ")
    return f"{line[: kept - kept // 2]} ... {line[len(line) - kept // 2 :]}"


def shown(value: object) -> str:
    """A value as a message repeats it: text in quotes, a huge number by its length."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:LONGEST_VALUE]) if isinstance(value, str | bytes) else repr(value)
    return one_line(text, LONGEST_VALUE)


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
    """Run a main on one processor thread, unless it takes more (`limit_threads`). What stops it is one line: exit 2 a
    `UserError` or a path that cannot be used, 1 a full disk, a closed output or too little memory, 130 Ctrl-C."""
    _fill_closed_streams()
    limit_threads(1)
    sys.unraisablehook = _deliver_again
    try:
        try:
            main()
        finally:
            _flush_output()
    except UserError as error:
        _stop(str(error), EXIT_USER)
    except ModuleNotFoundError as error:
        _stop(f"{error.name} must be installed for this; pip install -r requirements.lock", EXIT_USER)
    except OSError as error:
        code = EXIT_USER if error.errno in _PATH_MISTAKES else EXIT_DISK
        _stop(f"{error.strerror or error}: {error.filename or 'output'}", code)
    except MemoryError as error:
        _stop(f"this machine's memory must hold what is asked for; {error or 'it does not'}", EXIT_DISK)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would end the first one's line
        print("interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


def _stop(message: str, code: int) -> None:
    print("error:", one_line(message), file=sys.stderr)
    raise SystemExit(code) from None


def _fill_closed_streams() -> None:
    """End a command whose output is closed (`>&-`), and say it; with the error stream closed, say nothing at all.

    A file opened later would get the closed stream's number, and what is printed would land in it.
    """
    closed = sys.stdout is None
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # it is the error stream from here on
    if closed:
        _stop("the output must be open; got a closed one: send it to /dev/null", EXIT_DISK)
    # A path may hold bytes that the terminal's encoding lacks.
    getattr(sys.stdout, "reconfigure", lambda **_: None)(errors="backslashreplace")


def _deliver_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Deliver a Ctrl-C again that came while something was being thrown away, where Python drops every exception."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(0.02, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(ignored)


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # What is left in the buffer would fail once more at exit, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
