"""Files that have their name only when they are whole, in folders that are checked before anything is written."""

import glob
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

from smelt_interp.errors import UserError, shown


def make_folder(folder: Path) -> None:
    """Make the folder, and those above it, unless it is there.

    A file that is gone at once says whether it can be written to: permissions do not say it of every file system.
    Raises `UserError` when it cannot, and `OSError` when the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT, EFBIG):
            raise
        raise UserError(f"the output folder must be writable; got {folder}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"a path must be free of NUL; got {shown(str(folder))}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that has its name only when all of it is on the disk; one of that name is replaced.

    An `OSError` names the path. What a killed writer of this machine left behind is cleared away.
    """
    with _written(path, data) as scratch:
        os.replace(scratch, path)


def write_once(path: Path, data: bytes) -> None:
    """As `write_whole`, but a file of that name stays, also one that another process gives it meanwhile."""
    with _written(path, data) as scratch:
        try:
            os.link(scratch, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not path.exists():
                os.replace(scratch, path)


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """The data in a file beside the path, flushed to the disk and removed at the end of the block."""
    mark = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(f"{glob.escape(mark)}*"):
        if not _runs(left.name.removeprefix(mark)):
            left.unlink(missing_ok=True)
    scratch = path.with_name(f"{mark}{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield scratch
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        scratch.unlink(missing_ok=True)


def _runs(process: str) -> bool:
    """Whether a process of this number runs, or what is no number."""
    try:
        os.kill(int(process), 0)
    except (ValueError, PermissionError):
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
