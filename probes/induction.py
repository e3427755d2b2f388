"""Which heads, on which visit, look at what followed the same token before: does the network copy by induction?

For each query t whose token stood earlier in its segment, last at p(t), and not right before t:

    induction     A[t, p(t) + 1]: mass on the token that followed it there (arXiv:2209.11895)
    duplicate     A[t, p(t)]: mass on the earlier token itself
    previous      A[t, t - 1]: mass on the token before, which the first half of an induction circuit reads
    loss (nats)   of tokens that follow such a query and are those that followed it before (`copied`), and of all
                  others (`others`)

Nulls. `uniform`: even attention over the keys that t sees. `elsewhere`, for induction: the mean mass on those of them
that follow the earlier places of other queries. The default samples are runs of random tokens,
twice, in which nothing but copying helps; any samples can be measured.
"""

import sys
from typing import TYPE_CHECKING

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from cache.batch import Batch
from probes.running import command
from probes.running.probe import Result, answer
from probes.statistics.arrays import Floats, Mask, is_token, like, ratio, recorded_steps, site
from probes.statistics.attention import seen_keys
from probes.statistics.grid import HEADS, Grid, Place
from probes.statistics.quantities import Quantity, largest_heads
from probes.statistics.sums import Reduced, Sums, Totals
from probes.statistics.token_loss import token_losses
from smelt_interp.architecture import Architecture, Loop
from smelt_interp.arrays import Array
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.samples import Samples
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = "Induction"
DATA = DataOptions(data=("repeats",), length=64)
OVERVIEW = ({"quantity": "induction", "head": "largest"},)

PATTERN = "attn.hook_pattern"
MASSES = ("induction", "duplicate", "previous")
ELSEWHERE = len(MASSES)
"""Where the sums hold the null of the first."""
NO_REPEATS = "not defined: no token occurs twice in these samples"


@validated
class Options:
    """Nothing to choose: the samples decide."""


def needs(architecture: Architecture) -> tuple[str, ...]:
    """Patterns."""
    return (PATTERN,)


def start(architecture: Architecture, options: Options) -> Sums[Grid, Options]:
    """Sums over the queries of each sample whose token stood there before."""
    return Sums(architecture, options, lay_out, reduce, quantities)


def result(sums: Sums[Grid, Options]) -> Result:
    """Masses by visit, step and head, losses, and a map of induction by step and head."""
    return answer(sums, figures)


# Arithmetic


def lay_out(batch: Batch, options: Options, loops: tuple[Loop, ...]) -> Grid:
    """The recorded steps and heads."""
    steps = recorded_steps(batch, (PATTERN,))
    return Grid(architecture=batch.architecture, loops=loops, steps=steps, heads=batch.heads[PATTERN])


def earlier(samples: Samples) -> tuple[NDArray[np.int64], Mask]:
    """Where each token stood last in its segment, and for which that is before the token right before it; elsewhere
    position 0. -> (B, T) each"""
    ids_BT, start_BT, token_BT = samples.ids_NT, samples.segment_start_NT, is_token(samples)
    position_T = np.arange(ids_BT.shape[1])
    same_BTS = (ids_BT[:, :, None] == ids_BT[:, None]) & (start_BT[:, :, None] == start_BT[:, None])
    same_BTS &= (position_T < position_T[:, None]) & token_BT[:, :, None] & token_BT[:, None]
    last_BT = np.where(same_BTS, position_T, -1).max(-1)
    found_BT: Mask = (last_BT >= 0) & (last_BT + 1 < position_T)
    return np.where(found_BT, last_BT, 0).astype(np.int64), found_BT


def masses(pattern_BQTS: Floats, last_BT: NDArray[np.int64], found_BT: Mask, seen_BTS: Mask) -> Floats:
    """Sums over the queries that are counted, of MASSES and of the null of the first. -> (B, Q, M)"""
    xp, length = array_namespace(pattern_BQTS), last_BT.shape[1]
    counted_B1T = like(found_BT, pattern_BQTS)[:, None]

    def at(key_BT: NDArray[np.int64]) -> Floats:
        index_B1T1 = xp.asarray(key_BT, device=device(pattern_BQTS))[:, None, :, None]
        index_BQT1 = xp.broadcast_to(index_B1T1, (*pattern_BQTS.shape[:3], 1))
        mass_BQT: Floats = xp.take_along_axis(pattern_BQTS, index_BQT1, axis=-1)[..., 0]
        return mass_BQT

    # The other tokens that follow an earlier place, as far as a query sees them.
    row, query = np.nonzero(found_BT)
    follows_BS = np.zeros(last_BT.shape, np.bool_)
    follows_BS[row, last_BT[row, query] + 1] = True
    others_BT = (seen_BTS & follows_BS[:, None]).sum(-1) - 1
    induction_BQT = at(np.minimum(last_BT + 1, length - 1))
    following_BQT = (pattern_BQTS @ like(follows_BS, pattern_BQTS)[:, None, :, None])[..., 0]
    elsewhere_BQT = (following_BQT - induction_BQT) / like(np.maximum(others_BT, 1), pattern_BQTS)[:, None]
    previous_BQT = at(np.tile(np.maximum(np.arange(length) - 1, 0), (len(last_BT), 1)))
    each = (induction_BQT, at(last_BT), previous_BQT, elsewhere_BQT)
    sums: Floats = xp.stack([xp.sum(xp.astype(x * counted_B1T, xp.float64), axis=-1) for x in each], axis=-1)
    return sums


def reduce(batch: Batch, grid: Grid, options: Options) -> Reduced:
    """Masses of each step and head, and losses of tokens that can be copied and of others."""
    samples = batch.samples
    last_BT, found_BT = earlier(samples)
    seen_BTS = seen_keys(samples, causal=batch.architecture.causal)
    each = [
        masses(site(batch, step, PATTERN), last_BT, found_BT, seen_BTS) for step in grid.steps if isinstance(step, int)
    ]
    loss_BT, predicts_BT = token_losses(batch)
    next_BT = np.roll(samples.ids_NT, -1, 1)
    followed_BT = np.take_along_axis(samples.ids_NT, np.minimum(last_BT + 1, last_BT.shape[1] - 1), 1)
    copied_BT = predicts_BT & found_BT & (followed_BT == next_BT)
    kinds_BTK = np.stack([copied_BT, predicts_BT & ~copied_BT], -1)
    sums: dict[str, Array] = {
        "mass": array_namespace(each[0]).stack(each, axis=1),
        "queries": found_BT.sum(1),
        "uniform": ratio(found_BT.astype(np.float64), seen_BTS.sum(-1)).sum(1, where=found_BT),
        "loss": (loss_BT[..., None] * kinds_BTK).sum(1),
        "tokens": kinds_BTK.sum(1),
    }
    kinds = {"queries": found_BT, "copied": kinds_BTK[..., 0], "others": kinds_BTK[..., 1]}
    return Reduced(by_sample=sums, defined={name: of_BT.sum(1) > 0 for name, of_BT in kinds.items()})


# What the sums say


def quantities(totals: Totals[Grid, Options]) -> list[Quantity]:
    """Masses wherever they have a row, the head with the most induction on each visit, and losses."""
    grid, sums, n = totals.layout, totals.sums, totals.n
    value_RLHM = ratio(sums["mass"], sums["queries"][:, None, None, None])
    uniform = float(ratio(sums["uniform"], sums["queries"])[0])
    elsewhere = {"elsewhere": value_RLHM[0, ..., ELSEWHERE]}
    found = [
        Quantity(name=name, value_RLH=value_RLHM[..., m], places=grid.places(HEADS), n=n["queries"], change=True,
                 nulls={"uniform": uniform, **(elsewhere if m == 0 else {})},
                 undefined="" if n["queries"] else NO_REPEATS)
        for m, name in enumerate(MASSES)
    ]  # fmt: skip
    found.insert(1, largest_heads(found[0], grid))
    chance = {"uniform": float(np.log(grid.architecture.vocab_size))}
    loss_RK = ratio(sums["loss"], sums["tokens"])
    found += [
        Quantity(name="loss (nats)", value_RLH=loss_RK[:, k, None, None], n=n[kind], where={"tokens": kind},
                 places=[Place("headline", {}, [0], [])], nulls=chance,
                 undefined="" if n[kind] else NO_REPEATS)
        for k, kind in enumerate(("copied", "others"))
    ]  # fmt: skip
    return found


def figures(totals: Totals[Grid, Options]) -> "dict[str, Figure]":
    """Induction of each head at each step."""
    from plotly.graph_objects import Figure, Heatmap

    grid = totals.layout
    mass_LH = ratio(totals.sums["mass"][0, ..., 0], totals.sums["queries"][0])
    heads = [f"head {head + 1}" for head in grid.heads]
    drawn = Figure(Heatmap(z=mass_LH.T, x=grid.labels(), y=heads, zmin=0, zmax=1, colorscale="Blues"))
    drawn.update_layout(title=f"{TITLE}: mass on what followed the same token before", height=480)
    return {"heads": drawn}


def main() -> None:
    """`python -m probes.induction`."""
    command.main(sys.modules[__name__])


if __name__ == "__main__":
    main()
