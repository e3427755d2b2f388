"""transformer-lens's ActivationCache, addressed by step index or by (layer, visit), and the hooks that fill one."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint

from model.hooks.names import Hook
from smelt_interp.errors import UserError
from smelt_interp.plan import Plan, step_index
from smelt_interp.sites import SITES, hook_name, nearest, site_of


class VisitCache(ActivationCache):
    """An ActivationCache whose layers are steps.

    `cache[suffix, s]` and `cache[suffix, (layer, visit)]` take any suffix of `smelt_interp.sites`; every name and
    method of transformer-lens works as well, with the step index in the place of the layer.
    """

    def __getitem__(self, key: str | tuple[object, ...]) -> Tensor:
        """The cached tensor. Raises `UserError`, with the nearest names, for one that is not in the cache."""
        if isinstance(key, str) and key in self.cache_dict:
            return self._cached(key)
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and key[0] in SITES:
            return self._cached(hook_name(self._step_index(key[1]), key[0]))
        if isinstance(key, tuple) and len(key) >= 2 and isinstance(key[1], (tuple, int)):
            key = (key[0], self._step_index(key[1]), *key[2:])
        try:
            value: Tensor = super().__getitem__(key)
        except KeyError as error:  # it names what transformer-lens's shorthand stands for
            return self._cached(str(error.args[0]))
        except (TypeError, IndexError, AttributeError):  # not even shorthand
            return self._cached(str(key))
        return value

    def apply_slice_to_batch_dim(self, batch_slice: object) -> "VisitCache":
        """transformer-lens's method, with visits kept."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return VisitCache(sliced.cache_dict, self.model, has_batch_dim=sliced.has_batch_dim)

    def _step_index(self, step: object) -> int:
        steps: Plan = self.model.plan
        if isinstance(step, tuple) and len(step) == 2:
            return step_index(steps, *step)
        if not isinstance(step, int) or not -len(steps) <= step < len(steps):
            raise UserError(f"a step must be an index below {len(steps)} or a (layer, visit) of the plan; got {step!r}")
        return step % len(steps)

    def _cached(self, name: str) -> Tensor:
        cached: Mapping[str, Tensor] = self.cache_dict
        if name not in cached:
            raise UserError(f"a cached name must be one that was recorded; got {name!r}{nearest(name, cached)}")
        return cached[name]


def caching_hooks(
    cache: dict[str, Tensor],
    names: Iterable[str],
    *,
    incl_bwd: bool,
    device: torch.device | str | None,
    remove_batch_dim: bool,
) -> tuple[list[Hook], list[Hook]]:
    """Forward and backward hooks that write copies into `cache`: `NAME`, and `NAME_grad` with `incl_bwd`."""

    def keep(x: Tensor, hook: HookPoint, suffix: str) -> None:
        copy = x.detach().clone() if device is None else x.detach().to(device, copy=True)
        cache[f"{hook.name}{suffix}"] = copy[0] if remove_batch_dim else copy

    names = list(names)
    differentiable = [name for name in names if not site_of(name).integer] if incl_bwd else []
    return (
        [(name, partial(keep, suffix="")) for name in names],
        [(name, partial(keep, suffix="_grad")) for name in differentiable],
    )
