"""Attention of one sample as pictures: what each head does on each visit, and what it does differently."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from cache.store import Capture
from probes.running.pictures import COLOURS, Map
from probes.statistics import attention
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError, shown
from smelt_interp.plan import Step, label

PATTERN = "attn.hook_pattern"
# Readable on white and on black.
ROLE_COLOURS: Mapping[Role, str] = {
    Role.PAD: "#9aa3ad",
    Role.BOS: "#64748b",
    Role.INSTRUCTION: "#9a7b5f",
    Role.DEMONSTRATION_INPUT: "#2f9088",
    Role.DEMONSTRATION_ANSWER: "#c04a9e",
    Role.QUERY: "#5b70d6",
    Role.ANSWER: "#d64a3a",
    Role.TEXT: "#7b8694",
}
MOST_CELLS = 2**19
"""That are read of one layer for its other heads too: 1 MB, which a browser is sent at once."""
THUMBNAIL = 48
"""Cells along a side of a thumbnail, at most."""


def seen_keys(samples: Samples, *, causal: bool) -> NDArray[np.bool_]:
    """Which keys each query of the first sample can see: those of its segment, later ones too unless causal. -> (T, T)

    Padding is left out: T is the sample's own length.
    """
    length = int(samples.length_N[0])
    return attention.seen_keys(samples.rows(np.array([0])), causal=causal)[0, :length, :length]


def moved_share(
    earlier_QTS: NDArray[np.generic], later_QTS: NDArray[np.generic], seen_TS: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The share of its attention that a query gives to other keys on the later pass, 0 to 1 (total variation).

    Mean over the queries that see more than one key; NaN where there is none. -> (Q,)
    """
    length = len(seen_TS)
    choosing_T = seen_TS.sum(1) > 1
    before_QTS, after_QTS = (each[:, :length, :length].astype(np.float32) for each in (earlier_QTS, later_QTS))
    change_QTS = np.abs(after_QTS - before_QTS)
    moved_QT = np.where(seen_TS, change_QTS, 0).sum(-1, dtype=np.float64) / 2
    count = choosing_T.sum()
    share_Q: NDArray[np.float64] = moved_QT[:, choosing_T].sum(1) / count if count else np.full(len(moved_QT), np.nan)
    return share_Q


def thumbnails(values_QTS: NDArray[np.generic], seen_TS: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Each head's matrix in at most THUMBNAIL by THUMBNAIL blocks: the mean of what is seen, NaN where nothing is."""
    length = len(seen_TS)
    edges = np.unique(np.linspace(0, length, min(length, THUMBNAIL), endpoint=False).astype(np.int64))

    def blocks(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.add.reduceat(np.add.reduceat(x, edges, axis=-1), edges, axis=-2)

    total_QYX = blocks(np.where(seen_TS, values_QTS[:, :length, :length], 0).astype(np.float32))
    count_YX = blocks(seen_TS.astype(np.float32))
    return np.divide(total_QYX, count_YX, out=np.full(total_QYX.shape, np.nan, np.float32), where=count_YX > 0)


class Drawable(NamedTuple):
    """What attention a capture holds; all numbers count from 0."""

    visits: Mapping[int, tuple[int, ...]]
    """Each recorded layer with its recorded visits."""
    heads: tuple[int, ...]

    def revisited(self) -> list[int]:
        """The layers with more than one recorded visit."""
        return [layer for layer, visits in self.visits.items() if len(visits) > 1]


def drawable(capture: Capture) -> Drawable:
    """What can be drawn of a capture. Raises UserError when it holds no attention."""
    if PATTERN not in capture.kept:
        raise UserError(
            f"a capture must hold {PATTERN} to draw it; {capture.path} holds {', '.join(capture.sites) or 'no site'}: "
            "record it again with that site"
        )
    kept = capture.kept[PATTERN]
    visits: dict[int, tuple[int, ...]] = {}
    for layer, visit in sorted(capture.architecture.steps[index] for index in kept.steps):
        visits[layer] = (*visits.get(layer, ()), visit)
    return Drawable(visits, kept.heads)


def read_patterns(
    capture: Capture, *, sample: int, layer: int, head: int, visits: Sequence[int]
) -> dict[int, NDArray[np.generic]]:
    """The (T, S) matrix of one head on one sample for each of the visits; nothing else is read.

    All numbers count from 0. Raises UserError for a sample, layer, head or visit that was not recorded.
    """
    recorded = drawable(capture)
    for what, number, known in (
        ("sample", sample, range(len(capture))),
        ("layer", layer, tuple(recorded.visits)),
        ("head", head, recorded.heads),
        *(("visit", visit, recorded.visits.get(layer, ())) for visit in visits),
    ):
        if number not in known:
            raise UserError(f"{what} must be a recorded one, {min(known)} to {max(known)} from 0; got {number}")
    steps = {visit: capture.architecture.steps.index(Step(layer, visit)) for visit in visits}
    row = slice(sample, sample + 1)
    return {visit: capture.read(PATTERN, step, row, head)[0] for visit, step in steps.items()}


def cells(patterns: Sequence[NDArray[np.generic]], seen_TS: NDArray[np.bool_]) -> NDArray[np.float16]:
    """Every head on every visit, what queries can see alone, query by query: half the bytes of whole matrices.

    patterns: one (Q, T, S) a visit. -> (Q, visits, seen keys of all queries)
    """
    length = len(seen_TS)
    return np.stack([pattern_QTS[:, :length, :length][:, seen_TS] for pattern_QTS in patterns], 1).astype(np.float16)


def check_square(size: int, text: str) -> None:
    """Raise `UserError` for the text of a zoom, a query, a key (both from 1) and a number of cells, that is no square
    within so many tokens."""
    parts = text.split(" ")
    if text and (
        len(parts) != 3
        or not all(part.isascii() and part.isdecimal() and len(part) <= len(str(size)) for part in parts)
    ):
        raise UserError(f"zoom must be three numbers, a query, a key and how many cells; got {shown(text)}")
    if text:
        query, key, cells = map(int, parts)
        if cells < 4 or min(query, key) < 1 or max(query, key) + cells - 1 > size:
            raise UserError(f"zoom must be 4 cells or more within the sample's {size} tokens; got {shown(text)}")


class MapRow(NamedTuple):
    """What a row of maps needs of one capture."""

    heads: tuple[int, ...]
    cells: NDArray[np.float16]
    """As `cells` gives them, of these heads."""
    titles: list[str]
    """A map each."""
    difference: str
    """What the last minus the first is called."""


def row_of(capture: Capture, sample: int, steps: Sequence[int], head: int) -> MapRow | None:
    """Those of the steps that were recorded, with every head while that is little, with the chosen one alone else.

    None where the head or every step is missing. Raises UserError for a capture without attention.
    """
    kept_heads = drawable(capture).heads
    kept = tuple(step for step in steps if step in capture.kept[PATTERN].steps)
    if not kept or head not in kept_heads:
        return None
    row = slice(sample, sample + 1)
    seen_TS = seen_keys(capture.sample(sample).samples, causal=capture.architecture.causal)
    every = len(kept_heads) * len(kept) * seen_TS.sum() <= MOST_CELLS
    read = [capture.read(PATTERN, step, row, "all" if every else head) for step in kept]
    patterns = [
        values[0] if every else values for values in read
    ]  # with one head its axis is the sample's, of length 1
    plan = [capture.architecture.steps[step] for step in kept]
    titles = [label(step) for step in plan]
    ends = (plan[-1], plan[0])
    once = [label(step).partition(", ")[2] for step in ends] if plan[-1].layer == plan[0].layer else map(label, ends)
    return MapRow(kept_heads if every else (head,), cells(patterns, seen_TS), titles, " − ".join(once))


class HeadGrid(NamedTuple):
    """Every recorded head of a layer at a glance."""

    order: list[int]
    """Positions of heads: the one that moves most first."""
    about: list[str]
    """A word a head."""
    caption: str
    """Where it says {most}, the value of the deepest colour belongs."""
    thumbnails: NDArray[np.float16]


def head_grid(capture: Capture, sample: int, steps: Sequence[int]) -> HeadGrid:
    """The last of the steps minus the first, head by head; with one step its attention itself."""
    row = slice(sample, sample + 1)
    seen_TS = seen_keys(capture.sample(sample).samples, causal=capture.architecture.causal)
    first_QTS, *_, last_QTS = [capture.read(PATTERN, step, row)[0] for step in (steps[0], steps[-1])]
    names = [label(capture.architecture.steps[step]).partition(", ")[2] for step in steps]
    if len(steps) == 1:
        order, about = list(range(len(first_QTS))), [""] * len(first_QTS)
        caption = f"Heads: attention on {names[0]}, deepest at {{most}}"
        return HeadGrid(order, about, caption, thumbnails(first_QTS, seen_TS).astype(np.float16))
    share_Q = moved_share(first_QTS, last_QTS, seen_TS)
    caption = (
        f"Heads: {names[-1]} − {names[0]}, deepest at ±{{most}}; sorted by the share of its attention that a query "
        "gives to other keys"
    )
    small_QYX = thumbnails(last_QTS.astype(np.float32) - first_QTS, seen_TS).astype(np.float16)
    return HeadGrid(np.argsort(-share_Q).tolist(), [f"{share:.0%}" for share in share_Q], caption, small_QYX)


def attention_maps(patterns: Mapping[int, NDArray[np.generic]], samples: Samples, *, causal: bool = True) -> list[Map]:
    """One map a visit, and with several the last minus the first; unseen keys NaN. `samples` begins with the sample.

    The first visit and those after it have the page's two colours; titles are in letters that a picture's font has.
    """
    seen_TS = seen_keys(samples, causal=causal)
    length, (first, *_, last) = len(seen_TS), (*sorted(patterns), max(patterns))
    shown = {
        visit: np.where(seen_TS, patterns[visit][:length, :length], np.nan).astype(np.float32)
        for visit in sorted(patterns)
    }
    maps = [Map(f"visit {visit + 1}", shown[visit], COLOURS[visit != first]) for visit in shown]
    if last != first:
        maps.append(Map(f"visit {last + 1} - visit {first + 1}", shown[last] - shown[first], difference=True))
    return maps


def attention_frame(patterns: Mapping[int, NDArray[np.generic]], samples: Samples, *, causal: bool = True) -> DataFrame:
    """A row for each query and each key that it can see, from 1, with their tokens: attention on every visit, and the
    share that uniform attention would give. `samples` begins with the sample."""
    seen_TS = seen_keys(samples, causal=causal)
    length = len(seen_TS)
    query_N, key_N = np.nonzero(seen_TS)
    labels = np.array(samples.labels(0)[:length], dtype=object)
    columns = {"query": query_N + 1, "key": key_N + 1, "query token": labels[query_N], "key token": labels[key_N]}
    columns |= {
        f"visit {visit + 1}": pattern_TS[:length, :length][seen_TS] for visit, pattern_TS in sorted(patterns.items())
    }
    return DataFrame(columns | {"uniform": (1 / seen_TS.sum(1))[query_N]})
