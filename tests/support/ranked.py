"""Work in several processes as torchrun starts them: forked, so that what the test has imported is there at once."""

import os
import socket
from collections.abc import Callable

from smelt_interp.errors import run_command
from tests.support.forked import Child


def under_ranks(size: int, work: Callable[[int], None]) -> list[tuple[int, str]]:
    """Run `work(rank)` in forked ranks as torchrun starts them. -> how each ended, and what it said"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def started(number: int) -> Callable[[], None]:
        def start() -> None:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            run_command(lambda: work(number))

        return start

    children = [Child(started(number)) for number in range(size)]
    return [child.wait() for child in children]
