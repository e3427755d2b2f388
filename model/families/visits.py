"""Later visits of a layer in a network whose code knows no loops: modules of their own that share the weights."""

import copy

from torch import nn

from smelt_interp.plan import Plan


def run_again(layers: nn.ModuleList, plan: Plan) -> None:
    """Make a network's list of layers, which its code walks once, the steps of a plan: the layer itself at its first
    visit, a twin at each later one. A layer's index, by which it finds its keys and values, is its step's."""
    physical = list(layers)
    steps = [physical[layer] if visit == 0 else twin(physical[layer]) for layer, visit in plan]
    for index, step in enumerate(steps):
        for module in step.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", index)  # noqa: B010  # an attribute that only theirs have
    del layers[:]
    layers.extend(steps)


def twin(module: nn.Module) -> nn.Module:
    """A copy of the tree of modules with the same parameters and buffers, and hooks of its own."""
    other = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # parameters, buffers, hooks: the same things in a dictionary of its own
            other.__dict__[name] = value.copy()
    other._modules = {name: None if child is None else twin(child) for name, child in module._modules.items()}
    return other
