"""One command as several ranks under torchrun: each measures samples of its own, and the first has what all add up to.

torch is imported only then: a capture needs none.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from probes.statistics.sums import Sums


def joined() -> AbstractContextManager[None]:
    """The ranks as one group, as `model.ranks.joined` has it."""
    if not _several():
        return nullcontext()
    from model import ranks

    return ranks.joined()


def is_first_rank() -> bool:
    """Whether this process writes and prints."""
    if not _several():
        return True
    from model import ranks

    return ranks.is_first_rank()


def own_rows(num: int) -> NDArray[np.int64]:
    """Which of so many samples this rank measures: neighbours stay together."""
    if not _several():
        return np.arange(num)
    from model import ranks

    return ranks.own_part(np.arange(num))


def merged(sums: Mapping[str, Sums[object, object]]) -> Mapping[str, Sums[object, object]]:
    """What the ranks' sums are together, on the first rank; the others keep theirs."""
    if not _several():
        return sums
    from model import ranks

    for others in ranks.gathered(sums)[1:]:
        for name, other in others.items():
            sums[name].merge(other)
    return sums


def _several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"
