"""The sites of a step: hook-name suffixes, the axes of what they hold, and when they are computed."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from smelt_interp.errors import UserError

Computed = Literal["always", "eager", "head_results", "expert_results"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One suffix of `blocks.{s}.`."""

    axes: str
    """One letter an axis, the legend of `smelt_interp.plan`; `1` is an axis of length one."""
    computed: Computed = "always"
    """`eager`: only on the eager attention path. `head_results`, `expert_results`: only when asked for."""
    integer: bool = False
    """Integer sites take no gradient."""


SITES: dict[str, Site] = {
    "hook_resid_pre": Site(axes="BTD"),
    "hook_resid_mid": Site(axes="BTD"),
    "hook_resid_post": Site(axes="BTD"),
    "hook_attn_out": Site(axes="BTD"),
    "hook_mlp_out": Site(axes="BTD"),
    "ln1.hook_scale": Site(axes="BT1"),
    "ln1.hook_normalized": Site(axes="BTD"),
    "ln2.hook_scale": Site(axes="BT1"),
    "ln2.hook_normalized": Site(axes="BTD"),
    "attn.hook_q": Site(axes="BTQC"),
    "attn.hook_k": Site(axes="BTGC"),
    "attn.hook_v": Site(axes="BTGC"),
    "attn.hook_rot_q": Site(axes="BTQC"),
    "attn.hook_rot_k": Site(axes="BTGC"),
    "attn.hook_attn_scores": Site(axes="BQTS", computed="eager"),
    "attn.hook_pattern": Site(axes="BQTS", computed="eager"),
    "attn.hook_z": Site(axes="BTQC"),
    "attn.hook_result": Site(axes="BTQD", computed="head_results"),
    "mlp.hook_router_logits": Site(axes="BTE"),
    "mlp.hook_expert_indices": Site(axes="BTK", integer=True),
    "mlp.hook_expert_weights": Site(axes="BTK"),
    "mlp.hook_expert_result": Site(axes="BTKD", computed="expert_results"),
}
"""Every site of a step, in the order in which a step computes them within each part."""

TOP_LEVEL_SITES: dict[str, Site] = {
    "hook_embed": Site(axes="BTD"),
    "ln_final.hook_scale": Site(axes="BT1"),
    "ln_final.hook_normalized": Site(axes="BTD"),
}
"""Hook names outside the steps."""


def hook_name(step: int, suffix: str) -> str:
    """The full hook name of a site at a step index, e.g. `blocks.3.attn.hook_pattern`."""
    return f"blocks.{step}.{check_suffix(suffix)}"


def site_of(name: str) -> Site:
    """The site that a full hook name stands for; the name must be one of a network's."""
    return TOP_LEVEL_SITES[name] if name in TOP_LEVEL_SITES else SITES[name.split(".", 2)[2]]


def check_suffix(suffix: str) -> str:
    """The suffix itself, or `UserError` with the nearest valid ones."""
    if suffix not in SITES:
        raise UserError(f"a site must be one of the hook suffixes of a step; got {suffix!r}{nearest(suffix, SITES)}")
    return suffix


def check_heads(suffixes: Iterable[str], *, by_head: bool) -> None:
    """Raise `UserError` for a suffix that is none, and `by_head` for a site without an axis of heads."""
    for suffix in suffixes:
        axes = SITES[check_suffix(suffix)].axes
        if by_head and not {*axes} & {*"QG"}:
            raise UserError(f"sites must have heads with --by head; got {suffix}: attn.hook_z has some")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: a, b` for the closest valid names, or the empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"; nearest: {', '.join(close)}" if close else ""
