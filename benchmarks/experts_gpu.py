"""Check the expert kernels on a GPU, then time them against grouped_mm and, where it is installed, ScatterMoE.

    python -m benchmarks.experts_gpu

First correctness in bfloat16 against the float64 loop: output and all gradients, by relative Frobenius error; a failure
stops the run. Then, at the paper's 200M looped shape, time forward and forward-and-backward for 1 to 65,536 tokens,
beside the bytes and FLOPs that each call must spend and the share of the roofline that this makes; the roofs, a large
copy and a large product, are measured in the same run. Small calls are replayed from a CUDA graph. Under four minutes.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import tyro
from torch import Tensor, nn

from model.experts import reference as experts_reference
from model.experts.call import ExpertCall, ExpertWeights
from model.experts.expert_layer import experts, experts_traced
from model.routing import route
from smelt_interp.errors import UserError, run_command

BOUND = 0.01
"""Relative Frobenius error of bfloat16 kernels against float64 arithmetic on the same bfloat16 numbers."""

GRAPH_TOKENS = 64
"""Calls of up to so many tokens are launch-bound: their forward is replayed from a CUDA graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The layer to time; the defaults are the paper's 200M looped shape."""

    width: int = 1056
    num_experts: int = 288
    top_k: int = 8
    expert_width: int = 352
    tokens: tuple[int, ...] = (1, 8, 64, 512, 4096, 16384, 65536)
    rounds: int = 20


class Inputs(NamedTuple):
    """One call of the layer."""

    x_ND: Tensor
    indices_NK: Tensor
    weights_NK: Tensor
    weights: ExpertWeights


class Roofs(NamedTuple):
    """What this device reached in this run."""

    bytes_per_second: float
    flops_per_second: float


def inputs(options: Options, tokens: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Numbers at unit scale, routing from random logits."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    indices_NK, weights_NK, *_ = route(
        normal(tokens, options.num_experts), options.top_k, router="softmax", renormalise=True
    )
    w_in = normal(options.num_experts, 2 * options.expert_width, options.width) / options.width**0.5
    w_out = normal(options.num_experts, options.width, options.expert_width) / options.expert_width**0.5
    return Inputs(
        normal(tokens, options.width).to(dtype), indices_NK, weights_NK,
        ExpertWeights(w_in.to(dtype), w_out.to(dtype)),
    )  # fmt: skip


def errors(given: Inputs) -> dict[str, float]:
    """Relative Frobenius errors of the kernels' output and gradients against the float64 loop."""

    def differentiate(
        dtype: torch.dtype | None, layer: Callable[[Tensor, Tensor, ExpertWeights], Tensor]
    ) -> list[Tensor]:
        leaves = [
            (tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_()
            for tensor in (given.x_ND, given.weights_NK, *given.weights)
        ]
        out_ND = layer(leaves[0], leaves[1], ExpertWeights(*leaves[2:]))
        direction = torch.linspace(-1, 1, out_ND.numel(), device=out_ND.device).view_as(out_ND).to(given.x_ND.dtype)
        return [out_ND, *torch.autograd.grad(out_ND, leaves, direction.to(out_ND.dtype))]

    def truth(x_ND: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
        return experts_reference.forward(ExpertCall(x_ND, given.indices_NK, weights_NK, weights))[0].sum(1)

    ours = differentiate(None, lambda x, w, m: experts(ExpertCall(x, given.indices_NK, w, m, backend="triton")))
    exact = differentiate(torch.float64, truth)
    names = ("out", "x", "expert_weights", "w_in", "w_out")
    return {
        name: float((value.detach().double() - reference.detach()).norm() / reference.detach().norm())
        for name, value, reference in zip(names, ours, exact, strict=True)
    }


def check(device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """Compare at shapes that reach every tile size; print each, raise `UserError` at the first that is too far off."""
    for tokens, shape in (
        (1, Options(width=1056, num_experts=16, top_k=8, expert_width=352)),
        (33, Options(width=40, num_experts=5, top_k=3, expert_width=24)),
        (100, Options(width=1056, num_experts=16, top_k=4, expert_width=352)),
        (700, Options(width=200, num_experts=11, top_k=2, expert_width=72)),
        (3000, Options(width=256, num_experts=8, top_k=2, expert_width=96)),
    ):
        found = errors(inputs(shape, tokens, dtype, device))
        print(f"T={tokens:5d} {shape.width} {shape.num_experts} {shape.top_k} {shape.expert_width}:",
              ", ".join(f"{name} {value:.1e}" for name, value in found.items()))  # fmt: skip
        if not max(found.values()) <= bound:
            raise UserError(f"the kernels' relative error must be at most {bound}; got {max(found.values()):.2e}")
    few = inputs(Options(num_experts=288, top_k=8), 4, dtype, device)
    call = ExpertCall(*few, backend="triton")
    if not torch.equal(experts(call), experts_traced(call).out_ND):
        raise UserError("a call that skips the sort must agree to the bit with one that sorts; got different outputs")
    given = inputs(Options(width=256, num_experts=64, top_k=8, expert_width=96), 512, dtype, device)
    first, second = (experts(ExpertCall(*given, backend="triton")) for _ in range(2))
    if not torch.equal(first, second):
        raise UserError("two calls must agree to the bit; got different outputs")


def grouped(x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
    """Sorted slots through torch's grouped_mm, without a wait for the device."""
    experts_R, order_R = indices_NK.flatten().sort()
    stops_E = torch.searchsorted(experts_R, torch.arange(len(weights.w_in), device=x_ND.device), right=True).int()
    pre_RG = torch.nn.functional.grouped_mm(
        x_ND[order_R // indices_NK.shape[1]], weights.w_in.transpose(1, 2), offs=stops_E
    )
    gate_RF, up_RF = pre_RG.chunk(2, dim=-1)
    out_RD = torch.nn.functional.grouped_mm(
        torch.nn.functional.silu(gate_RF) * up_RF, weights.w_out.transpose(1, 2), offs=stops_E
    )
    row_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=x_ND.device))
    return (out_RD[row_R].view(*indices_NK.shape, -1) * weights_NK.to(out_RD.dtype)[..., None]).sum(1)


def peers(options: Options, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """What a user would have instead, each called like `experts`."""
    found: dict[str, Callable[..., Tensor]] = {
        "ours": lambda *given: experts(ExpertCall(*given)),
        "grouped_mm": grouped,
    }
    try:
        from scattermoe.mlp import GLUMLP  # type: ignore[import-not-found]  # installed by who compares with it
    except ImportError:
        print("ScatterMoE is not installed: left out")
        return found
    with device:
        module = GLUMLP(options.width, options.expert_width, options.num_experts, options.top_k).bfloat16()

    def scattermoe(x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
        result: Tensor = module(x_ND, weights_NK.to(x_ND.dtype), indices_NK)
        return result

    return {**found, "ScatterMoE": scattermoe}


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """Median time of one call on the device, after three that are not counted."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return float(statistics.median(times))


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The same call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def roofs(device: torch.device) -> Roofs:
    """A copy of 2 GiB and a bfloat16 product of 8192 cubed."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    copy_ms = milliseconds(lambda: target.copy_(source), 10)
    product_ms = milliseconds(lambda: matrix @ matrix, 10)
    return Roofs(2 * source.nbytes / copy_ms * 1e3, 2 * 8192**3 / product_ms * 1e3)


def cost(options: Options, given: Inputs, *, backward: bool) -> tuple[int, int]:
    """Bytes that must move at least once and FLOPs; weights count for the experts that have tokens."""
    tokens, active = len(given.x_ND), int(given.indices_NK.unique().numel())
    expert_bytes = 2 * 3 * options.width * options.expert_width
    flops = 6 * tokens * options.top_k * options.width * options.expert_width
    token_bytes = 2 * 2 * tokens * options.width
    if not backward:
        return active * expert_bytes + token_bytes, flops
    kept = 2 * 2 * tokens * options.top_k * 2 * options.expert_width  # pre-activations, written and read
    return (2 * active + options.num_experts) * expert_bytes + 2 * token_bytes + kept, 3 * flops


def main() -> None:
    """Check, measure the roofs, then one line for each number of tokens, kind of work and competitor."""
    options = tyro.cli(Options, description=__doc__)
    if not torch.cuda.is_available():
        raise UserError("a CUDA device must be there to be timed; got none; benchmarks.experts times the CPU")
    device = torch.device("cuda")
    check(device, torch.bfloat16, BOUND)
    roof = roofs(device)
    print(f"{torch.cuda.get_device_name()}: copy {roof.bytes_per_second / 1e12:.2f} TB/s, "
          f"product {roof.flops_per_second / 1e12:.0f} TFLOP/s")  # fmt: skip
    competitors = peers(options, device)
    print("| tokens | work | competitor | ms | MB | GFLOP | share of roofline |\n|---|---|---|---|---|---|---|")
    for tokens in options.tokens:
        given = inputs(options, tokens, torch.bfloat16, device)
        leaves = Inputs(
            given.x_ND.clone().requires_grad_(), given.indices_NK, given.weights_NK.clone().requires_grad_(),
            ExpertWeights(*(nn.Parameter(matrix) for matrix in given.weights)),
        )  # fmt: skip
        direction_ND = torch.randn_like(given.x_ND)
        for backward in (False, True):
            num_bytes, flops = cost(options, given, backward=backward)
            bound_ms = 1e3 * max(num_bytes / roof.bytes_per_second, flops / roof.flops_per_second)
            for name, layer in competitors.items():

                def forward(layer: Callable[..., Tensor] = layer, given: Inputs = given) -> Tensor:
                    with torch.no_grad():
                        return layer(*given)

                def training(
                    layer: Callable[..., Tensor] = layer,
                    leaves: Inputs = leaves,
                    direction_ND: Tensor = direction_ND,
                ) -> None:
                    layer(*leaves).backward(direction_ND)
                    for leaf in (leaves.x_ND, leaves.weights_NK, *leaves.weights):
                        leaf.grad = None

                graph = not backward and tokens <= GRAPH_TOKENS and name != "ScatterMoE"
                call = replayed(forward) if graph else training if backward else forward
                taken = milliseconds(call, options.rounds)
                work = ("forward and backward" if backward else "forward") + (", graph" if graph else "")
                print(f"| {tokens} | {work} | {name} | {taken:.4g} | {num_bytes / 1e6:.0f} | {flops / 1e9:.3g} | "
                      f"{bound_ms / taken:.0%} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    run_command(main)
