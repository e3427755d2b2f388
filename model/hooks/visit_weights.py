"""Weights apart by visit: in a pass each step reads leaves of its own, so that a gradient can be asked for each."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from model.hooks.looped_model import LoopedModel

Leaves = dict[str, Tensor]
"""The weights of one step by their name in the layer; the memory is the network's own."""


@contextmanager
def weights_by_visit(network: LoopedModel) -> Iterator[list[Leaves]]:
    """A list that every pass in the block fills anew, in the order of its steps, whatever became of the pass before; a
    shared weight's gradient is the sum of those of its leaves. Weights outside the layers stay as they are.
    """
    with network.lock:
        found: list[Leaves] = []
        layers = network.layer_modules()
        own = {module: dict(module._parameters) for layer in layers for module in layer.modules()}
        handles = [network.register_forward_pre_hook(lambda *_: found.clear())]
        handles += [layer.register_forward_pre_hook(partial(_put_leaves, found)) for layer in layers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()
            for module, parameters in own.items():
                module._parameters.update(parameters)


def _put_leaves(found: list[Leaves], layer: nn.Module, args: tuple[object, ...]) -> None:
    """Before a step: new leaves in the places of its layer's parameters, as torch's own functional calls put them."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in layer.named_parameters()}
    for name, leaf in leaves.items():
        path, _, last = name.rpartition(".")
        layer.get_submodule(path)._parameters[last] = leaf  # type: ignore[assignment]  # a leaf, for this pass
    found.append(leaves)
