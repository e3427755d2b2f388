"""Time the expert layer on this CPU against the peers that a user would have instead.

    python -m benchmarks.experts --out experts.json

Every round runs each competitor once, so that a slow moment of the machine meets all of them; what is reported is the
median over rounds of peer time / our time, with quartiles. Times are the process's CPU time on one thread, page faults
included. A large float32 matrix product, timed in the same rounds, is the roof. A peer that takes over 60 s for one
call is left out and named.
"""

import json
import os
import random
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from model.experts.call import ExpertCall, ExpertWeights
from model.experts.expert_layer import experts
from smelt_interp.errors import run_command

Work = Literal["forward", "training", "frozen", "four visits"]
Call = Callable[[], object]
Forward = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]

LIMIT_SECONDS = 60


class Shape(NamedTuple):
    """One expert layer."""

    width: int
    num_experts: int
    top_k: int
    expert_width: int


SHAPES = {"S": Shape(128, 16, 4, 64), "M": Shape(256, 64, 8, 96), "L": Shape(1056, 288, 8, 352)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to time."""

    shapes: tuple[Literal["S", "M", "L"], ...] = ("S", "M", "L")
    tokens: tuple[int, ...] = (1, 64, 256, 2048, 8192)
    works: tuple[Work, ...] = ("forward", "training", "frozen", "four visits")
    seconds: float = 6.0
    """CPU seconds for one point; at least `rounds` rounds are run all the same."""
    rounds: int = 3
    out: Path | None = None
    """Write every number as JSON here."""


@dataclass(slots=True, kw_only=True)
class Point:
    """All rounds of one shape, number of tokens and kind of work."""

    shape: str
    tokens: int
    work: Work
    seconds: dict[str, list[float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def ratio(self, peer: str) -> tuple[float, float, float]:
        """First quartile, median and third quartile over rounds of peer time / our time."""
        ratios = sorted(a / b for a, b in zip(self.seconds[peer], self.seconds["ours"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high

    def share_of_roof(self) -> float:
        """Our arithmetic per second over that of the large product; forward only, where each FLOP is known."""
        shape = SHAPES[self.shape]
        flops = 6 * self.tokens * shape.top_k * shape.width * shape.expert_width
        roofs = [2 * ROOF_WIDTH**3 / seconds for seconds in self.seconds["roof"]]
        return statistics.median(
            flops / seconds / roof for seconds, roof in zip(self.seconds["ours"], roofs, strict=True)
        )


ROOF_WIDTH = 1024

LEAST = 0.95
"""No peer may be faster by more than this says: the least ratio of a peer's time to ours, at any shape and work."""


def textbook(x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
    """The loop of every introduction: for each expert, its tokens through its matrices, added to the output."""
    out_ND = torch.zeros_like(x_ND)
    for expert in range(len(weights.w_in)):
        token, choice = torch.where(indices_NK == expert)
        gate, up = (x_ND[token] @ weights.w_in[expert].T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ weights.w_out[expert].T
        out_ND = out_ND.index_add(0, token, result * weights_NK[token, choice, None])
    return out_ND


def grouped(x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
    """Sorted slots through torch's grouped_mm, as its documentation would have it."""
    experts_R, order_R = indices_NK.flatten().sort()
    stops_E = torch.bincount(experts_R, minlength=len(weights.w_in)).cumsum(0).int()
    pre_RG = torch.nn.functional.grouped_mm(
        x_ND[order_R // indices_NK.shape[1]], weights.w_in.transpose(1, 2), offs=stops_E
    )
    gate_RF, up_RF = pre_RG.chunk(2, dim=-1)
    out_RD = torch.nn.functional.grouped_mm(
        torch.nn.functional.silu(gate_RF) * up_RF, weights.w_out.transpose(1, 2), offs=stops_E
    )
    row_R = torch.empty_like(order_R)
    row_R[order_R] = torch.arange(len(order_R))
    return (out_RD[row_R].view(*indices_NK.shape, -1) * weights_NK[..., None]).sum(1)


def ours(x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
    """The layer as the network calls it."""
    return experts(ExpertCall(x_ND, indices_NK, weights_NK, weights))


def transformers_peers(shape: Shape, weights: ExpertWeights) -> dict[str, Forward]:
    """Qwen3-MoE's experts over the same parameters, with two of transformers' implementations."""
    config = Qwen3MoeConfig(
        hidden_size=shape.width, num_experts=shape.num_experts, moe_intermediate_size=shape.expert_width
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = nn.Parameter(weights.w_in), nn.Parameter(weights.w_out)

    def peer(implementation: str) -> Forward:
        def forward(x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor, weights: ExpertWeights) -> Tensor:
            config._experts_implementation = implementation
            module.gate_up_proj, module.down_proj = weights
            out_ND: Tensor = module(x_ND, indices_NK, weights_NK)
            return out_ND

        return forward

    return {f"transformers {name}": peer(name) for name in ("eager", "grouped_mm")}


def calls(shape: Shape, tokens: int, work: Work) -> dict[str, Call]:
    """What each competitor runs in one round."""
    # One layer and what is sent through it, the same for all.
    generator = torch.Generator().manual_seed(0)
    w_in = torch.randn(shape.num_experts, 2 * shape.expert_width, shape.width, generator=generator)
    w_out = torch.randn(shape.num_experts, shape.width, shape.expert_width, generator=generator)
    weights = ExpertWeights(
        nn.Parameter(w_in.mul_(shape.width**-0.5)), nn.Parameter(w_out.mul_(shape.expert_width**-0.5))
    )
    frozen = ExpertWeights(*(nn.Parameter(matrix.detach(), requires_grad=False) for matrix in weights))
    x_ND = torch.randn(tokens, shape.width, generator=generator)
    logits_NE = torch.randn(tokens, shape.num_experts, generator=generator)
    weights_NK, indices_NK = logits_NE.softmax(-1).topk(shape.top_k)
    direction_ND = torch.randn(tokens, shape.width, generator=generator)

    def forward_only(layer: Forward) -> Call:
        @torch.no_grad()
        def call() -> Tensor:
            return layer(x_ND, indices_NK, weights_NK, weights)

        return call

    def with_backward(layer: Forward, given: ExpertWeights, visits: int) -> Call:
        def call() -> None:
            leaf_ND, leaf_NK = x_ND.detach().requires_grad_(), weights_NK.detach().requires_grad_()
            hidden_ND = leaf_ND
            for _ in range(visits):
                out_ND = layer(hidden_ND, indices_NK, leaf_NK, given)
                hidden_ND = out_ND if visits == 1 else hidden_ND + out_ND / visits
            hidden_ND.backward(direction_ND)
            for matrix in given:
                matrix.grad = None

        return call

    # Who competes at which kind of work.
    peers = {"textbook loop": textbook, "torch grouped_mm": grouped, **transformers_peers(shape, weights)}
    if work == "forward":
        return {name: forward_only(layer) for name, layer in {"ours": ours, **peers}.items()}
    if work == "training":
        return {name: with_backward(layer, weights, 1) for name, layer in {"ours": ours, **peers}.items()}
    if work == "frozen":
        alone = {name: with_backward(layer, frozen, 1) for name, layer in {"ours": ours, **peers}.items()}
        return {**alone, "ours, unfrozen": with_backward(ours, weights, 1)}
    return {
        name: with_backward(layer, weights, 4) for name, layer in {"ours": ours, "torch grouped_mm": grouped}.items()
    }


def takes_over_limit(call: Call) -> bool:
    """Whether one call needs more CPU time than `LIMIT_SECONDS`: a child process tries, under that limit."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + LIMIT_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            call()
            code = 0
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended not in (0, -signal.SIGXCPU, -signal.SIGKILL):
        raise RuntimeError(f"a peer failed with status {ended}")
    return ended != 0


def cpu_seconds(call: Call) -> float:
    """CPU time of this process for one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, tokens: int, work: Work, options: Options, hopeless: list[str]) -> Point:
    """Interleaved rounds of one point; each competitor's first call is not counted, the `hopeless` are not tried."""
    point = Point(shape=name, tokens=tokens, work=work, left_out=list(hopeless))
    competitors = {peer: call for peer, call in calls(SHAPES[name], tokens, work).items() if peer not in hopeless}
    if name == "L" and work != "forward":
        for peer in ("textbook loop", "transformers eager"):
            if peer in competitors and takes_over_limit(competitors[peer]):
                del competitors[peer]
                point.left_out.append(peer)
    matrix = torch.randn(ROOF_WIDTH, ROOF_WIDTH)
    product = torch.empty_like(matrix)
    competitors["roof"] = lambda: torch.mm(matrix, matrix, out=product)
    first = {peer: cpu_seconds(call) for peer, call in competitors.items()}
    rounds = max(options.rounds, min(50, int(options.seconds / sum(first.values()))))
    point.seconds = {peer: [] for peer in competitors}
    order = random.Random(0)
    for _ in range(rounds):
        for peer in order.sample(list(competitors), len(competitors)):  # nobody always finds another's weights in cache
            point.seconds[peer].append(cpu_seconds(competitors[peer]))
    return point


def lines(point: Point) -> Iterator[str]:
    """One line of a table for each peer of a point."""
    shown = f"| {point.shape} | {point.tokens} | {point.work} |"
    milliseconds = 1000 * statistics.median(point.seconds["ours"])
    roof = f", {point.share_of_roof():.0%} of the roof" if point.work == "forward" else ""
    yield f"{shown} ours | {milliseconds:.3g} ms{roof} | {len(point.seconds['ours'])} rounds |"
    for peer in point.seconds:
        if peer not in ("ours", "roof"):
            low, middle, high = point.ratio(peer)
            yield f"{shown} {peer} | {middle:.2f} | {low:.2f} to {high:.2f} |"
    for peer in point.left_out:
        yield f"{shown} {peer} | over {LIMIT_SECONDS} s | left out |"


def missed(points: list[Point]) -> Iterator[str]:
    """One line for each peer that is faster than `LEAST` allows."""
    for point in points:
        for peer in point.seconds:
            if peer not in ("ours", "roof") and (ratio := point.ratio(peer)[1]) < LEAST:
                yield f"{point.shape} T={point.tokens} {point.work}: {peer} / ours {ratio:.2f}, at least {LEAST}"


def main() -> None:
    """Measure every point asked for, print each as it is done, then the peers that were faster."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    print("| shape | tokens | work | competitor | time / our time | quartiles |\n|---|---|---|---|---|---|")
    points = []
    for work in options.works:
        for name in options.shapes:
            hopeless: list[str] = []  # a peer that takes too long is not tried again with more tokens
            for tokens in sorted(options.tokens):
                points.append(measure(name, tokens, work, options, hopeless))
                hopeless = points[-1].left_out
                print("\n".join(lines(points[-1])), flush=True)
    print("\nfaster than we are:", *(list(missed(points)) or ["none"]), sep="\n")
    if options.out is not None:
        rows = [
            {"shape": p.shape, "tokens": p.tokens, "work": p.work, "seconds": p.seconds, "left_out": p.left_out}
            for p in points
        ]
        temporary = options.out.with_name(options.out.name + ".part")
        temporary.write_text(json.dumps({"torch": torch.__version__, "points": rows}, indent=1))
        os.replace(temporary, options.out)


if __name__ == "__main__":
    run_command(main)
