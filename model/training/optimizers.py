"""AdamW, or Muon on matrices and AdamW on the rest, with their state as named tensors that are there from the start.

torch's Muon takes matrices alone, and the experts of a layer are one tensor: each expert's matrix is given to it as a
parameter of its own that shares the tensor's memory.
"""

import torch
from torch import Tensor, nn

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
        self._parts = [(named[name], _matrices(named[name])) for name in named if name in by_muon]
        self.adamw = torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS)
        self._all: list[torch.optim.Optimizer] = [self.adamw]
        self._state: dict[str, Tensor] = {}
        for name, weight in rest.items():
            step = torch.zeros((), dtype=torch.float32)
            self._keep(self.adamw, name, weight, {"step": step, "exp_avg": None, "exp_avg_sq": None})
        if by_muon:
            matrices = [matrix for _, parts in self._parts for matrix in parts]
            muon = torch.optim.Muon(
                matrices, lr=options.learning_rate, momentum=MOMENTUM, weight_decay=options.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
            self._all.append(muon)
            for name, (_, parts) in zip((name for name in named if name in by_muon), self._parts, strict=True):
                for index, matrix in enumerate(parts):
                    self._keep(muon, f"{name}.{index}", matrix, {"momentum_buffer": None})

    def _keep(
        self, optimizer: torch.optim.Optimizer, name: str, weight: Tensor, state: dict[str, Tensor | None]
    ) -> None:
        """Begin with the zeros that the optimiser would make at its first step."""
        made = {key: torch.zeros_like(weight) if value is None else value for key, value in state.items()}
        optimizer.state[weight] = made
        self._state |= {f"{key}/{name}": value.detach() for key, value in made.items()}

    def step(self, learning_rate: float) -> None:
        """One update of every weight; gradients are let go."""
        for whole, parts in self._parts:
            if whole.grad is not None:
                for part, grad in zip(parts, whole.grad.reshape(-1, *whole.shape[-2:]), strict=True):
                    part.grad = grad
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        for whole, _ in self._parts:
            whole.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything that they remember, as tensors in place: what is copied into them is remembered instead."""
        return self._state


def _is_inner_matrix(name: str, weight: Tensor) -> bool:
    """Matrices between one state of the stream and another; the embeddings and the router choose from lists."""
    return weight.ndim >= 2 and name.startswith("layers.") and not name.endswith("router.weight")


def _matrices(weight: nn.Parameter) -> list[nn.Parameter]:
    """The matrices of a weight as parameters that share its memory."""
    return [nn.Parameter(matrix) for matrix in weight.detach().reshape(-1, *weight.shape[-2:])]
