"""Numbers are checked where they arise: a NaN is told at the site that has it, not read as an answer further on."""

import torch
from torch import Tensor

from smelt_interp.errors import UserError

INFINITY = float("inf")
MASKED = "hook_attn_scores"
"""The site that is minus infinity where a query may not look."""


def check_finite(site: str, x: Tensor, *, wait: bool = True) -> None:
    """Raise `UserError`, naming the site, when a value is NaN or infinite; scores of masked keys may be.

    With `wait=False` on a GPU it is asserted where the values lie, since to look at them is to wait for everything that
    the GPU still has to do; so it is inside a traced graph.
    """
    if not x.is_floating_point() or x.numel() == 0:
        return
    masked = site.endswith(MASKED)
    low, high = x.detach().aminmax()  # NaN wins both, and is neither below nor above anything
    if torch.compiler.is_compiling() or (x.is_cuda and not wait):
        holds = high < INFINITY if masked else (high < INFINITY) & (low > -INFINITY)
        torch._assert_async(holds, f"{site} must be finite")
    elif not (float(high) < INFINITY and (masked or float(low) > -INFINITY)):
        allowed = torch.isfinite(x) | (x == -INFINITY) if masked else torch.isfinite(x)
        index = tuple((~allowed).nonzero()[0].tolist())
        raise UserError(
            f"{site} must be finite; got {x[index].item()} at index {index}; look for an overflow or a NaN in the "
            "weights, inputs and edits before it"
        )
