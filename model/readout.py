"""From the residual stream to logits: the final norm with hook points of its own, and the unembedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.layer import rms_norm
from model.step import NormHooks


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
    """An unembedding that is the embedding: no weight of its own, so `state_dict` holds it once."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # inside a tuple, where it is not registered a second time

    @property
    def weight(self) -> Tensor:
        """The embedding, (W, D)."""
        return self._embedding[0].weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Logits (B, T, W)."""
        return functional.linear(x_BTD, self.weight)
