"""The Triton kernels in Triton's interpreter: run by test_experts_triton.py, in a process with TRITON_INTERPRET=1."""

import itertools

import pytest
import torch
import triton.language as tl

from model.experts import kernels as experts_kernels
from model.experts import triton_backend as experts_triton
from model.experts.autograd import run
from model.experts.call import ExpertCall, ExpertWeights, sum_slots
from model.experts.expert_layer import experts, experts_traced
from model.experts.tiles import FULL_PRECISION, HALF_PRECISION, Tile, Tiles
from smelt_interp.errors import UserError
from tests.support.experts_oracle import (
    assert_close,
    assert_equal_bits,
    layer_inputs,
    load_forward_mode,
    ours_and_truth,
    relative_error,
    with_gradients,
)

BOUND = 1e-6


def triton_layer(indices_NK, **options):
    return lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m, backend="triton", **options))


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 65])
def test_any_number_of_tokens(tokens):
    assert_close(*ours_and_truth(layer_inputs(tokens=tokens, num_experts=3), backend="triton"), BOUND)


@pytest.mark.parametrize("tokens", [127, 129])
def test_more_than_a_tile_of_tokens_on_one_expert(tokens):
    x_ND, _, weights_NK, weights = layer_inputs(tokens=tokens, num_experts=3, top_k=1)
    inputs = (x_ND, torch.full((tokens, 1), 1), weights_NK, weights)
    ours, truth = ours_and_truth(inputs, backend="triton")
    assert_close(ours, truth, BOUND)
    for name in ("w_in", "w_out"):
        assert torch.count_nonzero(ours[name][[0, 2]]) == 0


def test_experts_without_a_gate():
    assert_close(*ours_and_truth(layer_inputs(tokens=9, gated=False), backend="triton", gated=False), BOUND)


@pytest.mark.parametrize(("width", "expert_width"), [(40, 24), (24, 40), (20, 6), (7, 5)])
def test_any_widths(width, expert_width):
    inputs = layer_inputs(tokens=5, width=width, expert_width=expert_width, num_experts=2)
    assert_close(*ours_and_truth(inputs, backend="triton"), BOUND)


def test_the_papers_widths(monkeypatch):
    """In blocks that the interpreter can afford; neither 1056 nor 352 is a multiple of them."""
    monkeypatch.setattr(experts_triton, "choose", lambda *_, **__: Tiles(*(Tile(256, 256, 256, 4, 2),) * 4))
    inputs = layer_inputs(tokens=3, width=1056, expert_width=352, num_experts=2)
    assert_close(*ours_and_truth(inputs, backend="triton"), BOUND)


@pytest.mark.parametrize("top_k", [1, 5, 11])
def test_any_number_of_choices(top_k):
    assert_close(*ours_and_truth(layer_inputs(tokens=3, num_experts=11, top_k=top_k), backend="triton"), BOUND)


def test_experts_above_id_255():
    x_ND, _, weights_NK, weights = layer_inputs(tokens=3, num_experts=288, top_k=2, width=8, expert_width=6)
    indices_NK = torch.tensor([[287, 256], [255, 3], [287, 0]])
    ours = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend="triton"))
    sorted_path = experts_traced(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend="triton")).out_ND
    truth = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend="reference"))
    assert relative_error(ours, truth) <= BOUND
    assert relative_error(ours, sorted_path) <= BOUND


def test_a_token_may_choose_one_expert_twice():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=5)
    indices_NK[2:] = indices_NK[2:, :1]
    assert_close(*ours_and_truth((x_ND, indices_NK, weights_NK, weights), backend="triton"), BOUND)


@pytest.mark.parametrize("expert", [-1, 5])
def test_an_expert_that_does_not_exist_is_named(expert):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=3)
    indices_NK[1, 1] = expert
    with pytest.raises(UserError, match=rf"expert indices must lie in 0\.\.4; got {expert}"):
        experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend="triton"))


def test_derivatives_equal_finite_differences():
    """float64 tensors accumulate in float64."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(
        tokens=2, width=3, num_experts=3, expert_width=2, dtype=torch.float64
    )
    leaves = [tensor.requires_grad_() for tensor in (x_ND, weights_NK, *weights)]

    def layer(x, w, w_in, w_out):
        return experts(ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), backend="triton"))

    def slots(x, w, w_in, w_out):
        return experts_traced(ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), backend="triton")).slot_NKD

    assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(slots, leaves, fast_mode=True)


def test_forward_mode_is_refused():
    load_forward_mode()
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=2)
    with pytest.raises(UserError, match="forward-mode derivatives must use the torch backend"):
        torch.func.jvp(
            lambda x: experts(ExpertCall(x, indices_NK, weights_NK, weights, backend="triton")), (x_ND,), (x_ND,)
        )


@pytest.mark.parametrize("gated", [True, False])
def test_a_trace_is_the_same_pass_to_the_bit(gated):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=7, gated=gated)
    plain, traced = (
        with_gradients(
            lambda x, w, m, run=run: run(ExpertCall(x, indices_NK, w, m, gated=gated, backend="triton")),
            x_ND, weights_NK, weights,
        )
        for run in (experts, lambda call: sum_slots(experts_traced(call).slot_NKD))
    )  # fmt: skip
    assert_equal_bits(traced, plain)
    ours, torch_trace = (
        experts_traced(ExpertCall(x_ND, indices_NK, weights_NK, weights, gated=gated, backend=backend))
        for backend in ("triton", "torch")
    )
    assert torch.equal(ours.order_R, torch_trace.order_R)
    assert torch.equal(ours.counts_E, torch_trace.counts_E)
    for name in ("out_ND", "slot_NKD", "pre_activation_RG", "activation_RF"):
        assert relative_error(getattr(ours, name), getattr(torch_trace, name)) <= BOUND


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=4))[1:-1:5])
def test_what_is_frozen_costs_the_rest_nothing(needed):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=4)
    layer = triton_layer(indices_NK)
    full = with_gradients(layer, x_ND, weights_NK, weights)
    tensors = (x_ND, weights_NK, *weights)
    leaves = [tensor.clone().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
    out_ND = layer(leaves[0], leaves[1], ExpertWeights(*leaves[2:]))
    direction = torch.randn(out_ND.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out_ND * direction.float()).sum().backward()
    for leaf, need, truth in zip(leaves, needed, list(full.values())[1:], strict=True):
        assert (leaf.grad is None) == (not need)
        assert not need or torch.equal(leaf.grad, truth)


def test_gradients_reach_low_rank_updates_of_frozen_weights():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=17)
    down, up = torch.randn(5, 2, 24).requires_grad_(), torch.zeros(5, 40, 2).requires_grad_()
    adapted = ExpertWeights(weights.w_in + up @ down, weights.w_out)
    experts(ExpertCall(x_ND, indices_NK, weights_NK, adapted, backend="triton")).square().sum().backward()
    assert up.grad.abs().amax((1, 2)).min() > 0


def test_layouts_and_types_of_storage():
    """x as columns of a wider matrix and transposed; weights transposed; bfloat16 weights widened as they are read."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=5)
    layer = triton_layer(indices_NK)
    plain = layer(x_ND, weights_NK, weights)
    wide = torch.full((5, 40), float("nan"))
    wide[:, 5:29] = x_ND
    for x in (wide[:, 5:29], x_ND.t().contiguous().t()):
        assert torch.equal(layer(x, weights_NK, weights), plain)
    one_token = x_ND[:1].expand(5, 24)
    assert torch.equal(layer(one_token, weights_NK, weights), layer(one_token.contiguous(), weights_NK, weights))
    views = ExpertWeights(*(matrix.transpose(1, 2).contiguous().transpose(1, 2) for matrix in weights))
    assert torch.equal(layer(x_ND, weights_NK, views), plain)
    assert_close(
        with_gradients(layer, x_ND, weights_NK, views), with_gradients(layer, x_ND, weights_NK, weights), BOUND
    )
    stored = ExpertWeights(*(matrix.bfloat16() for matrix in weights))
    widened = ExpertWeights(*(matrix.float() for matrix in stored))
    assert torch.equal(layer(x_ND, weights_NK, stored), layer(x_ND, weights_NK, widened))


def test_gradients_of_any_layout_are_taken():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=4)
    for gradient in (torch.ones(()).expand(4, 24), torch.randn(24).expand(4, 24)):
        strided, dense = (
            torch.autograd.grad(triton_layer(indices_NK)(leaf, weights_NK, weights), leaf, each)[0]
            for leaf, each in ((x_ND.clone().requires_grad_(), g) for g in (gradient, gradient.contiguous()))
        )
        assert torch.equal(strided, dense)


def test_two_calls_agree_to_the_bit_and_few_slots_need_no_sort():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=2, num_experts=32)
    layer = triton_layer(indices_NK)
    first, second = (with_gradients(layer, x_ND, weights_NK, weights) for _ in range(2))
    assert_equal_bits(first, second)
    assert relative_error(layer(x_ND, weights_NK, weights), first["out"]) <= BOUND


def test_tokens_may_come_in_any_order_and_experts_under_other_names():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=20)
    plain = triton_layer(indices_NK)(x_ND, weights_NK, weights)
    order, label = torch.randperm(20, generator=torch.Generator().manual_seed(5)), torch.tensor([3, 0, 4, 1, 2])
    renamed = ExpertWeights(*(matrix[label.argsort()] for matrix in weights))
    moved = triton_layer(label[indices_NK[order]])(x_ND[order], weights_NK[order], renamed)
    assert relative_error(moved, plain[order]) <= BOUND  # a row's place in its tile may change the order of its sums


def test_autocast_changes_nothing():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=4)
    plain = with_gradients(triton_layer(indices_NK), x_ND, weights_NK, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal_bits(with_gradients(triton_layer(indices_NK), x_ND, weights_NK, weights), plain)


def test_half_precision_slots_are_summed_as_the_kernel_sums_them():
    """float16 arithmetic, which on CPU tensors only the operator beneath the layer offers."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6, num_experts=6, top_k=5, dtype=torch.float32)
    halves = ExpertWeights(*(matrix.half() for matrix in weights))
    call = ExpertCall(x_ND.half(), indices_NK, weights_NK, halves, backend="triton")
    summed_ND, slot_NKD = (run(call, summed=summed)[0] for summed in (True, False))
    assert summed_ND.dtype == slot_NKD.dtype == torch.float16
    assert torch.equal(sum_slots(slot_NKD), summed_ND)
    assert relative_error(summed_ND, experts(ExpertCall(x_ND, indices_NK, weights_NK, weights))) < 2e-3


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 40], [16, 32, 17], [0, 100, 0], [5] * 37])
@pytest.mark.parametrize("block_rows", [16, 32])
def test_the_tile_table_covers_every_row_once(counts, block_rows):
    start_E1 = torch.tensor([0, *itertools.accumulate(counts)])
    order_R = torch.arange(sum(counts))
    table = experts_triton._tile_table(order_R, start_E1, block_rows)
    wanted = [
        (expert, row, stop)
        for expert, (start, stop) in enumerate(itertools.pairwise(start_E1.tolist()))
        for row in range(start, stop, block_rows)
    ]
    tiles = list(zip(table.expert_P.tolist(), table.first_P.tolist(), table.stop_P.tolist(), strict=True))
    assert tiles[: len(wanted)] == wanted
    assert all(expert == -1 for expert, _, _ in tiles[len(wanted) :])


@pytest.mark.parametrize("tiles", [*HALF_PRECISION.values(), FULL_PRECISION])
def test_every_tile_size_computes_the_same(tiles, monkeypatch):
    monkeypatch.setattr(experts_triton, "choose", lambda *_, **__: tiles)
    assert_close(*ours_and_truth(layer_inputs(tokens=11, width=40), backend="triton"), BOUND)


def test_a_nan_in_one_token_stays_in_that_token():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6)
    clean = triton_layer(indices_NK)(x_ND, weights_NK, weights)
    x_ND[2] = float("nan")
    out_ND = triton_layer(indices_NK)(x_ND, weights_NK, weights)
    assert out_ND[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert relative_error(out_ND[others], clean[others]) <= BOUND


def test_uninitialised_memory_is_never_read():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=3, num_experts=7)
    clean = with_gradients(triton_layer(indices_NK), x_ND, weights_NK, weights)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = with_gradients(triton_layer(indices_NK), x_ND, weights_NK, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal_bits(poisoned, clean)


def test_offsets_past_two_to_the_31_are_not_wrapped():
    """Tokens, experts and slots that lie more than 2^31 numbers apart, in memory that is mostly never touched."""
    x_ND, _, _, weights = layer_inputs(tokens=3, num_experts=3, width=16, expert_width=4)
    far = 2**30 + 8
    storage = torch.empty(2 * far + 400)

    def spread(values: torch.Tensor, start: int) -> torch.Tensor:
        rows = storage.as_strided(values.shape, (far, *values.stride()[1:]), start)
        return rows.copy_(values)

    indices_NK, weights_NK = torch.tensor([[2], [0], [2]]), torch.ones(3, 1)
    d_out_ND = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    far_inputs = [spread(x_ND, 0), spread(weights.w_in, 32), spread(weights.w_out, 200)]
    near, distant = (
        [out_ND.detach(), *torch.autograd.grad(out_ND, leaves, direction_ND)]
        for leaves, direction_ND in (
            ([tensor.requires_grad_() for tensor in (x_ND, *weights)], d_out_ND),
            ([tensor.requires_grad_() for tensor in far_inputs], spread(d_out_ND, 300)),
        )
        for out_ND in (triton_layer(indices_NK)(leaves[0], weights_NK, ExpertWeights(*leaves[1:])),)
    )
    assert all(torch.equal(a, b) for a, b in zip(distant, near, strict=True))

    slot = 2**31 // 16 + 1
    out_SD, expert_weights_S = storage, torch.empty(slot + 1)
    expert_weights_S[slot] = 2.0
    row, expert = torch.tensor([2**31 // 4 + 1]), torch.tensor([2])
    order_R = torch.empty(int(row) + 1, dtype=torch.int64)
    order_R[row] = slot
    left_C = storage[4 * row : 4 * row + 4].copy_(torch.randn(4, generator=torch.Generator().manual_seed(2)))
    experts_kernels.rows_to_slots[1, 1](
        storage, weights.w_out.detach(), expert_weights_S, order_R, expert, row, row + 1, out_SD,
        *weights.w_out.stride(), DEPTH=4, WIDTH=16, WEIGHTED=True, ACCUMULATE=tl.float32,
        BLOCK_ROWS=16, BLOCK_COLUMNS=16, BLOCK_DEPTH=16,
    )  # fmt: skip
    torch.testing.assert_close(out_SD[slot * 16 : slot * 16 + 16], 2 * left_C @ weights.w_out.detach()[2].T)


def test_slots_past_two_to_the_31_are_summed():
    """Three tokens, two slots each, so wide that the third token begins at number 2^31; float16 saves address space."""
    width, columns = 2**29, 128
    slot_NKC = torch.empty(5 * width + columns, dtype=torch.float16).as_strided((3, 2, columns), (2 * width, width, 1))
    out_NC = torch.empty(2 * width + columns, dtype=torch.float16).as_strided((3, columns), (width, 1))
    slot_NKC.copy_(torch.randn(3, 2, columns, generator=torch.Generator().manual_seed(3)))
    experts_kernels.combine[1, 1](
        slot_NKC, out_NC, 3, WIDTH=width, TOP_K=2, ACCUMULATE=tl.float32, BLOCK_TOKENS=8, BLOCK_COLUMNS=columns
    )
    assert torch.equal(out_NC, slot_NKC.float().sum(1).half())


def test_a_compiler_takes_the_layer_as_one_graph():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=4)
    layer = triton_layer(indices_NK)
    compiled = torch.compile(
        lambda x, w, w_in, w_out: layer(x, w, ExpertWeights(w_in, w_out)), fullgraph=True, backend="aot_eager"
    )
    eager = with_gradients(layer, x_ND, weights_NK, weights)
    assert_equal_bits(with_gradients(lambda x, w, m: compiled(x, w, *m), x_ND, weights_NK, weights), eager)
    with torch.no_grad():
        assert torch.equal(compiled(x_ND, weights_NK, *weights), eager["out"])
