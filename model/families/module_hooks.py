"""The hooks that are set, once, on the modules of a family's network: each sends a value through the running step.

They do nothing while no pass of ours runs, so the authors' network called by itself is the authors' network.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from model.families.family import Family
from model.families.norms import through
from model.families.run import RUNNING, FamilyRun
from model.families.torch_attention import reach_inside

Arguments = tuple[tuple[object, ...], dict[str, object]]


def install(family: Family, layer: int, module: nn.Module) -> None:
    """Set them on one layer's module, or on the copy of it that runs a later visit."""
    module.register_forward_pre_hook(partial(_enter, layer), with_kwargs=True)
    for suffix, path in family.projections.items():
        module.get_submodule(path).register_forward_hook(partial(_projected, suffix))
    if family.calls != "interface":
        reach_inside(module.get_submodule(family.attention), family.calls)
    for folder, path in (("ln1", family.first_norm), ("ln2", family.second_norm)):
        if path:
            module.get_submodule(path).register_forward_hook(partial(_normed, folder, family))
    if family.heads_apart:
        module.get_submodule(family.heads_out).register_forward_hook(_heads_joined)
    if family.attn_out:
        module.get_submodule(family.attn_out).register_forward_hook(_attention_update)
    if family.mlp_out:
        module.get_submodule(family.mlp_out).register_forward_hook(_mlp_update)
        if family.second_norm:
            module.get_submodule(family.second_norm).register_forward_pre_hook(_middle)
    if family.experts:
        module.get_submodule(family.experts).register_forward_hook(_experts_joined)
    if family.router:
        router = module.get_submodule(family.router)
        router.forward = partial(_routed, router.forward)  # logits are seen inside it
    if family.loopable:
        module.forward = partial(_unless_skipped, module.forward)
    module.register_forward_hook(_leave)


def _enter(layer: int, module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> Arguments | None:
    if (run := RUNNING.get()) is None:
        return None
    if args:
        return (run.enter(layer, module, _tensor(args[0])), *args[1:]), options
    return args, {**options, "hidden_states": run.enter(layer, module, _tensor(options["hidden_states"]))}


def _unless_skipped(forward: Callable[..., object], *args: object, **options: object) -> object:
    """A layer's forward pass; of one before the step at which the pass starts, the stream as it came."""
    if (run := RUNNING.get()) is None or not run.skips:
        return forward(*args, **options)
    return args[0] if args else options["hidden_states"]


def _leave(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    if (run := RUNNING.get()) is None or run.skips:
        return None
    post_BTD = run.through("hook_resid_post", _first(output))
    run.leave()
    return _with_first(output, post_BTD)


def _projected(suffix: str, module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor | None:
    if (run := RUNNING.get()) is None:
        return None
    heads = output.unflatten(-1, (-1, run.request.architecture.head_width))
    return run.through(suffix, heads).flatten(-2)


def _normed(folder: str, family: Family, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    if (run := RUNNING.get()) is None:
        return None
    return through(run.points(folder), module, family.norm, args[0], output)


def _heads_joined(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """The sum of the heads' results, where a pass asks for them: each has the loop factor inside, which the update gets
    when it leaves the attention."""
    if (run := RUNNING.get()) is None or not run.request.head_results:
        return None
    weight_ID = module.weight.T if isinstance(module, nn.Linear) else module.weight  # GPT-2's is turned
    weight_QCD = _tensor(weight_ID).unflatten(0, (-1, run.request.architecture.head_width))
    z_BTQC = args[0].unflatten(-1, weight_QCD.shape[:2])
    result_BTQD = run.through("attn.hook_result", torch.einsum("btqc,qcd->btqd", z_BTQC, weight_QCD * run.factor))
    update_BTD = result_BTQD.sum(2) / run.factor
    return update_BTD if module.bias is None else update_BTD + _tensor(module.bias)


def _attention_update(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    if (run := RUNNING.get()) is None:
        return None
    return _with_first(output, run.through("hook_attn_out", _scaled(run, _first(output))))


def _mlp_update(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    if (run := RUNNING.get()) is None:
        return None
    update_BTD = run.through("hook_mlp_out", _scaled(run, _first(output)))
    return _with_first(output, update_BTD if run.middle is None else update_BTD + run.middle)


def _middle(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The stream between the two updates. The layer has kept it for its sum already, so what a hook adds is added to
    the MLP's update as well; with gradients it is a zero whose gradient is the sum's."""
    if (run := RUNNING.get()) is None or not run.point("hook_resid_mid").is_hooked:
        return None
    mid_BTD = run.through("hook_resid_mid", args[0])
    run.middle = mid_BTD - args[0]
    return (mid_BTD, *args[1:])


class _Logits(TorchFunctionMode):
    """Sends the first linear map's output, a router's logits, through a hook point."""

    def __init__(self, through: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._through, self._seen = through, False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func is functional.linear and not self._seen:
            self._seen = True
            return self._through(_tensor(out))
        return out


def _routed(forward: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A router's own arithmetic with its logits, weights and choice through hook points. Edited experts keep the
    weights of those whose places they take."""
    if (run := RUNNING.get()) is None:
        return forward(x)
    batch = run.batch

    def through(suffix: str, x_NE: Tensor) -> Tensor:
        return run.through(f"mlp.hook_{suffix}", x_NE.unflatten(0, (batch, -1))).flatten(0, 1)

    with _Logits(partial(through, "router_logits")):
        logits_NE, weights_NK, experts_NK = forward(x)
    return logits_NE, through("expert_weights", weights_NK), through("expert_indices", experts_NK)


def _experts_joined(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """The sum of the chosen experts' results, where a pass asks for them: the authors' code once a slot, with the loop
    factor as in `_heads_joined`."""
    if (run := RUNNING.get()) is None or not run.request.expert_results:
        return None
    x_ND, slots = args[0], zip(*(x_NK.split(1, -1) for x_NK in args[1:]), strict=True)  # experts and weights, N by 1
    result_NKD = torch.stack([module.forward(x_ND, *slot) for slot in slots], 1) * run.factor
    result_BTKD = run.through("mlp.hook_expert_result", result_NKD.unflatten(0, (run.batch, -1)))
    return result_BTKD.sum(2).flatten(0, 1) / run.factor


def _scaled(run: FamilyRun, update_BTD: Tensor) -> Tensor:
    return update_BTD if run.factor == 1 else update_BTD * run.factor


def _tensor(value: object) -> Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _first(output: object) -> Tensor:
    return _tensor(output[0] if isinstance(output, tuple) else output)


def _with_first(output: object, first: Tensor) -> object:
    return (first, *output[1:]) if isinstance(output, tuple) else first
