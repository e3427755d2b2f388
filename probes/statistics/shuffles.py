"""Random orders of a sample's tokens; the numbers belong to the sample, never to the batch that it came in."""

import numpy as np
from numpy.typing import NDArray

from probes.statistics.bootstrap import sample_generator

MOST_SHUFFLES = 1000
"""As many as an option may ask for."""


def shuffled_positions(
    real_BT: NDArray[np.bool_], sample_ids: NDArray[np.int64], seed: int, num: int
) -> NDArray[np.intp]:
    """`num` random orders of each sample's real tokens; padding stays where it is. -> (num, B, T) positions"""
    positions_XBT = np.tile(np.arange(real_BT.shape[1], dtype=np.intp), (num, len(real_BT), 1))
    for index, (real_T, sample) in enumerate(zip(real_BT, sample_ids.tolist(), strict=True)):
        generator = sample_generator(seed, sample)
        for shuffle in range(num):
            positions_XBT[shuffle, index, real_T] = generator.permutation(np.flatnonzero(real_T))
    return positions_XBT
