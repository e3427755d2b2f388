"""Another pass of the network over the samples of a batch, for probes that edit it or read its gradients.

torch is imported by whoever runs a network; this file is imported by commands that only say what they take.
"""

from typing import TYPE_CHECKING, cast

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


def tensor(batch: Batch, step: int, suffix: str) -> "Tensor":
    """A site of a running network's batch, where the network is."""
    return cast("Tensor", batch.sites[step, suffix])
