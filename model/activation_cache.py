"""transformer-lens's ActivationCache, addressed by step index or by (layer, visit)."""

from collections.abc import Mapping

from torch import Tensor
from transformer_lens import ActivationCache

from smelt_interp.errors import UserError
from smelt_interp.plan import Step
from smelt_interp.sites import SITES, nearest


class VisitCache(ActivationCache):
    """An ActivationCache whose layers are steps.

    `cache[suffix, s]` and `cache[suffix, (layer, visit)]` take any suffix of `smelt_interp.sites`; every name and
    method of transformer-lens works as well, with the step index in the place of the layer.
    """

    def __getitem__(self, key: str | tuple[object, ...]) -> Tensor:
        """The cached tensor. Raises `UserError`, with the nearest names, for one that is not in the cache."""
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and key[0] in SITES:
            name = f"blocks.{self._step_index(key[1])}.{key[0]}"
            return self._cached(name)
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], tuple):
            key = (key[0], self._step_index(key[1]))
        if isinstance(key, str) and key in self.cache_dict:
            return self._cached(key)
        try:
            value: Tensor = super().__getitem__(key)
        except (KeyError, TypeError, IndexError, AttributeError):
            # transformer-lens turns its shorthand into a name in several ways, each with an error of its own.
            name = key if isinstance(key, str) else ".".join(str(part) for part in key)
            return self._cached(name)
        return value

    def _step_index(self, step: object) -> int:
        steps = self.model.plan
        if isinstance(step, tuple):
            return int(self.model.step(*step))
        if not isinstance(step, int) or not -len(steps) <= step < len(steps):
            raise UserError(
                f"a step must be an index below {len(steps)} or a (layer, visit) of the plan; got {step!r}"
            )
        return step % len(steps)

    def _cached(self, name: str) -> Tensor:
        cached: Mapping[str, Tensor] = self.cache_dict
        if name not in cached:
            raise UserError(f"a cached name must be one that was recorded; got {name!r}{nearest(name, cached)}")
        return cached[name]


def check_step(steps: tuple[Step, ...], layer: int, visit: int) -> int:
    """The step index of a visit, or `UserError` that lists the visits the layer has."""
    try:
        return steps.index(Step(layer, visit))
    except ValueError:
        visits = [step.visit for step in steps if step.layer == layer]
        has = f"layer {layer} has visits {visits}" if visits else f"layers are 0 to {max(s.layer for s in steps)}"
        raise UserError(f"a (layer, visit) must be in the plan; got ({layer}, {visit}); {has}") from None
