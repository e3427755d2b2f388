"""Another pass of the network over the samples of a batch, for probes that edit it or read its gradients.

torch is imported by whoever runs a network; this file is imported by commands that only say what they take.
"""

from typing import TYPE_CHECKING, cast

from cache.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from model.hooks.looped_model import LoopedModel
    from model.hooks.names import PassOptions


def pass_inputs(network: "LoopedModel", batch: Batch) -> "tuple[Tensor, PassOptions]":
    """The tokens (B, T) of a batch and the options under which its own pass ran: `network(tokens_BT, **options)` gives
    its logits again."""
    from model.inputs import sample_inputs

    return sample_inputs(batch.samples, network.architecture, network.device)


def tensor(batch: Batch, step: int, suffix: str) -> "Tensor":
    """A site of a running network's batch, where the network is."""
    return cast("Tensor", batch.sites[step, suffix])
