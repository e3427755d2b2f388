"""Input files are plain, of bounded size, and refused in one line otherwise."""

import os
from pathlib import Path

import pytest

from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input


def test_a_file_is_read_whole_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_input(path, "a file", 5) == b"12345"
    with pytest.raises(UserError, match=r"a file must have at most 4 bytes; got .*a, which has more"):
        read_input(path, "a file", 4)


def test_what_never_ends_or_never_begins_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match=f"a file must be a plain file; got {path}, a device or pipe"):
            read_input(path, "a file", 10)


def test_what_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a file must exist; got .*none"):
        read_input(tmp_path / "none", "a file", 10)
    with pytest.raises(UserError, match=r"a file must be a plain file; got .*, a folder"):
        read_input(tmp_path, "a file", 10)
    with pytest.raises(UserError, match=r"a file must be readable; got a.*null"):
        read_input(Path("a\0b"), "a file", 10)
    with pytest.raises(UserError, match=r"a file must be readable; got .*: File name too long"):
        read_input(Path("a" * 5000), "a file", 10)
