"""The network of a batch run with other numbers of visits, or another loop factor, for probes that compare those."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from smelt_interp.errors import UserError

if TYPE_CHECKING:
    from model.hooks.looped_model import LoopedModel

Scale = Literal["kept", "1/r", "1"]
"""The loop factor: the network's own, one over the number of visits, or 1."""


class Variant(NamedTuple):
    """A network with the loop factor that `scale` says and this number of visits."""

    scale: Scale
    visits: int


def own_visits(network: "LoopedModel") -> int:
    """How often its loop runs; the most of them, where it has several."""
    return max(step.visit for step in network.plan) + 1


def variants(
    network: "LoopedModel", visits: Sequence[int], scales: Sequence[Scale]
) -> "tuple[dict[Variant, LoopedModel], str]":
    """The network as each of these, over the same weights, and why there are fewer than were asked for.

    A network without a loop is itself under every scale, run once. One whose own code fixes its loop is itself alone.
    """
    own = own_visits(network)
    if own == 1:
        return {Variant(scale, 1): network for scale in scales}, ""
    try:
        network.with_visits(own)
    except UserError as error:
        return {Variant("kept", own): network}, str(error)
    made = {}
    for scale in scales:
        for num in visits:
            made[Variant(scale, num)] = network.with_visits(num, loop_scale=1.0 if scale == "1" else scale)
    return made, ""
