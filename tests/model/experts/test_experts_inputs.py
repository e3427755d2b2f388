"""What the expert layer accepts, in any memory layout and type, and what it refuses."""

import random
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import model.experts
from model.experts.autograd import run
from model.experts.call import ExpertCall, ExpertWeights, sum_slots
from model.experts.expert_layer import experts, experts_traced
from smelt_interp.errors import UserError
from tests.support.experts_oracle import (
    assert_close,
    assert_equal_bits,
    layer_inputs,
    load_forward_mode,
    loop_in_float64,
    relative_error,
    with_gradients,
)

BACKENDS = ("reference", "torch", "auto")


@pytest.fixture(scope="module", autouse=True)
def _forward_mode_is_loaded():
    load_forward_mode()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("expert", [-1, 5, 8])
def test_an_expert_that_does_not_exist_is_named(backend, expert):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6)
    indices_NK[3, 1] = expert
    for function in (experts, experts_traced):
        with pytest.raises(UserError, match=rf"expert indices must lie in 0\.\.4; got {expert}"):
            function(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=backend))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(6)}, r"x must have the axes tokens, width; got \(6,\)"),
        ({"x": torch.zeros(6, 23)}, "x must have the experts' width 24; got 23"),
        ({"indices": torch.zeros(5, 2).long()}, r"expert indices must be \(6, K\), K at least 1; got \(5, 2\)"),
        ({"indices": torch.zeros(6, 0).long()}, r"expert indices must be \(6, K\), K at least 1; got \(6, 0\)"),
        ({"indices": torch.zeros(6, 2)}, "expert indices must be int64 or int32; got torch.float32"),
        ({"expert_weights": torch.zeros(6, 3)}, r"shape of the indices \(6, 2\); got \(6, 3\)"),
        ({"w_in": torch.zeros(5, 40)}, r"three axes, experts first; got \(5, 40\)"),
        ({"w_in": torch.zeros(5, 20, 24)}, r"w_in must be \(5, 40, 24\) beside w_out .*got \(5, 20, 24\)"),
        ({"backend": "cuda"}, "backend must be one of auto, reference, small, torch, triton; got 'cuda'"),
        (
            {"x": torch.zeros(6, 24).long()},
            "x must hold float16, bfloat16, float32 or float64 numbers; got torch.int64",
        ),
        ({"w_in": torch.zeros(5, 40, 24, dtype=torch.int8)}, "w_in must hold float16.* numbers; got torch.int8"),
        ({"w_in": torch.zeros(5, 40, 24).to(torch.float8_e4m3fn)}, "w_in must hold .*; got torch.float8_e4m3fn"),
        ({"expert_weights": torch.ones(6, 2).cfloat()}, "expert weights must hold .*; got torch.complex64"),
        ({"w_in": torch.zeros(5, 40, 24, device="meta")}, "w_in must be on the device of x, cpu; got meta"),
        (
            {"indices": torch.zeros(6, 2, device="meta").long()},
            "expert indices must be on the device of x, cpu; got meta",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6)
    given = {"x": x_ND, "indices": indices_NK, "expert_weights": weights_NK, "w_in": weights.w_in, "backend": "auto"}
    x, indices, expert_weights, w_in, backend = (given | change).values()
    with pytest.raises(UserError, match=message):
        experts(ExpertCall(x, indices, expert_weights, ExpertWeights(w_in, weights.w_out), backend=backend))


def test_kernels_need_a_gpu_unless_they_are_interpreted():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6)
    with pytest.raises(UserError, match="the triton backend must have tensors on a CUDA device; got cpu; use torch"):
        experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend="triton"))


def test_without_triton_its_backend_says_what_to_use(monkeypatch):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6)
    monkeypatch.delattr(model.experts, "triton_backend", raising=False)
    monkeypatch.delitem(sys.modules, "model.experts.triton_backend", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match="must have the triton package; got none; pass backend='torch'"):
        experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend="triton"))


def test_half_precision_is_the_arithmetic_of_other_devices_but_never_of_the_reference():
    """Shown on tensors without a device's memory; on a CPU it is float32 for all."""
    x_ND, w_in, w_out = (
        torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 3), (4, 10, 3), (4, 3, 5))
    )
    indices_NK = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    for backend, wanted in (("torch", torch.bfloat16), ("triton", torch.bfloat16), ("reference", torch.float32)):
        call = ExpertCall(x_ND, indices_NK, x_ND[:, :1], ExpertWeights(w_in, w_out)).prepared(backend)
        assert (call.x_ND.dtype, call.expert_weights_NK.dtype) == (wanted, torch.float32)


@pytest.mark.parametrize(("tokens", "backend"), [(0, "torch"), (1, "small"), (300, "small"), (1025, "torch")])
def test_on_the_cpu_auto_is_small_or_torch(tokens, backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=tokens)
    auto, chosen = (
        experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=name)) for name in ("auto", backend)
    )
    assert torch.equal(auto, chosen)


@pytest.mark.parametrize(
    "change",
    [{"tokens": 0}, {"tokens": 1025}, {"width": 18}, {"expert_width": 6},
     {"dtype": torch.float64}],
)  # fmt: skip
def test_what_is_not_small_is_refused_and_left_to_torch(change):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(**({"tokens": 6} | change))
    call = ExpertCall(x_ND, indices_NK, weights_NK, weights)
    with pytest.raises(UserError, match=r"the small backend must have 1 to 2048 slots in float32 .*; use torch"):
        experts(replace(call, backend="small"))
    assert torch.equal(experts(call), experts(replace(call, backend="torch")))


def test_transforms_of_a_small_call_are_left_to_torch():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=6)
    slopes = [
        torch.func.jvp(
            lambda x, b=b: experts(ExpertCall(x, indices_NK, weights_NK, weights, backend=b)), (x_ND,), (x_ND,)
        )
        for b in ("auto", "torch")
    ]
    for value, other in zip(*slopes, strict=True):
        assert torch.equal(value, other)


def _layouts(x_ND):
    """The same numbers in other memory layouts."""
    wide = torch.full((len(x_ND), 40), float("nan"))
    wide[:, 5:29] = x_ND
    spaced = torch.full((2 * len(x_ND), x_ND.shape[1]), float("nan"))
    spaced[::2] = x_ND
    misaligned = torch.empty(x_ND.numel() + 1)[1:].view_as(x_ND).copy_(x_ND)
    return {"columns of a wider matrix": wide[:, 5:29], "every other row": spaced[::2],
            "transposed": x_ND.t().contiguous().t(), "off by four bytes": misaligned}  # fmt: skip


@pytest.mark.parametrize("layout", ["columns of a wider matrix", "every other row", "transposed", "off by four bytes"])
def test_the_layout_of_x_is_no_matter(layout):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    strided = _layouts(x_ND)[layout]
    layer = lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m))
    plain = with_gradients(layer, x_ND, weights_NK, weights)
    leaf = strided.requires_grad_()
    out_ND = experts(ExpertCall(leaf, indices_NK, weights_NK, weights))
    direction = torch.randn(out_ND.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((out_ND * direction.float()).sum(), leaf)
    assert_equal_bits({"out": out_ND.detach(), "x": gradient}, {"out": plain["out"], "x": plain["x"]})


def test_one_token_expanded_is_that_token_repeated():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=8)
    expanded = x_ND[:1].expand(8, 24)
    assert torch.equal(
        experts(ExpertCall(expanded, indices_NK, weights_NK, weights)),
        experts(ExpertCall(expanded.contiguous(), indices_NK, weights_NK, weights)),
    )


def test_weights_may_be_transposed_views_and_indices_int32():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    views = ExpertWeights(*(matrix.transpose(1, 2).contiguous().transpose(1, 2) for matrix in weights))
    plain = with_gradients(lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m)), x_ND, weights_NK, weights)
    other = with_gradients(lambda x, w, m: experts(ExpertCall(x, indices_NK.int(), w, m)), x_ND, weights_NK, views)
    assert_close(other, plain, 1e-6)


def test_weights_mapped_from_a_file_work_at_any_offset(tmp_path):
    """As safetensors maps them: read-only memory that starts at an odd multiple of four bytes."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\0" * 4 + weights.w_in.numpy().tobytes() + b"\0" * 4 + weights.w_out.numpy().tobytes())
    count = weights.w_in.numel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory is read-only is the point
        mapped = torch.from_file(str(path), shared=False, size=count + weights.w_out.numel() + 2)
    views = ExpertWeights(mapped[1 : count + 1].view_as(weights.w_in), mapped[count + 2 :].view_as(weights.w_out))
    assert views.w_in.data_ptr() % 16 == 4
    assert (
        relative_error(
            experts(ExpertCall(x_ND, indices_NK, weights_NK, views)),
            experts(ExpertCall(x_ND, indices_NK, weights_NK, weights)),
        )
        <= 1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_is_storage_and_float32_the_arithmetic(stored, backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    x_half, weights_half = x_ND.to(stored), ExpertWeights(*(matrix.to(stored) for matrix in weights))
    layer = lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m, backend=backend))
    half = with_gradients(layer, x_half, weights_NK.to(stored), weights_half)
    widened = ExpertWeights(*(matrix.float() for matrix in weights_half))
    full = with_gradients(layer, x_half.float(), weights_NK.to(stored).float(), widened)
    assert all(value.dtype == stored for value in half.values())
    assert torch.equal(half["out"], full["out"].to(stored))
    assert_close(half, full, 2 * torch.finfo(stored).eps)  # the gradient of the output was rounded on its way in


@pytest.mark.parametrize("seed", range(60))
def test_any_mixture_of_shapes_types_layouts_and_options_equals_the_loop(seed):
    draw = random.Random(seed)
    num_experts, gated = draw.choice([1, 2, 5, 37]), draw.random() < 0.6
    x_ND, indices_NK, weights_NK, weights = layer_inputs(
        tokens=draw.choice([0, 1, 3, 17, 70]), width=draw.choice([1, 6, 24, 40]), num_experts=num_experts,
        top_k=draw.randint(1, min(5, num_experts)), expert_width=draw.choice([1, 6, 20, 33]), gated=gated, seed=seed,
    )  # fmt: skip
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.float64)
    layouts = (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t.repeat_interleave(2, 0)[::2])
    leaves = [
        draw.choice(layouts)(tensor.to(draw.choice(types))).detach().requires_grad_(draw.random() < 0.7)
        for tensor in (x_ND, weights_NK, *weights)
    ]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth_ND = loop_in_float64(wide[0], indices_NK, wide[1], ExpertWeights(*wide[2:]), gated)
    call = ExpertCall(leaves[0], draw.choice(layouts)(indices_NK), leaves[1], ExpertWeights(*leaves[2:]), gated=gated)
    out_ND = experts(call)
    rounding = max(2e-6, torch.finfo(leaves[0].dtype).eps)
    assert relative_error(out_ND, truth_ND) <= rounding
    if out_ND.requires_grad:
        direction_ND = torch.randn(out_ND.shape, generator=torch.Generator().manual_seed(seed)).to(out_ND.dtype)
        out_ND.backward(direction_ND)
        truth_ND.backward(direction_ND.double())
    for leaf, exact in zip(leaves, wide, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            # the loop over no tokens uses no weights
            gradient = torch.zeros_like(exact) if exact.grad is None else exact.grad
            assert relative_error(leaf.grad, gradient) <= max(5e-6, 2 * torch.finfo(leaf.dtype).eps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_may_be_mixed_and_the_output_has_that_of_x(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    exact = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=backend))
    stored = ExpertWeights(weights.w_in.bfloat16(), weights.w_out.half())
    mixed = experts(ExpertCall(x_ND, indices_NK, weights_NK.double(), stored, backend=backend))
    assert mixed.dtype == torch.float32
    assert 1e-5 < relative_error(mixed, exact) < 1e-2  # the weights were rounded, the arithmetic was not
    widened = ExpertWeights(*(matrix.double() for matrix in stored))
    assert relative_error(mixed, experts(ExpertCall(x_ND, indices_NK, weights_NK, widened, backend=backend))) < 1e-6
    double = with_gradients(
        lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m, backend=backend)), x_ND.double(), weights_NK, weights
    )
    assert [value.dtype for value in double.values()] == [torch.float64] * 2 + [torch.float32] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    layer = lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m, backend=backend))
    plain = with_gradients(layer, x_ND, weights_NK, weights)

    def under_autocast(x, w, m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x, w, m)

    assert_equal_bits(with_gradients(under_autocast, x_ND, weights_NK, weights), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = experts_traced(ExpertCall(x_ND, indices_NK, weights_NK, weights, backend=backend))
        if backend == "torch":  # the hand-written backward is as blind to autocast as the forward
            assert_equal_bits(with_gradients(layer, x_ND, weights_NK, weights), plain)
    assert torch.equal(trace.out_ND, plain["out"])
    if backend == "torch":
        moved = lambda: torch.func.jvp(lambda x: layer(x, weights_NK, weights), (x_ND,), (x_ND,))[1]
        slope = moved()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(moved(), slope)


def test_expert_weights_stay_float32_beside_half_precision_arithmetic():
    """What the torch backend does on devices whose arithmetic is bfloat16, asked of it directly."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=18)
    halves = [tensor.bfloat16().requires_grad_() for tensor in (x_ND, *weights)]
    leaf_NK = weights_NK.clone().requires_grad_()
    call = lambda x, w, w_in, w_out: ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), backend="torch")
    layer = lambda *inputs: run(call(*inputs), summed=True)[0]
    leaves = (halves[0], leaf_NK, *halves[1:])
    result = layer(*leaves)
    result.sum().backward()
    slot_NKD, _ = run(call(*leaves), summed=False)
    assert torch.equal(sum_slots(slot_NKD), result)
    values = tuple(leaf.detach() for leaf in leaves)
    _, slope = torch.func.jvp(layer, values, values)
    _, wide_slope = torch.func.jvp(layer, *[tuple(value.float() for value in values)] * 2)
    assert slope.dtype == torch.bfloat16
    assert relative_error(slope, wide_slope) < 0.02
    assert result.dtype == torch.bfloat16
    assert leaf_NK.grad.dtype == torch.float32
    full = experts(ExpertCall(x_ND, indices_NK, weights_NK, weights))
    assert relative_error(result, full) < 0.02
    assert all(half.grad.dtype == torch.bfloat16 and half.grad.isfinite().all() for half in halves)
