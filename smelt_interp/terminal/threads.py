"""How many processor threads the numerical libraries take."""

import os

from threadpoolctl import threadpool_limits

_READ_WHEN_LOADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads(count: int) -> None:
    """Let numpy's linear algebra, and whatever is loaded later (torch), take at most so many threads.

    Small solves on many threads take 5 to 20 times longer on a busy machine. A torch that is loaded already has its
    own `torch.set_num_threads`.
    """
    for name in _READ_WHEN_LOADED:
        os.environ[name] = str(count)
    threadpool_limits(limits=count)
