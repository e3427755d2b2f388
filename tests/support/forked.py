"""Work in a child process that a test may kill: forked, so that what the test has imported is there at once."""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable


class Child:
    """A forked process that runs `work` and ends as a command would: 0, or the code of the exception.

    Its error stream is a pipe, so that a limit on the size of its files leaves it alone.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._errors, write_end = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of a fork beside other threads; the idle ones of torch are not used here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if self.process == 0:
            try:
                # A shell starts its background jobs with Ctrl-C ignored, and children inherit that.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.dup2(write_end, 2)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                os._exit(_run(work))
            finally:  # whatever happens, the child never goes on as the test
                os._exit(99)
        os.close(write_end)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; to a child that has ended it does nothing."""
        os.kill(self.process, number)

    def running(self) -> bool:
        """Whether it still runs. It stays waitable."""
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> tuple[int, str]:
        """The exit code, or minus the number of the signal that ended it, and what it wrote to its error stream."""
        with os.fdopen(self._errors) as stream:
            errors = stream.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]), errors


def _run(work: Callable[[], None]) -> int:
    code = 0
    try:
        work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    except BaseException:  # whatever it is, the parent reads it
        traceback.print_exc()
        code = 97
    sys.stderr.flush()
    return code


def killed_after(seconds: float, work: Callable[[], None]) -> tuple[int, str]:
    """Run `work` in a child, SIGKILL it after so many seconds; exit code (-9 when it was killed) and error stream."""
    child = Child(work)
    time.sleep(seconds)
    child.send(signal.SIGKILL)
    return child.wait()
