"""The loss of every token that a text predicts, from the log-probabilities of a batch."""

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.statistics.along_steps import predicts
from probes.statistics.arrays import to_numpy
from smelt_interp.architecture import Loop
from smelt_interp.errors import UserError


def vocab_size(batch: Batch, options: object, loops: tuple[Loop, ...]) -> int:
    """The layout of a probe that measures no step: the size of the vocabulary, for a uniform guess."""
    return batch.architecture.vocab_size


def token_losses(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Nats of the token after each position, 0 where there is none in the same document, and where there is one.
    -> (B, T) each

    Raises UserError for a loss that is no finite number.
    """
    counts_BT = predicts(batch)
    loss_BT = np.where(counts_BT, -to_numpy(batch.logprob_BT), 0.0)
    if not np.isfinite(loss_BT).all():
        raise UserError(
            f"tokens to measure must have finite log-probabilities; got {-loss_BT[~np.isfinite(loss_BT)][0]} from the "
            f"unembedding, in samples {batch.sample_ids[0]} to {batch.sample_ids[-1]}: mend the network"
        )
    return loss_BT, counts_BT
