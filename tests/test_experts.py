"""The expert layer on the CPU against a float64 loop written here, and the identities that it must keep."""

import pytest
import torch
from torch import Tensor

from model.experts import Backend, ExpertWeights, experts

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


def loop_in_float64(x_ND, indices_NK, weights_NK, weights, gated):
    """Token by token, choice by choice; shares no code with the layer."""
    out = []
    for token in range(len(x_ND)):
        total = torch.zeros(x_ND.shape[1], dtype=torch.float64)
        for choice in range(indices_NK.shape[1]):
            expert = int(indices_NK[token, choice])
            hidden = weights.w_in[expert].double() @ x_ND[token].double()
            if gated:
                half = len(hidden) // 2
                hidden = hidden[:half] / (1 + torch.exp(-hidden[:half])) * hidden[half:]
            else:
                hidden = hidden / (1 + torch.exp(-hidden))
            total = total + weights_NK[token, choice].double() * (weights.w_out[expert].double() @ hidden)
        out.append(total)
    return torch.stack(out) if out else x_ND.double() @ torch.zeros(x_ND.shape[1], x_ND.shape[1]).double()


def with_gradients(function, x_ND, weights_NK, weights, seed=1):
    """The output and the gradients of <output, fixed random direction> with respect to all four inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x_ND, weights_NK, *weights)]
    out_ND = function(leaves[0], leaves[1], ExpertWeights(*leaves[2:]))
    direction = torch.randn(out_ND.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradients = torch.autograd.grad((out_ND * direction.to(out_ND.dtype)).sum(), leaves, allow_unused=True)
    zero = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return dict(zip(NAMES, (out_ND.detach(), *zero), strict=True))


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; 0 for two empty or two zero tensors."""
    difference, scale = (value.double() - truth.double()).norm(), truth.double().norm()
    return float(difference / scale) if scale > 0 else float(difference)


def assert_close(values: dict[str, Tensor], truths: dict[str, Tensor], bound: float) -> None:
    errors = {name: relative_error(values[name], truths[name]) for name in truths}
    assert all(error <= bound for error in errors.values()), errors


def both(tokens: int, *, gated: bool = True, backend: Backend = "torch", **shape: int):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=tokens, gated=gated, **shape)
    ours = with_gradients(
        lambda x, w, m: experts(x, indices_NK, w, m, gated=gated, backend=backend), x_ND, weights_NK, weights
    )
    truth = with_gradients(
        lambda x, w, m: loop_in_float64(x, indices_NK, w, m, gated), x_ND.double(), weights_NK.double(), weights
    )
    return ours, truth


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 63, 65, 127, 129])
def test_output_and_gradients_equal_the_loop(tokens, backend, gated):
    assert_close(*both(tokens, gated=gated, backend=backend), bound=1e-6)


def test_the_comparison_catches_sixteen_zeroed_columns():
    ours, truth = both(33)
    ours["out"][:, :16] = 0
    with pytest.raises(AssertionError, match="out"):
        assert_close(ours, truth, bound=1e-6)
