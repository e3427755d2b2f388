"""Files that a user names: plain ones, read whole up to a size, refused in one line otherwise."""

from pathlib import Path
from stat import S_ISREG

from smelt_interp.errors import UserError


def read_input(path: Path, what: str, most_bytes: int) -> bytes:
    """The bytes of a file. Raises `UserError` for one that is absent, unreadable, larger, a folder, device or pipe:
    a device may never end, and a pipe may never begin.

    `what` is what the message calls it, "a config file".
    """
    try:
        if not S_ISREG(path.stat().st_mode):
            kind = "a folder" if path.is_dir() else "a device or pipe"
            raise UserError(f"{what} must be a plain file; got {path}, {kind}")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise UserError(f"{what} must exist; got {path}") from None
    except OSError as error:
        raise UserError(f"{what} must be readable; got {path}: {error.strerror}") from None
    except UserError:
        raise
    except ValueError as error:  # a NUL in the name
        raise UserError(f"{what} must be readable; got {path}: {error}") from None
    if len(data) > most_bytes:
        raise UserError(f"{what} must have at most {most_bytes} bytes; got {path}, which has more")
    return data
