"""AdamW, or Muon on matrices and AdamW on the rest, with their state as named tensors that are there from the start.

torch's Muon takes whole matrices alone, and the experts of a layer are one tensor: each expert's matrix is given to it
as a parameter of its own. Of a weight that is divided over ranks, each rank steps whole experts, or all of a matrix.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from model.training.options import TrainOptions

BETAS = (0.9, 0.95)
MOMENTUM = 0.95


class Optimizers:
    """Takes the steps of a network."""

    def __init__(self, network: nn.Module, options: TrainOptions) -> None:
        named = dict(network.named_parameters())
        by_muon = {name for name in named if options.optimizer == "muon" and _is_inner_matrix(name, named[name])}
        rest = {name: weight for name, weight in named.items() if name not in by_muon}
        decayed = [weight for weight in rest.values() if weight.ndim >= 2]
        gains = [weight for weight in rest.values() if weight.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ]
        self._weight_decay = options.weight_decay
        self.adamw = torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS)
        self._state: dict[str, Tensor] = {}
        # The zeros that AdamW would make at its first step, and Muon's momentum, in whole matrices.
        for name, weight in rest.items():
            made = {"step": torch.zeros((), dtype=torch.float32)}
            made |= {key: torch.zeros_like(weight).detach() for key in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[weight] = made
            self._state |= {f"{key}/{name}": value for key, value in made.items()}
        self._by_muon: list[tuple[Tensor, Tensor]] = []
        for name in sorted(by_muon):
            momentum = _in_whole_matrices(torch.zeros_like(named[name]))
            self._by_muon.append((named[name], momentum))
            self._state[f"momentum_buffer/{name}"] = momentum

    def step(self, learning_rate: float) -> None:
        """One update of every weight; gradients are let go."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad()
        for weight, momentum in self._by_muon:
            if weight.grad is not None:
                self._step_by_muon(weight, momentum, learning_rate)
            weight.grad = None

    @torch.no_grad()
    def _step_by_muon(self, weight: Tensor, momentum: Tensor, learning_rate: float) -> None:
        assert weight.grad is not None
        whole, grads = (_in_whole_matrices(each) for each in (weight, weight.grad))
        matrices = [nn.Parameter(matrix) for matrix in _own_matrices(whole)]
        if matrices:  # of few experts a rank may have none
            muon = torch.optim.Muon(
                matrices, lr=learning_rate, momentum=MOMENTUM, weight_decay=self._weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
            for matrix, grad, before in zip(matrices, _own_matrices(grads), _own_matrices(momentum), strict=True):
                matrix.grad, muon.state[matrix] = grad, {"momentum_buffer": before}
            muon.step()
        if isinstance(weight, DTensor) and isinstance(whole, DTensor) and whole.placements != weight.placements:
            weight.copy_(whole.redistribute(placements=weight.placements))

    def state(self) -> dict[str, Tensor]:
        """Everything that they remember, as tensors in place: what is copied into them is remembered instead."""
        return self._state


def _is_inner_matrix(name: str, weight: Tensor) -> bool:
    """Matrices between one state of the stream and another; the embeddings and the router choose from lists."""
    return weight.ndim >= 2 and name.startswith("layers.") and not name.endswith("router.weight")


def _in_whole_matrices(weight: Tensor) -> Tensor:
    """A weight over ranks that have whole matrices: each some of a list of them, all the same one.

    It shares the memory of a weight that is so already; all ranks must ask.
    """
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight
    placement: Placement = Shard(0) if weight.ndim > 2 else Replicate()
    return weight.redistribute(placements=[placement] * weight.device_mesh.ndim)


def _own_matrices(weight: Tensor) -> tuple[Tensor, ...]:
    """The matrices of this rank, in place."""
    own: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return own.reshape(-1, *own.shape[-2:]).unbind()
