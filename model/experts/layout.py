"""What the backends of the expert layer hand to and from autograd."""

from typing import NamedTuple

from torch import Tensor

from smelt_interp.errors import UserError


class LayerOutput(NamedTuple):
    """What one pass yields. Rows R are the N K slots in expert order, G the width of the first product."""

    result: Tensor
    """N D with the K slots summed, else N K D."""
    pre_RG: Tensor
    """Gate then up before the activation. This and the rest are what a backward or a trace needs: without `keep` they
    are empty."""
    order_R: Tensor
    """Flat slot n K + k that sits in each row; slots of one expert keep their order."""
    counts_E: Tensor
    """Rows of each expert."""


class WeightGradients(NamedTuple):
    """Where the gradients of the weights go; None for a frozen matrix."""

    w_in: Tensor | None
    w_out: Tensor | None
    accumulate: bool
    """Add to what is there instead of overwriting it."""


class InputGradients(NamedTuple):
    """Gradients of the layer's inputs; None where none was asked for."""

    x_ND: Tensor | None
    expert_weights_NK: Tensor | None


def raise_outside_experts(low: int, high: int, num_experts: int) -> None:
    """`UserError` when the lowest or the highest expert id is not one of the layer's."""
    if low < 0 or high >= num_experts:
        raise UserError(f"expert indices must lie in 0..{num_experts - 1}; got {low if low < 0 else high}")
