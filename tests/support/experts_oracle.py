"""What the tests of the expert layer share: inputs at unit scale, a float64 loop as truth, and how far is too far."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from model.experts.call import Backend, ExpertCall, ExpertWeights
from model.experts.expert_layer import experts

Layer = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
"""(x, expert weights, weights) -> output, for fixed indices."""

NAMES = ("out", "x", "expert_weights", "w_in", "w_out")


def layer_inputs(
    *, tokens: int, width: int = 24, num_experts: int = 5, top_k: int = 2, expert_width: int = 20,
    gated: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:  # fmt: skip
    """Inputs at unit scale, distinct experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(tokens, width, generator=generator, dtype=dtype)
    indices_NK = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k]
    weights_NK = torch.rand(tokens, top_k, generator=generator, dtype=dtype) + 0.1
    rows = expert_width * (2 if gated else 1)
    w_in = torch.randn(num_experts, rows, width, generator=generator, dtype=dtype) / width**0.5
    w_out = torch.randn(num_experts, width, expert_width, generator=generator, dtype=dtype) / expert_width**0.5
    return x_ND, indices_NK, weights_NK, ExpertWeights(w_in, w_out)


def loop_in_float64(
    x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights, gated: bool
) -> Tensor:
    """Token by token, choice by choice; shares no code with the layer."""
    x_ND, weights_NK = x_ND.double(), weights_NK.double()
    w_in, w_out = [matrix.double().unbind(0) for matrix in weights]
    out = [x_ND[:0]]
    for token, chosen in enumerate(indices_NK.tolist()):
        total = torch.zeros(1, x_ND.shape[1], dtype=torch.float64)
        for choice, expert in enumerate(chosen):
            hidden = w_in[expert] @ x_ND[token]
            if gated:
                half = len(hidden) // 2
                hidden = hidden[:half] / (1 + torch.exp(-hidden[:half])) * hidden[half:]
            else:
                hidden = hidden / (1 + torch.exp(-hidden))
            total = total + weights_NK[token, choice] * (w_out[expert] @ hidden)
        out.append(total)
    return torch.cat(out)


def with_gradients(layer: Layer, x_ND: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> dict[str, Tensor]:
    """The output and the gradients of <output, fixed random direction> with respect to all four inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x_ND, weights_NK, *weights)]
    out_ND = layer(leaves[0], leaves[1], ExpertWeights(*leaves[2:]))
    direction = torch.randn(out_ND.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out_ND * direction.to(out_ND.dtype)).sum(), leaves, allow_unused=True)
    known = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return dict(zip(NAMES, (out_ND.detach(), *known), strict=True))


def ours_and_truth(
    inputs: tuple[Tensor, Tensor, Tensor, ExpertWeights], *, backend: Backend, gated: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and gradients of a backend, and of the float64 loop, on the same inputs."""
    x_ND, indices_NK, weights_NK, weights = inputs
    layer = lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m, gated=gated, backend=backend))
    ours = with_gradients(layer, x_ND, weights_NK, weights)
    truth = with_gradients(
        lambda x, w, m: loop_in_float64(x, indices_NK, w, m, gated),
        x_ND.double(), weights_NK.double(), ExpertWeights(*(matrix.double() for matrix in weights)),
    )  # fmt: skip
    return ours, truth


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; the difference itself where the truth is zero."""
    value, truth = value.detach().double(), truth.detach().double()
    difference, scale = (value - truth).norm(), truth.norm()
    return float(difference / scale) if scale > 0 else float(difference)


def assert_close(values: dict[str, Tensor], truths: dict[str, Tensor], bound: float) -> None:
    """Every tensor within `bound`, its own norm the scale; NaN is never close."""
    errors = {name: relative_error(values[name], truths[name]) for name in truths}
    assert all(error <= bound for error in errors.values()), errors


def assert_equal_bits(values: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Every tensor equal to the bit."""
    different = [name for name in others if not torch.equal(values[name], others[name])]
    assert not different, different


def load_forward_mode() -> None:
    """Use PyTorch's forward mode once: on first use it compiles rules with torch.jit, and warns that this is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with torch.autograd.forward_ad.dual_level():
            torch.autograd.forward_ad.make_dual(torch.zeros(1), torch.zeros(1))
