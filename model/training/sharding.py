"""A network divided over ranks: layers by FSDP2, experts on a mesh dimension of their own, and what is read off it.

Every rank reads its own rows. Gradients are sums over ranks, as those of the parts of a step are, so the loss of a
rank is its share of the step's.

    expert_parallel = N: ranks r N .. r N + N - 1 hold each expert once, and the tokens of these ranks go to them; of
    the copies of an expert, W / N on W ranks, each rank keeps a part of every matrix's rows.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from model.layer import Layer, MixtureOfExperts
from model.network import LoopedMoE
from model.ranks import is_first_rank, num_ranks, total
from model.training.options import TrainOptions
from smelt_interp.config import ModelConfig
from smelt_interp.errors import UserError


def check_ranks(config: ModelConfig, options: TrainOptions) -> None:
    """Raise `UserError` unless these ranks can share the rows of a step, and the experts."""
    size, rows, expert_parallel = num_ranks(), options.rows_a_step // options.accumulate, options.expert_parallel
    if size > rows:
        raise UserError(
            f"ranks must be at most {rows}, the rows of a part of a step, so that each reads one; got {size}: give "
            "more rows, or a smaller --accumulate"
        )
    if size % expert_parallel or config.num_experts % expert_parallel:
        raise UserError(
            f"--expert-parallel must divide the {size} ranks and the {config.num_experts} experts; got "
            f"{expert_parallel}"
        )
    copies = size // expert_parallel
    if expert_parallel > 1 and (config.width % copies or config.expert_width % copies):
        raise UserError(
            f"ranks / --expert-parallel must divide the width {config.width} and the experts' {config.expert_width}; "
            f"got {size} / {expert_parallel}: give another --expert-parallel"
        )


def shard(network: LoopedMoE, device: str, expert_parallel: int) -> None:
    """Leave each rank its part of every weight, on the device; a process alone keeps all."""
    size, kind = num_ranks(), torch.device(device).type
    if size == 1:
        network.to(device)
        return
    everyone = init_device_mesh(kind, (size,), mesh_dim_names=("ranks",))
    by_expert = init_device_mesh(kind, (size // expert_parallel, expert_parallel), mesh_dim_names=("copies", "experts"))
    for layer in network.layers:
        assert isinstance(layer, Layer)  # it holds nothing else
        if expert_parallel > 1:
            # The router stays with the other weights, though it is a part of the module whose experts are divided.
            _summed(fully_shard(layer.mlp.router, mesh=everyone))
            _divide_experts(layer.mlp, by_expert["experts"])
            _summed(fully_shard(layer.mlp, mesh=by_expert["copies"], shard_placement_fn=lambda _: Shard(1)))
        _summed(fully_shard(layer, mesh=everyone))
    _summed(fully_shard(network, mesh=everyone))
    register_fsdp_forward_method(network, "loss")


def _summed(module: FSDPModule) -> None:
    """Add gradients up over ranks; torch's mean would be over another number of ranks for experts than for the rest."""
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def _divide_experts(experts: MixtureOfExperts, mesh: DeviceMesh) -> None:
    """Leave this rank its own experts. Every rank has drawn the same weights, so none is sent."""
    for name in ("w_in", "w_out"):
        weight = getattr(experts, name).detach().to(mesh.device_type)
        setattr(experts, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)))


def clip(network: nn.Module, most: float) -> float:
    """Scale the gradient so that its norm, over all ranks, is `most` at most. -> the norm before"""
    grads = [_own(weight.grad) for weight in network.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if num_ranks() > 1:
        norm = total(norm.square()).sqrt()
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return float(norm)


def _own(x: Tensor) -> Tensor:
    """This rank's part of a tensor, in place."""
    own: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return own


@torch.no_grad()
def round_weights(network: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights to what `dtype` can hold."""
    for weight in network.parameters():
        _own(weight).copy_(_own(weight).to(dtype))


def whole_weights(network: nn.Module) -> dict[str, Tensor]:
    """Every weight in one piece, on the CPU of the first rank; all ranks must ask."""
    weights = {}
    for name, weight in network.named_parameters():
        found = weight.detach()
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if is_first_rank():
            weights[name] = whole.cpu()
    return weights
