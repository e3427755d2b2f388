"""From the residual stream to logits: the final norm with hook points of its own, and the unembedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.layer import rms_norm
from model.step_hooks import NormHooks


class FinalNorm(NormHooks):
    """The norm before the unembedding. It runs once, so hook points and gain live together."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return rms_norm(x, self.weight, self.eps, self)


class TiedUnembedding(nn.Module):
    """An unembedding that is the network's embedding: no weight of its own, so `state_dict` holds it once, and the
    embedding is looked up at each use, so one that is replaced is the one that runs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network = (network,)  # inside a tuple, where it is not registered as a part

    @property
    def weight(self) -> Tensor:
        """The embedding, (W, D)."""
        weight: Tensor = self._network[0].embed.weight  # type: ignore[union-attr, assignment]  # an embedding's
        return weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Logits (B, T, W)."""
        return functional.linear(x_BTD, self.weight)
