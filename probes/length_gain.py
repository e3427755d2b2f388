"""Does the network gain more over another where there is more context to read?

    loss       mean over tokens that follow so many others of their document, in nats
    gain       the loss of the network named by --against, minus this network's, over the same tokens
    ratio      the gain in the long bucket over the gain in the short one: 1 where a network gains alike everywhere

The paper's buckets (section 6.3) are 32 to 256 and 512 to 4096 tokens of a context of 4096. A network with a shorter
context has the same shares of its own, and the table says so: --length makes rows as long as that. Single octaves stand
at --level layer.
"""

import sys
from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer, no_sites
from probes.statistics.arrays import ratio
from probes.statistics.bootstrap import interval
from probes.statistics.grid import Level, Place
from probes.statistics.quantities import Quantity, error_bars
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.token_loss import token_losses, vocab_size
from smelt_interp.architecture import Architecture
from smelt_interp.data.datasets import DataOptions
from smelt_interp.paper import printed
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Gain by context length"
needs = no_sites
DATA = DataOptions(data=("code",))
OVERVIEW = ()

LOSS, GAIN, RATIO = "loss (nats)", "gain (nats)", "gain ratio, long / short"
BUCKETS = {name: printed.numbers("downstream", "length_gain_ratio", name) for name in ("short", "long")}
"""The paper's, first and last number of tokens before."""
FULL = max(BUCKETS["long"])
NO_BOUND = "the gain in the short bucket may be 0: any ratio may be"
"""Of a ratio over a gain whose interval holds 0: its own interval, of resamples on both sides of 0, bounds nothing."""


@validated
class Options:
    """Nothing to choose: the network's context decides."""


class Bucket(NamedTuple):
    """Tokens that follow `first` to `last` others of their document."""

    level: Level
    name: str
    first: int
    last: int
    note: str = ""


def start(architecture: Architecture, options: Options) -> Sums[int, Options]:
    """Losses by how many tokens come before."""
    return Sums(architecture, options, vocab_size, reduce, quantities)


def result(sums: Sums[int, Options]) -> Result:
    """Losses of the short and the long bucket, and of every octave."""
    return answer(sums, figures)


def reduce(batch: Batch, layout: int, options: Options) -> Reduced:
    """Losses and tokens of each sample by the tokens before: entry c is what follows c + 1 of them."""
    loss_BT, counts_BT = token_losses(batch)
    before_BT = np.arange(loss_BT.shape[1]) - batch.samples.segment_start_NT
    row_B1 = np.arange(len(loss_BT))[:, None]
    measured_B = np.asarray(counts_BT.any(1))
    found = {}
    for name, x_BT in (("loss", loss_BT), ("tokens", counts_BT)):
        # A document that starts within a row counts from its own start.
        found[name] = np.zeros(loss_BT.shape)
        np.add.at(found[name], (row_B1, before_BT), x_BT)
    return Reduced(by_sample=found, defined={"documents": measured_B})


def buckets(context: int) -> Iterator[Bucket]:
    """The paper's buckets in a context of so many tokens, then octaves."""
    share = min(1.0, context / FULL)
    for name, (first, last) in BUCKETS.items():
        paper = f"the paper's are {first:.0f}-{last:.0f} of {FULL:.0f}"
        said = "" if share == 1 else f"as shares of a context of {context}: {paper}"
        yield Bucket("headline", name, ceil(first * share), int(last * share), said)
    first = 1
    while first < context:
        yield Bucket("split", "octave", first, min(2 * first, context) - 1)
        first *= 2


def quantities(totals: Totals[int, Options]) -> list[Quantity]:
    """The loss of each bucket."""
    uniform = {"uniform": float(np.log(totals.layout))}
    return [_quantity(totals, LOSS, bucket, _loss(totals, bucket), uniform) for bucket in _buckets(totals)]


def against(totals: Totals[int, Options], other: Totals[int, Options]) -> list[Quantity]:
    """The gain of each bucket, and the long bucket's over the short one's."""
    gain = {bucket: _loss(other, bucket) - _loss(totals, bucket) for bucket in _buckets(totals)}
    short, long = (next(bucket for bucket in gain if bucket.name == name) for name in BUCKETS)
    found = [_quantity(totals, GAIN, bucket, gain_R, {"no_difference": 0.0}) for bucket, gain_R in gain.items()]
    ratio_R = ratio(gain[long], gain[short])
    of_gains = long._replace(name="long / short")
    if _may_be_none(gain[short], totals.n["documents"]):
        of_gains = of_gains._replace(note="; ".join(filter(None, [NO_BOUND, long.note])))
    return [_quantity(totals, RATIO, of_gains, ratio_R, {"equal_gain": 1.0}), *found]


def _may_be_none(gain_R: NDArray[np.float64], documents: int) -> bool:
    """Whether the interval of a gain, (R,), holds 0."""
    estimate = interval(gain_R, documents)
    return estimate.low <= 0 <= estimate.high


def _buckets(totals: Totals[int, Options]) -> list[Bucket]:
    """Those of the network's context; of octaves, those that tokens fall into."""
    tokens_C = totals.sums["tokens"][0]
    return [each for each in buckets(totals.architecture.context)
            if each.name in BUCKETS or tokens_C[each.first - 1 : each.last].any()]  # fmt: skip


def _loss(totals: Totals[int, Options], bucket: Bucket) -> NDArray[np.float64]:
    """Nats a token of a bucket. -> (R,)"""
    inside = slice(bucket.first - 1, bucket.last)
    return ratio(totals.sums["loss"][:, inside].sum(1), totals.sums["tokens"][:, inside].sum(1))


def _quantity(
    totals: Totals[int, Options], name: str, bucket: Bucket, value_R: NDArray[np.float64], nulls: dict[str, float]
) -> Quantity:
    before = None if name == RATIO else f"{bucket.first}-{bucket.last}"
    places = [Place(bucket.level, {"bucket": bucket.name, "tokens before": before}, [0], [])]
    undefined = (
        ""
        if np.isfinite(value_R[0])
        else f"not defined: no token follows so many; --length may be {totals.architecture.context}"
    )
    return Quantity(name=name, value_RLH=value_R[:, None, None], places=places, n=totals.n["documents"],
                    nulls={**nulls}, note=lambda place: bucket.note, undefined=undefined)  # fmt: skip


def figures(totals: Totals[int, Options]) -> "dict[str, Figure]":
    """Loss of each octave."""
    from plotly.graph_objects import Figure, Scatter

    rows = [row for quantity in quantities(totals) for row in quantity.rows()]
    rows = [row for row in rows if row["bucket"] == "octave" and row["value"] is not None]
    at = [row["tokens before"] for row in rows]
    drawn: Figure = Figure(
        Scatter(x=at, y=[row["value"] for row in rows], error_y=error_bars(rows), mode="lines+markers")
    )
    drawn.update_layout(title=TITLE, xaxis_title="tokens of the document before", yaxis_title=LOSS)
    return {"octaves": drawn}


def main() -> None:
    """`python -m probes.length_gain`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
