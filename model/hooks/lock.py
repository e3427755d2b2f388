"""A lock that an object can own and still be copied and pickled."""

import threading


class Lock:
    """Re-entrant; a copy or a pickle of its owner gets a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()
