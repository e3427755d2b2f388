"""What a hook returns is of its site's shape and type, or refused in one line, and no hook stays behind."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.network import LoopedMoE
from tests.campaigns.campaign import Case, pick, tried
from tests.support.networks import random_tokens, tiny_network

Return = Callable[[Tensor], object]

LAID_OUT = "a copy laid out otherwise"
RETURNS: dict[str, Return] = {
    "nothing": lambda x: None,
    "itself": lambda x: x,
    "a copy": lambda x: x.clone(),
    LAID_OUT: lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "one position": lambda x: x[:, :1],
    "one sample": lambda x: x[:1],
    "one channel": lambda x: x[..., :1],
    "one axis more": lambda x: x[None],
    "one axis less": lambda x: x[0],
    "no axis": lambda x: x.flatten()[0],
    "nothing in it": lambda x: x[:0],
    "axes exchanged": lambda x: x.transpose(0, 1),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "complex": lambda x: x.to(torch.complex64),
    "truth values": lambda x: x > 0,
    "without storage": lambda x: x.to("meta"),
    "an array": lambda x: x.detach().numpy(),
    "a list": lambda x: x.tolist(),
    "a number": lambda x: 0.0,
    "a pair": lambda x: (x, x),
    "text": lambda x: "x",
    "a class": lambda x: Tensor,
}


def campaign(folder: Path) -> Case:
    """A tiny network, every hook point of it, forward and backward."""
    network, tokens_BT = tiny_network(), random_tokens()
    unhooked = logits(network, tokens_BT)

    def case(random: np.random.Generator) -> str:
        name, kind = pick(random, sorted(network.hook_dict)), pick(random, sorted(RETURNS))
        direction = "backward" if random.random() < 0.25 else "forward"
        alike: list[bool] = []

        def hook(x: Tensor, hook: object) -> object:
            given = RETURNS[kind](x)
            alike.append(given is None or (isinstance(given, Tensor) and is_alike(given, x)))
            return given

        hooks = {"bwd_hooks" if direction == "backward" else "fwd_hooks": [(name, hook)]}
        found = tried(lambda: logits(network, tokens_BT, **hooks))
        where = f"{kind} at {name}, {direction},"
        if not all(alike):
            assert found is None, f"{where} is let through"
        elif alike or found is not None:
            assert found is not None, f"{where} is refused"
            rounding = 1e-5 if kind == LAID_OUT else 0  # a sum over other strides is taken in another order
            assert torch.allclose(found, unhooked, rtol=0, atol=rounding), f"{where} changes the logits"
        assert network.hooked() == []
        assert torch.equal(logits(network, tokens_BT), unhooked), f"{where} stays"
        return f"{direction}: " + ("refused" if found is None else "let through" if alike else "not called")

    return case


def is_alike(given: Tensor, x: Tensor) -> bool:
    return (given.shape, given.dtype, given.device) == (x.shape, x.dtype, x.device) and torch.equal(given, x)


def logits(network: LoopedMoE, tokens_BT: Tensor, **hooks: list[object]) -> Tensor:
    """The logits, with every site computed; with backward hooks, a backward pass besides."""
    with network.hooks(**hooks), torch.set_grad_enabled("bwd_hooks" in hooks):
        out_BTW = network(tokens_BT, attention="eager", head_results=True, expert_results=True)
        if out_BTW.requires_grad:
            out_BTW.sum().backward()
    network.zero_grad()
    return out_BTW.detach()
