"""The scale of a norm and its value before the gain, through hook points whose edits reach what the norm gives.

Theirs has computed it already, so what a hook changes is added to its output; with gradients it is a zero whose
gradient at the site is the output's.
"""

import torch
from torch import Tensor, nn

from model.families.family import Norm
from model.step_hooks import NormHooks


def through(points: nn.Module, norm: nn.Module, kind: Norm, x: Tensor, output: Tensor) -> Tensor:
    """A norm's output (..., D) of `x` (..., D), itself where no hook is set."""
    scale_point, value_point = points.get_submodule("hook_scale"), points.get_submodule("hook_normalized")
    if not (scale_point.is_hooked or value_point.is_hooked):
        return output
    given = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "LN":
        given = given - given.mean(-1, keepdim=True)
    square = given.pow(2).sum(-1, keepdim=True) if kind == "L2" else given.pow(2).mean(-1, keepdim=True)
    scale = (square + _least(norm)).sqrt()
    normalised: Tensor = value_point((given / scale_point(scale)).to(x.dtype))
    return output + (normalised - (given / scale).to(x.dtype)) * gain(norm)


def gain(norm: nn.Module) -> Tensor:
    """Its gain (D,), or a one."""
    weight = getattr(norm, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else torch.ones(())


def _least(norm: nn.Module) -> float:
    """What it adds to the square, by the names that authors give it."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0)


class FinalNorm(NormHooks):
    """Their last norm under our name, with its hook points."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm = (norm,)  # inside a tuple, where it is not registered a second time

    @property
    def weight(self) -> Tensor:
        """The gain (D,), or a one."""
        return gain(self._norm[0])

    @property
    def bias(self) -> Tensor | None:
        """What it adds (D,), if anything."""
        bias: Tensor | None = getattr(self._norm[0], "bias", None)
        return bias

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        out: Tensor = self._norm[0](x)
        return out
