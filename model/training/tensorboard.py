"""The rows of `metrics.csv` once more as TensorBoard reads them, while they come: `tensorboard --logdir runs`."""

import time
from collections.abc import Callable
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from smelt_interp.terminal.output_files import make_folder

EVENTS = "tensorboard"
GROUPS = ("held_out", "dyck_exact", "load", "residual_variance")
"""Columns that begin so are drawn beside each other."""


class Events:
    """The event file of one process in a run's folder. TensorBoard joins those of a run that was gone on with.

    It is written at once, in this process: `SummaryWriter`'s thread would wait for ever once the disk is full.
    """

    def __init__(self, run: Path, step: int) -> None:
        """`step`: after which step the run goes on; what an earlier process wrote of later ones is dropped."""
        self._folder = run / EVENTS
        make_folder(self._folder)
        self._writer = EventsWriter(str(self._folder / "events"), f".{step}.{time.time_ns()}")
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))  # on disk with the first row

    def write(self, row: dict[str, float]) -> None:
        """Each number of a row of metrics, at its step. An `OSError` names the folder."""
        values = [Summary.Value(tag=_tag(name), simple_value=value) for name, value in row.items() if name != "step"]
        self._add(Event(step=int(row["step"]), summary=Summary(value=values)))
        self._now(self._writer.flush)

    def close(self) -> None:
        """An `OSError` names the folder."""
        self._now(self._writer.close)

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)

    def _now(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder)) from None


def _tag(name: str) -> str:
    group = next((group for group in GROUPS if name.startswith(f"{group}_")), "")
    return f"{group}/{name.removeprefix(f'{group}_')}" if group else name
