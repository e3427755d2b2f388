"""A hook point that lets an edit through only when it is what the site holds."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

from smelt_interp.errors import UserError

TorchHook = Callable[..., object]
"""What torch registers: called with the module and what it saw, last the output or the gradients."""


class SitePoint(HookPoint):
    """transformer-lens's HookPoint, with one rule for what any hook returns, forward or backward, whoever set it:
    None, or a tensor of the site's shape, type and device. Anything else raises `UserError`: torch would broadcast it
    or cast it without a word."""

    def register_forward_hook(self, hook: TorchHook, **options: bool) -> RemovableHandle:
        """torch's method; the rule is about the output."""
        handle: RemovableHandle = super().register_forward_hook(partial(_checked, hook, "", -1), **options)
        return handle

    def register_forward_pre_hook(self, hook: TorchHook, **options: bool) -> RemovableHandle:
        """torch's method; the rule is about the input."""
        handle: RemovableHandle = super().register_forward_pre_hook(partial(_checked, hook, "", 0), **options)
        return handle

    def register_full_backward_hook(self, hook: TorchHook, **options: bool) -> RemovableHandle:
        """torch's method; the rule is about the gradient."""
        handle: RemovableHandle = super().register_full_backward_hook(
            partial(_checked, hook, "backward ", 0), **options
        )
        return handle

    def register_full_backward_pre_hook(self, hook: TorchHook, **options: bool) -> RemovableHandle:
        """torch's method; the rule is about the gradient."""
        handle: RemovableHandle = super().register_full_backward_pre_hook(
            partial(_checked, hook, "backward ", 0), **options
        )
        return handle

    @property
    def is_hooked(self) -> bool:
        """Whether anything is set here, by transformer-lens's methods or by torch's."""
        return bool(self._forward_hooks or self._backward_hooks or self._forward_pre_hooks or self._backward_pre_hooks)


def _checked(hook: TorchHook, direction: str, seen: int, point: SitePoint, *values: object) -> object:
    """Call the hook and compare what it returns with what it saw at position `seen`."""
    changed = hook(point, *values)
    if changed is not None:
        held = values[seen]
        wanted = held if isinstance(held, tuple) else (held,)  # torch wraps gradients and inputs
        given = changed if isinstance(changed, tuple) and isinstance(held, tuple) else (changed,)
        if len(given) != len(wanted) or not all(map(_alike, given, wanted)):
            raise UserError(
                f"a {direction}hook on {point.name!r} must return None or what its site holds, {_said(wanted[0])}; "
                f"got {_said(changed if len(given) != len(wanted) else given[0])}"
            )
    return changed


def _alike(given: object, wanted: object) -> bool:
    """Whether a hook's value can take the place of what it saw; what is no tensor (no gradient) may be anything."""
    return not isinstance(wanted, Tensor) or (isinstance(given, Tensor) and _kind(given) == _kind(wanted))


def _kind(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def _said(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
