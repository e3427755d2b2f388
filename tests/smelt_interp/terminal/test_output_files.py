"""Files appear whole or not at all, and folders that cannot be written are named."""

import os
import signal
from errno import ENOSPC
from functools import partial
from pathlib import Path

import pytest

from smelt_interp.errors import UserError
from smelt_interp.terminal.output_files import make_folder, write_whole
from tests.support.forked import Child, killed_after


def test_a_file_is_replaced_whole_whenever_the_writer_is_killed(tmp_path):
    path, old, new = tmp_path / "a", b"o" * 4_000_000, b"n" * 4_000_000
    for delay in (0.0, 0.002, 0.004, 0.008, 0.016):
        write_whole(path, old)
        killed_after(delay, partial(write_whole, path, new))
        assert path.read_bytes() in (old, new)
    write_whole(path, new)
    assert path.read_bytes() == new


def test_a_file_that_could_not_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"):
        write_whole(tmp_path / "a", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


def test_what_a_killed_writer_left_goes_with_the_next_write_and_what_a_living_one_writes_stays(tmp_path):
    def dies_before_the_name() -> None:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        write_whole(tmp_path / "a", b"old")

    assert Child(dies_before_the_name).wait() == (-signal.SIGKILL, "")
    (left,) = tmp_path.iterdir()
    living = left.with_name(left.name.rpartition(".")[0] + f".{os.getppid()}")
    living.write_bytes(b"")
    write_whole(tmp_path / "a", b"new")
    assert sorted(tmp_path.iterdir()) == sorted([living, tmp_path / "a"])


def test_a_file_has_the_mode_that_other_new_files_get(tmp_path):
    (tmp_path / "other").write_bytes(b"")
    write_whole(tmp_path / "a", b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the output folder must be writable; got .*file: File exists"):
        make_folder(tmp_path / "file")
    with pytest.raises(UserError, match=r"the output folder must be writable; got .*file/x: Not a directory"):
        make_folder(tmp_path / "file" / "x")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """As a user without rights: root may write anywhere."""
    tmp_path.chmod(0o555)

    def as_nobody() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        make_folder(Path("."))

    def refused() -> None:
        os.chdir(tmp_path)
        with pytest.raises(UserError, match=r"the output folder must be writable; got \.: Permission denied"):
            as_nobody()

    assert Child(refused).wait() == (0, "")


def test_a_full_disk_stays_an_os_error(tmp_path, monkeypatch):
    def full_disk(*arguments: object, **options: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        make_folder(tmp_path / "x")
