"""The benchmarks measure what they say: peers compute the same layer, ratios and costs are right."""

from dataclasses import replace

import pytest
import torch

from benchmarks import experts as cpu
from benchmarks import experts_gpu as gpu
from model.experts.call import ExpertWeights
from model.experts.expert_layer import experts, experts_traced
from smelt_interp.errors import UserError
from tests.support.commands import Command


def test_every_peer_computes_the_same_layer():
    shape = cpu.Shape(width=16, num_experts=5, top_k=2, expert_width=12)
    generator = torch.Generator().manual_seed(0)
    weights = ExpertWeights(torch.randn(5, 24, 16, generator=generator), torch.randn(5, 16, 12, generator=generator))
    x_ND = torch.randn(9, 16, generator=generator)
    weights_NK, indices_NK = torch.randn(9, 5, generator=generator).softmax(-1).topk(2)
    parameters = ExpertWeights(*(torch.nn.Parameter(matrix) for matrix in weights))
    peers = {
        "loop": cpu.textbook, "grouped": cpu.grouped, "grouped on a GPU": gpu.grouped,
        **cpu.transformers_peers(shape, parameters),
    }  # fmt: skip
    ours = cpu.ours(x_ND, indices_NK, weights_NK, weights)
    for name, peer in peers.items():
        out_ND = peer(x_ND, indices_NK, weights_NK, parameters).detach()
        torch.testing.assert_close(out_ND, ours, msg=lambda text, name=name: f"{name}: {text}")


def test_ratios_shares_and_misses_are_those_of_the_rounds():
    point = cpu.Point(shape="M", tokens=256, work="training")
    point.seconds = {
        "ours": [1.0, 2.0, 4.0], "torch grouped_mm": [2.0, 2.0, 2.0], "transformers eager": [1.0, 2.0, 4.0],
        "roof": [0.5, 0.5, 0.5],
    }  # fmt: skip
    assert point.ratio("torch grouped_mm") == (0.75, 1.0, 1.5)
    flops = 6 * 256 * 8 * 256 * 96
    assert point.share_of_roof() == pytest.approx(flops / 2.0 / (2 * 1024**3 / 0.5))
    point.seconds["transformers grouped_mm"] = [0.5, 1.8, 8.0]
    assert list(cpu.missed([point])) == ["M T=256 training: transformers grouped_mm / ours 0.90, at least 0.95"]


def test_a_call_over_the_limit_is_found_by_a_child(monkeypatch):
    monkeypatch.setattr(cpu, "LIMIT_SECONDS", 1)

    def endless() -> None:
        while True:
            pass

    assert cpu.takes_over_limit(endless)
    assert not cpu.takes_over_limit(lambda: None)


def test_the_cost_of_one_token_is_its_experts_weights():
    options = gpu.Options()
    given = gpu.inputs(gpu.Options(num_experts=16), 1, torch.bfloat16, torch.device("cpu"))
    num_bytes, flops = gpu.cost(options, given, backward=False)
    assert flops == 2 * 8 * 3 * 1056 * 352
    assert num_bytes == 2 * 8 * 3 * 1056 * 352 + 2 * 2 * 1056


def test_the_check_on_a_gpu_refuses_a_wrong_gradient(monkeypatch):
    """On the CPU the layer under test is replaced by one whose gate and up rows are exchanged."""

    def exchanged(call):
        assert call.backend == "triton"
        w_in, w_out = call.weights
        rolled = ExpertWeights(w_in.roll(w_in.shape[1] // 2, 1), w_out)
        return gpu.grouped(call.x_ND, call.expert_indices_NK, call.expert_weights_NK, rolled)

    monkeypatch.setattr(gpu, "experts", exchanged)
    with pytest.raises(UserError, match="relative error must be at most 1e-05"):
        gpu.check(torch.device("cpu"), torch.float32, 1e-5)


def test_the_check_on_a_gpu_accepts_a_right_layer(monkeypatch, capsys):
    """On the CPU, with the torch backend in place of the kernels, at an eighth of the widths."""
    inputs = gpu.inputs

    def narrow(options, tokens, *rest):
        eighth = replace(options, width=options.width // 8, expert_width=options.expert_width // 8)
        return inputs(eighth, min(tokens, 100), *rest)

    monkeypatch.setattr(gpu, "inputs", narrow)
    for name, function in (("experts", experts), ("experts_traced", experts_traced)):
        monkeypatch.setattr(gpu, name, lambda call, function=function: function(replace(call, backend="torch")))
    gpu.check(torch.device("cpu"), torch.float32, 1e-5)
    assert capsys.readouterr().out.count("w_out") == 5


def test_without_a_gpu_the_command_says_so_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Command(monkeypatch, capsys).refusal(gpu.main) == (
        "error: a CUDA device must be there to be timed; got none; benchmarks.experts times the CPU\n"
    )
