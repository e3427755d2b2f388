"""The expert layer's derivatives: exact, present for whatever is not frozen, and kept by compilers and copies."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model.experts.call import ExpertCall, ExpertWeights
from model.experts.expert_layer import experts, experts_traced
from smelt_interp.errors import UserError
from tests.support.experts_oracle import (
    assert_close,
    assert_equal_bits,
    layer_inputs,
    load_forward_mode,
    with_gradients,
)

BACKENDS = ("reference", "torch", "auto")


@pytest.fixture(scope="module", autouse=True)
def _forward_mode_is_loaded():
    load_forward_mode()


def double_inputs(gated: bool = True):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(
        tokens=4, width=3, num_experts=4, expert_width=2, dtype=torch.float64, gated=gated
    )
    indices_NK[indices_NK == 3] = 0  # expert 3 is idle, and some token may have expert 0 twice
    return indices_NK, [tensor.requires_grad_() for tensor in (x_ND, weights_NK, *weights)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reverse_and_forward_derivatives_equal_finite_differences(backend, gated):
    indices_NK, leaves = double_inputs(gated)

    def summed(x, w, w_in, w_out):
        return experts(ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), gated=gated, backend=backend))

    def slots(x, w, w_in, w_out):
        weights = ExpertWeights(w_in, w_out)
        return experts_traced(ExpertCall(x, indices_NK, w, weights, gated=gated, backend=backend)).slot_NKD

    assert torch.autograd.gradcheck(summed, leaves, check_forward_ad=True)
    assert torch.autograd.gradcheck(slots, leaves, check_forward_ad=True, fast_mode=True)


def test_function_transforms_see_the_same_derivatives():
    indices_NK, leaves = double_inputs()
    leaves = [leaf.detach() for leaf in leaves]

    def loss(*inputs, backend="torch"):
        call = ExpertCall(inputs[0], indices_NK, inputs[1], ExpertWeights(*inputs[2:]), backend=backend)
        return experts(call).square().sum()

    ours = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*leaves)
    loop = torch.func.grad(lambda *inputs: loss(*inputs, backend="reference"), argnums=(0, 1, 2, 3))(*leaves)
    for value, truth in zip(ours, loop, strict=True):
        torch.testing.assert_close(value, truth)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    _, slope = torch.func.jvp(loss, tuple(leaves), tangents)
    inner = sum((value * tangent).sum() for value, tangent in zip(ours, tangents, strict=True))
    torch.testing.assert_close(slope, inner)


def test_second_derivatives_are_the_references_alone():
    indices_NK, leaves = double_inputs()
    layer = lambda x, w, w_in, w_out: experts(
        ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), backend="reference")
    )
    assert torch.autograd.gradgradcheck(layer, leaves)
    call = ExpertCall(leaves[0], indices_NK, leaves[1], ExpertWeights(*leaves[2:]), backend="torch")
    out = experts(call).square().sum()
    (gradient,) = torch.autograd.grad(out, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=4)))
def test_what_is_frozen_costs_the_rest_nothing(needed, gated):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=17, gated=gated)
    layer = lambda x, w, m: experts(ExpertCall(x, indices_NK, w, m, gated=gated))
    full = with_gradients(layer, x_ND, weights_NK, weights)
    tensors = (x_ND, weights_NK, *weights)
    leaves = [tensor.clone().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
    out_ND = layer(leaves[0], leaves[1], ExpertWeights(*leaves[2:]))
    assert torch.equal(out_ND, full["out"])
    assert out_ND.requires_grad == any(needed)
    if any(needed):
        direction = torch.randn(out_ND.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out_ND * direction.float()).sum().backward()
    for leaf, need, truth in zip(leaves, needed, list(full.values())[1:], strict=True):
        assert (leaf.grad is None) == (not need)
        assert not need or torch.equal(leaf.grad, truth)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_reach_low_rank_updates_of_frozen_weights(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=17)
    w_in, w_out = weights
    down, up = torch.randn(5, 2, 24).requires_grad_(), torch.zeros(5, 40, 2).requires_grad_()
    out_ND = experts(ExpertCall(x_ND, indices_NK, weights_NK, ExpertWeights(w_in + up @ down, w_out), backend=backend))
    out_ND.square().sum().backward()
    assert up.grad.abs().amax((1, 2)).min() > 0
    assert torch.count_nonzero(down.grad) == 0  # the other factor is zero
    assert w_in.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_parameter_moves_in_a_step_of_training(backend):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=40)
    parameters = [nn.Parameter(tensor.clone()) for tensor in (weights_NK, *weights)]
    optimiser = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        out_ND = experts(ExpertCall(x_ND, indices_NK, parameters[0], ExpertWeights(*parameters[1:]), backend=backend))
        loss = out_ND.square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    for parameter, start in zip(parameters, (weights_NK, *weights), strict=True):
        assert (parameter != start).any()


def test_what_vmap_batches_is_left_to_the_reference():
    indices_NK, leaves = double_inputs()
    x_ND, weights_NK, w_in, w_out = (leaf.detach() for leaf in leaves)

    def layer(x, backend):
        return experts(ExpertCall(x, indices_NK, weights_NK, ExpertWeights(w_in, w_out), backend=backend))

    for transform, given in ((torch.func.vmap, torch.stack([x_ND, 2 * x_ND])), (torch.func.jacrev, x_ND)):
        with pytest.raises(UserError, match="vmap and jacrev must use the reference backend"):
            transform(lambda x: layer(x, "torch"))(given)
    one_by_one = torch.autograd.functional.jacobian(lambda x: layer(x, "torch"), x_ND)
    for transform, backend in ((torch.func.jacfwd, "reference"), (torch.func.jacrev, "reference"),
                               (torch.func.jacfwd, "torch")):  # fmt: skip
        torch.testing.assert_close(transform(lambda x, b=backend: layer(x, b))(x_ND), one_by_one)


@pytest.mark.parametrize("summand", ["sum", "stride 0", "one row"])
def test_gradients_of_any_layout_are_taken(summand):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=9)
    layer = lambda x: experts(ExpertCall(x, indices_NK, weights_NK, weights))
    gradient = {"sum": torch.ones(()).expand(9, 24), "stride 0": torch.randn(24).expand(9, 24),
                "one row": torch.randn(9, 1).expand(9, 24)}[summand]  # fmt: skip
    strided, dense = (
        torch.autograd.grad(layer(leaf), leaf, each)[0]
        for leaf, each in (
            (x_ND.clone().requires_grad_(), gradient),
            (x_ND.clone().requires_grad_(), gradient.contiguous()),
        )
    )
    assert torch.equal(strided, dense)


@pytest.mark.parametrize("traced", [False, True])
def test_a_compiler_takes_the_layer_as_one_graph(traced):
    """`aot_eager` traces forward and backward as every compiler does, and runs the graph as it is. Compiled, `auto` is
    torch whatever the size."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=33)

    def layer(x, w, w_in, w_out, backend="torch"):
        if traced:
            return experts_traced(ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), backend=backend)).out_ND
        return experts(ExpertCall(x, indices_NK, w, ExpertWeights(w_in, w_out), backend=backend))

    torch.compiler.reset()
    compiled = torch.compile(lambda *given: layer(*given, backend="auto"), fullgraph=True, backend="aot_eager")
    eager = with_gradients(lambda x, w, m: layer(x, w, *m), x_ND, weights_NK, weights)
    assert_equal_bits(with_gradients(lambda x, w, m: compiled(x, w, *m), x_ND, weights_NK, weights), eager)
    with torch.no_grad():
        assert torch.equal(compiled(x_ND, weights_NK, *weights), eager["out"])
    frozen = [tensor.clone() for tensor in (x_ND, weights_NK, *weights)]
    frozen[0].requires_grad_()
    compiled(*frozen).sum().backward()
    layer(leaf := x_ND.clone().requires_grad_(), *frozen[1:]).sum().backward()
    assert torch.equal(frozen[0].grad, leaf.grad)


def test_the_operators_keep_their_promises_to_compilers():
    """PyTorch's own checks: schema, fake shapes and strides, autograd registration, dispatch under AOT."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=5)
    leaves = [tensor.mT.contiguous().mT.requires_grad_() for tensor in (x_ND, weights_NK, *weights)]
    for keep in (True, False):
        inputs = (*(leaves if keep else [leaf.detach() for leaf in leaves]), indices_NK)
        torch.library.opcheck(torch.ops.smelt.experts, (*inputs, True, "torch", True, keep))
    values = [*(leaf.detach() for leaf in leaves), indices_NK]
    result_ND, *kept = torch.ops.smelt.experts(*values, True, "torch", True, True)
    torch.library.opcheck(
        torch.ops.smelt.experts_backward, (result_ND, [*values, *kept], True, "torch", True, [True] * 4),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer_takes_other_numbers_of_tokens(dynamic):
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=9)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, i, w, w_in, w_out: experts(ExpertCall(x, i, w, ExpertWeights(w_in, w_out))),
        fullgraph=True, backend="aot_eager", dynamic=dynamic,
    )  # fmt: skip
    for tokens in (9, 4, 1, 0):
        indices = indices_NK[:tokens]
        given = (x_ND[:tokens], weights_NK[:tokens], weights)
        ours = with_gradients(lambda x, w, m, i=indices: compiled(x, i, w, *m), *given)
        eager = lambda x, w, m, i=indices: experts(ExpertCall(x, i, w, m, backend="torch"))
        assert_equal_bits(ours, with_gradients(eager, *given))


class _Layer(nn.Module):
    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(weights.w_in), nn.Parameter(weights.w_out)

    def forward(self, x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor) -> Tensor:
        return experts(ExpertCall(x_ND, indices_NK, weights_NK, ExpertWeights(self.w_in, self.w_out)))


def test_a_used_module_can_be_copied_and_pickled():
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=5)
    module = _Layer(weights)
    out_ND = module(x_ND, indices_NK, weights_NK)
    out_ND.sum().backward()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x_ND, indices_NK, weights_NK), out_ND)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    assert set(module.state_dict()) == {"w_in", "w_out"}


class _TwoVisits(nn.Module):
    """One layer, run twice on the residual stream."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.layer = _Layer(ExpertWeights(*(matrix.clone() for matrix in weights)))

    def forward(self, x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor) -> Tensor:
        for _ in range(2):
            x_ND = x_ND + self.layer(x_ND, indices_NK, weights_NK)
        return x_ND


def test_sharded_training_has_the_gradients_of_both_visits():
    """`fully_shard` hands the layer plain tensors that it gathered, in a world of one process."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=9)
    plain, sharded = _TwoVisits(weights), _TwoVisits(weights)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded.layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for module in (plain, sharded):
            module(x_ND, indices_NK, weights_NK).square().sum().backward()
        for name in ("w_in", "w_out"):
            gradient = getattr(sharded.layer, name).grad.full_tensor()
            assert torch.equal(gradient, getattr(plain.layer, name).grad)
    finally:
        distributed.destroy_process_group()


def test_uninitialised_memory_is_never_read():
    """Every buffer that PyTorch hands out is filled with NaN; two steps of training equal those without."""
    x_ND, indices_NK, weights_NK, weights = layer_inputs(tokens=19, num_experts=11)

    def two_steps() -> dict[str, Tensor]:
        parameters = [nn.Parameter(matrix.clone()) for matrix in weights]
        for _ in range(2):
            out_ND = experts(ExpertCall(x_ND, indices_NK, weights_NK, ExpertWeights(*parameters)))
            gradients = torch.autograd.grad(out_ND.square().sum(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.data -= 0.01 * gradient
        return {"out": out_ND.detach(), "w_in": parameters[0], "w_out": parameters[1]}

    clean = two_steps()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        poisoned = two_steps()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(poisoned, clean, 0.0)
