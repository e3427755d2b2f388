"""How well does the network predict texts of each domain, and how much better than another on the same documents?

    loss            mean cross-entropy of a token that follows another of its document, in nats; tokens weigh alike
    bits a byte     the same sum over the bytes of those tokens, in bits: comparable between tokenizers
    gain            of the network, over each one named by --against: its loss minus this network's, paired by document

Beside the loss stands that of a uniform guess.
"""

import sys
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer, no_sites
from probes.statistics.arrays import ratio
from probes.statistics.grid import Place
from probes.statistics.quantities import Quantity, error_bars
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.token_loss import token_losses, vocab_size
from smelt_interp.architecture import Architecture
from smelt_interp.data.datasets import DataOptions
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Loss by domain"
needs = no_sites
DATA = DataOptions(data=("dyck", "code"))
OVERVIEW = ({"quantity": "loss (nats)"},)

LOSS, BITS, GAIN, BITS_GAIN = "loss (nats)", "bits a byte", "gain (nats)", "gain (bits a byte)"
NATS_A_BIT = float(np.log(2))


@validated
class Options:
    """Nothing to choose: the samples decide."""


def start(architecture: Architecture, options: Options) -> Sums[int, Options]:
    """Losses, tokens and bytes by domain."""
    return Sums(architecture, options, vocab_size, reduce, quantities)


def result(sums: Sums[int, Options]) -> Result:
    """Loss and bits a byte of each domain."""
    return answer(sums, figures)


def reduce(batch: Batch, layout: int, options: Options) -> Reduced:
    """Loss, tokens and bytes of each sample, under the name of its domain."""
    loss_BT, counts_BT = token_losses(batch)
    samples = batch.samples
    bytes_BT = np.roll(np.diff(samples.text.offsets).reshape(samples.ids_NT.shape), -1, axis=1)
    found_BK = np.stack([loss_BT.sum(1), counts_BT.sum(1), (bytes_BT * counts_BT).sum(1)], -1)
    inside = {domain.decode(): samples.domain_N == domain for domain in np.unique(samples.domain_N)}
    return Reduced(
        by_sample={domain: found_BK * inside_B[:, None] for domain, inside_B in inside.items()},
        defined={domain: inside_B & counts_BT.any(1) for domain, inside_B in inside.items()},
    )


def quantities(totals: Totals[int, Options]) -> list[Quantity]:
    """Loss, then bits a byte, of each domain."""
    uniform = float(np.log(totals.layout))
    means = {domain: _means(totals.sums[domain]) for domain in sorted(totals.sums)}
    return [
        _quantity(totals, domain, name, of_domain[k], {"uniform": uniform} if k == 0 else {})
        for k, name in enumerate((LOSS, BITS))
        for domain, of_domain in means.items()
    ]


def against(totals: Totals[int, Options], other: Totals[int, Options]) -> list[Quantity]:
    """The other network's loss and bits a byte minus this one's, paired by document."""
    found = []
    for k, name in enumerate((GAIN, BITS_GAIN)):
        for domain in sorted(totals.sums):
            gain_R = _means(other.sums[domain])[k] - _means(totals.sums[domain])[k]
            found.append(_quantity(totals, domain, name, gain_R, {"no_difference": 0.0}))
    return found


def _means(found_RK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nats a token and bits a byte of loss, tokens and bytes. -> (R,) each"""
    loss_R, tokens_R, bytes_R = np.moveaxis(found_RK, -1, 0)
    return ratio(loss_R, tokens_R), ratio(loss_R, bytes_R * NATS_A_BIT)


def _quantity(
    totals: Totals[int, Options], domain: str, name: str, value_R: NDArray[np.float64], nulls: dict[str, float]
) -> Quantity:
    places = [Place("headline", {"domain": domain}, [0], [])]
    value_RLH = value_R[:, None, None]
    return Quantity(name=name, value_RLH=value_RLH, places=places, n=totals.n[domain], nulls={**nulls})


def figures(totals: Totals[int, Options]) -> "dict[str, Figure]":
    """Bits a byte of each domain, with intervals."""
    from plotly.graph_objects import Bar, Figure

    rows = [row for quantity in quantities(totals) if quantity.name == BITS for row in quantity.rows()]
    rows = [row for row in rows if row["value"] is not None]
    drawn: Figure = Figure(
        Bar(x=[row["domain"] for row in rows], y=[row["value"] for row in rows], error_y=error_bars(rows))
    )
    drawn.update_layout(title=TITLE, yaxis_title=BITS)
    return {"domains": drawn}


def main() -> None:
    """`python -m probes.domain_loss`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
