"""One call of the expert layer as a value, and what a backend gives back for it."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from smelt_interp.errors import UserError

Backend = Literal["auto", "reference", "small", "torch", "triton"]

FLOATING_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class ExpertWeights(NamedTuple):
    """The two matrices of every expert."""

    w_in: Tensor
    """E 2F D gated (gate rows first, then up rows), E F D ungated."""
    w_out: Tensor
    """E D F."""


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """What is sent through which experts. Slots are the N K pairs of a token and one of its choices."""

    x_ND: Tensor
    expert_indices_NK: Tensor
    expert_weights_NK: Tensor
    weights: ExpertWeights
    gated: bool = True
    backend: Backend = "auto"

    @property
    def num_slots(self) -> int:
        """N K."""
        return self.expert_indices_NK.numel()

    @property
    def top_k(self) -> int:
        """Experts of each token."""
        return self.expert_indices_NK.shape[1]

    @property
    def num_experts(self) -> int:
        """Experts to choose from."""
        return self.weights.w_out.shape[0]

    @property
    def width(self) -> int:
        """Of the stream."""
        return self.weights.w_out.shape[1]

    @property
    def expert_width(self) -> int:
        """Of an expert."""
        return self.weights.w_out.shape[2]

    @property
    def pre_width(self) -> int:
        """G, of the first product: twice the expert's width where there is a gate."""
        return self.weights.w_in.shape[1]

    def check(self) -> None:
        """Raise `UserError` for tensors whose types, devices or shapes disagree."""
        x, indices, expert_weights = self.x_ND, self.expert_indices_NK, self.expert_weights_NK
        w_in, w_out = self.weights
        # types and devices
        if x.ndim != 2:
            raise UserError(f"x must have the axes tokens, width; got {tuple(x.shape)}")
        for name, tensor in (("x", x), ("expert weights", expert_weights), ("w_in", w_in), ("w_out", w_out)):
            if tensor.dtype not in FLOATING_TYPES:
                raise UserError(f"{name} must hold float16, bfloat16, float32 or float64 numbers; got {tensor.dtype}")
            if tensor.device != x.device:
                raise UserError(f"{name} must be on the device of x, {x.device}; got {tensor.device}")
        if indices.dtype not in (torch.int64, torch.int32):
            raise UserError(f"expert indices must be int64 or int32; got {indices.dtype}")
        if indices.device != x.device:
            raise UserError(f"expert indices must be on the device of x, {x.device}; got {indices.device}")
        # shapes: the weights among themselves, then what is sent through them
        if w_in.ndim != 3 or w_out.ndim != 3:
            raise UserError(
                f"w_in and w_out must have three axes, experts first; got {tuple(w_in.shape)}, {tuple(w_out.shape)}"
            )
        num_experts, width, expert_width = w_out.shape
        wanted = (num_experts, (2 if self.gated else 1) * expert_width, width)
        if w_in.shape != wanted:
            raise UserError(
                f"w_in must be {wanted} beside w_out {tuple(w_out.shape)} and gated={self.gated}; "
                f"got {tuple(w_in.shape)}"
            )
        if x.shape[1] != width:
            raise UserError(f"x must have the experts' width {width}; got {x.shape[1]}")
        if indices.ndim != 2 or indices.shape[0] != x.shape[0] or indices.shape[1] < 1:
            raise UserError(f"expert indices must be ({x.shape[0]}, K), K at least 1; got {tuple(indices.shape)}")
        if expert_weights.shape != indices.shape:
            raise UserError(
                f"expert weights must have the shape of the indices {tuple(indices.shape)}; "
                f"got {tuple(expert_weights.shape)}"
            )

    def prepared(self, backend: Backend) -> Self:
        """The call for one backend, its inputs in the type of the arithmetic.

        Both in float64 when any input has it; otherwise x in float32 for the reference, and on a CPU, where products of
        half-precision numbers are about 50 times slower without AMX, and in the promoted type of x and weights
        elsewhere. The expert weights are float32 at least.
        """
        w_in, w_out = self.weights
        promoted = torch.promote_types(torch.promote_types(self.x_ND.dtype, w_in.dtype), w_out.dtype)
        if torch.float64 in (promoted, self.expert_weights_NK.dtype):
            promoted = torch.float64
        elif backend == "reference" or self.x_ND.device.type == "cpu":
            promoted = torch.float32
        return replace(
            self,
            x_ND=self.x_ND.to(promoted),
            expert_weights_NK=self.expert_weights_NK.to(torch.promote_types(promoted, torch.float32)),
            backend=backend,
        )


class KeptValues(NamedTuple):
    """What a backward or a trace needs; empty where neither was asked for. Rows R are the slots in expert order."""

    pre_RG: Tensor
    """Before the activation: gate then up, or F columns ungated."""
    order_R: Tensor
    """Flat slot n K + k that sits in each row; slots of one expert keep their order."""
    counts_E: Tensor
    """Rows of each expert."""


class Needs(NamedTuple):
    """Which inputs want a gradient."""

    x_ND: bool
    expert_weights_NK: bool
    w_in: bool
    w_out: bool


class Gradients(NamedTuple):
    """Gradients of the inputs; None where none was asked for."""

    x_ND: Tensor | None
    expert_weights_NK: Tensor | None
    w_in: Tensor | None
    w_out: Tensor | None


def raise_outside_experts(low: int, high: int, num_experts: int) -> None:
    """`UserError` when the lowest or the highest expert id is not one of the layer's."""
    if low < 0 or high >= num_experts:
        raise UserError(f"expert indices must lie in 0..{num_experts - 1}; got {low if low < 0 else high}")


def sum_slots(slot_NKD: Tensor) -> Tensor:
    """The sum over a token's K slots, in order of k: the arithmetic by which `experts` combines them. -> N D

    In float32 at least, rounded once. Never a view of the slots, even of a single one.
    """
    total_ND, *rest = slot_NKD.to(torch.promote_types(slot_NKD.dtype, torch.float32)).unbind(1)
    for slot_ND in rest:
        total_ND = total_ND + slot_ND
    return total_ND.to(slot_NKD.dtype, copy=not rest)
