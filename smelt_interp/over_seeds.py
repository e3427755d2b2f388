"""The interval of a mean over independent runs."""

import math
from collections.abc import Sequence

import numpy as np


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of the mean of independent runs, by Student's law; None of fewer than two."""
    from scipy.special import stdtrit  # scipy is slow to import, and `--help` needs none

    n = len(values)
    return None if n < 2 else float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))
