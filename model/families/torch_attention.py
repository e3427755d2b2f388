"""The attention of networks that call torch's own functions: what these functions get and give goes through the running
step's points.

`fused` calls `scaled_dot_product_attention`, whose arithmetic `model.families.attention` does instead. `softmax` calls
`softmax` on masked scores, then multiplies its output with the values: queries and keys are never seen apart.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from model.families.attention import attend, limited
from model.families.run import RUNNING, FamilyRun
from smelt_interp.errors import UserError

Function = Callable[..., object]


def reach_inside(attention: nn.Module, calls: str) -> None:
    """Make a module's forward pass tell the running step what its attention computes."""
    attention.forward = partial(_attended, attention, attention.forward, calls)


def _attended(module: nn.Module, forward: Function, calls: str, *args: object, **options: object) -> object:
    run = RUNNING.get()
    if run is None or not run.attends(module):
        return forward(*args, **options)
    with (inside := _Fused(module) if calls == "fused" else _Softmax(run)):
        out = forward(*args, **options)
    if not inside.reached:
        raise UserError(f"attention of family {run.request.architecture.family} must call torch's {calls} function; "
                        "it did not, so its patterns cannot be seen")  # fmt: skip
    return out


class _Fused(TorchFunctionMode):
    """In place of the fused function, ours."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._attend: Callable[..., Tensor] = partial(_attend, module)
        self.reached = False

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.reached = True
        return self._attend(*args, **(kwargs or {}))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Means of values (B, Q, T, C); parameters are those of torch's function."""
    if is_causal:
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, least)
    z_BTQC, _ = attend(module, query, key, value, attn_mask, scale, dropout_p)
    return z_BTQC.transpose(1, 2)


class _Softmax(TorchFunctionMode):
    """Scores before the softmax, its pattern behind it, and the product of that pattern with the values."""

    def __init__(self, run: FamilyRun) -> None:
        super().__init__()
        self._run, self.reached = run, False
        self._pattern: object = None

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func in (functional.softmax, torch.softmax, torch.Tensor.softmax):
            self.reached = True
            softmax: Callable[..., Tensor] = partial(self._softmax, func)
            self._pattern = softmax(*args, **(kwargs or {}))
            return self._pattern
        out = func(*args, **(kwargs or {}))
        if func is functional.dropout and args[0] is self._pattern:
            self._pattern = out
        elif func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and args[0] is self._pattern:
            assert isinstance(out, torch.Tensor)
            return self._run.heads_through("attn.hook_z", out)
        return out

    def _softmax(self, func: Function, scores_BQTS: Tensor, *args: object, **options: object) -> Tensor:
        allowed_BQTS = limited(self._run, scores_BQTS > torch.finfo(scores_BQTS.dtype).min / 2)
        scores_BQTS = scores_BQTS.masked_fill(~allowed_BQTS, float("-inf"))
        eager = self._run.request.attention == "eager"
        if eager:
            scores_BQTS = self._run.through("attn.hook_attn_scores", scores_BQTS)
        pattern_BQTS = func(scores_BQTS, *args, **options)
        assert isinstance(pattern_BQTS, torch.Tensor)
        return self._run.through("attn.hook_pattern", pattern_BQTS) if eager else pattern_BQTS
