"""Bootstrap and shuffles in constant memory: random numbers belong to a sample, never to the batch it came in.

The bootstrap over samples is the Poisson bootstrap (Chamandy, Muralidharan, Najmi and Naidu, "Estimating uncertainty
for massive data streams", 2012): in resample r sample i counts Poisson(1) times, so every sum over samples is kept
once as it is and once for each resample, and any function of sums has an interval without a second pass. That is what
sums too large to keep for every sample need: means of vectors, loads of experts, histograms. There are fewer resamples
than in `probes.running.contract.estimates`, which keeps small sums by sample, since each of them is held in memory
here.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from probes.running.contract import Estimate, sample_generator
from smelt_interp.errors import UserError
from smelt_interp.similarity import CosineSums, OverlapSums, PatternSums

NUM_RESAMPLES = 400

Record = TypeVar("Record", CosineSums, OverlapSums, PatternSums)


def bootstrap_weights(seed: int, sample_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """How often each sample counts: once in row 0, Poisson(1) times in every resample. -> (1 + NUM_RESAMPLES, B)"""
    # A generator's own numbers shuffle the sample's tokens; its child's weigh the sample.
    draws_BR = [sample_generator(seed, int(sample)).spawn(1)[0].poisson(1.0, NUM_RESAMPLES) for sample in sample_ids]
    return np.concatenate([np.ones((1, len(sample_ids))), np.array(draws_BR, np.float64).T])


def shuffled_positions(
    real_BT: NDArray[np.bool_], sample_ids: NDArray[np.int64], seed: int, num: int
) -> NDArray[np.intp]:
    """`num` random orders of each sample's real tokens; padding stays where it is. -> (num, B, T) positions"""
    positions_XBT = np.tile(np.arange(real_BT.shape[1], dtype=np.intp), (num, len(real_BT), 1))
    for index, (real_T, sample) in enumerate(zip(real_BT, sample_ids, strict=True)):
        generator = sample_generator(seed, int(sample))
        for shuffle in range(num):
            positions_XBT[shuffle, index, real_T] = generator.permutation(np.flatnonzero(real_T))
    return positions_XBT


class Resampled:
    """Named sums over samples, each with its resamples on the first axis: `sums[name]` is (1 + NUM_RESAMPLES, ...)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._seen: set[int] = set()
        self._sums: dict[str, NDArray[np.floating]] = {}

    def add(self, sample_ids: NDArray[np.int64], sums: Mapping[str, NDArray[np.generic]]) -> None:
        """Sums of B samples, each array (B, ...); a name may be missing from batches that have nothing to add to it.

        A float32 array is summed in float32, which is exact for counts up to 2^24; every other one in float64.
        Raises `UserError` for a sample that was added before.
        """
        ids = {int(sample) for sample in sample_ids}
        if len(ids) < len(sample_ids) or ids & self._seen:
            raise UserError(f"sample ids must be distinct; got {sorted(ids & self._seen) or sample_ids.tolist()} twice")
        self._seen |= ids
        weight_RB = bootstrap_weights(self._seed, sample_ids)
        for name, array in sums.items():
            kind: type[np.floating] = np.float32 if array.dtype == np.float32 else np.float64
            flat_BK = array.reshape(len(array), -1).astype(kind)
            added = (weight_RB.astype(kind) @ flat_BK).reshape(len(weight_RB), *array.shape[1:])
            if name in self._sums:
                self._sums[name] += added
            else:
                self._sums[name] = added

    def require_samples(self) -> None:
        """Raises `UserError` when no sample was added."""
        if not self._seen:
            raise UserError("samples to measure must be at least one; got 0")

    def __getitem__(self, name: str) -> NDArray[np.floating]:
        return self._sums[name]

    def names(self, prefix: str) -> tuple[str, ...]:
        """Names of the sums that begin with `prefix`, sorted."""
        return tuple(sorted(name for name in self._sums if name.startswith(prefix)))

    def count(self, name: str) -> int:
        """A sum of one number a sample, not resampled, as a whole number: how many samples."""
        return int(self._sums[name][0])

    def record(self, kind: type[Record], prefix: str) -> Record:
        """The sums that `record_sums` named, as a record whose sample axis is the axis of resamples.

        `similarity`'s functions of sums give one number a resample.
        """
        return kind(
            **{field.name: np.asarray(self._sums[f"{prefix}.{field.name}"], np.float64) for field in fields(kind)}
        )


def record_sums(prefix: str, records: list[Record]) -> dict[str, NDArray[np.generic]]:
    """The fields of several records (say, of several layers), stacked on a new axis 1 and named `prefix.field`."""
    return {
        f"{prefix}.{field.name}": np.stack([getattr(record, field.name) for record in records], 1)
        for field in fields(records[0])
    }


def ratio(top: NDArray[np.floating], bottom: NDArray[np.floating]) -> NDArray[np.float64]:
    """top / bottom, NaN where the bottom is 0."""
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    quotient: NDArray[np.float64] = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
    return quotient


def interval(statistic_R: NDArray[np.floating], n: int) -> Estimate:
    """A statistic's value (entry 0) with the 2.5% and 97.5% quantiles of the resamples that define it."""
    draws_R = statistic_R[1:][np.isfinite(statistic_R[1:])]
    low, high = np.quantile(draws_R, (0.025, 0.975)) if len(draws_R) else (np.nan, np.nan)
    return Estimate(float(statistic_R[0]), float(low), float(high), n)


def recentred_interval(statistic_R: NDArray[np.floating], n: int) -> Estimate:
    """The interval of a statistic that resampling biases, such as a maximum, an entropy or a distance of loads.

    A resample is noisier than the samples it is drawn from, and a maximum picks the noise up: its quantiles can lie
    wholly above the value. They are shifted by that bias, the mean of the resamples minus the value; not below 0.
    """
    plain = interval(statistic_R, n)
    draws_R = statistic_R[1:][np.isfinite(statistic_R[1:])]
    bias = float(draws_R.mean()) - plain.value if len(draws_R) else np.nan
    low, high = (end if np.isnan(end) else max(end - bias, 0.0) for end in (plain.low, plain.high))
    return Estimate(plain.value, low, high, n)
