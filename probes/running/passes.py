"""Another pass of the network over the samples of a batch, for probes that edit it or read its gradients.

torch is imported by whoever runs a network; this file is imported by commands that only say what they take.
"""

from typing import TYPE_CHECKING

import numpy as np

from cache.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel
    from model.hooks.names import PassOptions


def pass_inputs(network: "LoopedModel", batch: Batch) -> "tuple[Tensor, PassOptions]":
    """The tokens (B, T) of a batch and the options under which its own pass ran: `network(tokens_BT, **options)` gives
    its logits again."""
    import torch

    tokens_BT, start_BT = (
        torch.from_numpy(x_BT.astype(np.int64)).to(network.device)
        for x_BT in (batch.samples.ids_NT, batch.samples.segment_start_NT)
    )
    return tokens_BT, {"segment_start_BT": start_BT, "attention": "eager"}


def predicts(batch: Batch) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
    """Which positions predict a token of their own document that follows them. -> (B, T)"""
    samples = batch.samples
    start_BT, length = samples.segment_start_NT, samples.ids_NT.shape[1]
    inside_BT = np.arange(1, length + 1) < samples.length_N[:, None]
    inside_BT[:, :-1] &= start_BT[:, 1:] == start_BT[:, :-1]
    return inside_BT
