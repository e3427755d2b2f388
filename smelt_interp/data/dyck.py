"""Dyck episodes: a bracket prefix to be closed, after demonstrations that show how, as rows with roles.

A prefix is proper (no closer without its opener) and ends with 1 to 3 open brackets; the answer closes them, last
opened first. Prefix and answer together have `total` brackets, an even number, uniform over the even numbers from
min_total to max_total; the number of open brackets is uniform over 1..min(3, total/2); given both, every proper
prefix is equally likely, and every opener's type is uniform.

Renderings, newlines included:

    full      Complete ... .                          INSTRUCTION
              Input: ( [ ] {                          DEMONSTRATION_INPUT, the word `Output: ` included
              Output: } )                             DEMONSTRATION_ANSWER: brackets, the spaces between, the newline
              Input: <                                QUERY, the word `Output: ` included
              Output: >                               ANSWER
    compact   ([]{:})                                 as above: prefix and colon, then brackets and newline

The newline that closes an answer is part of it: to predict it is to know when to stop. `answer_length` of a row
counts the answer's brackets alone.

Pairing `standard` closes ( with ), [ with ], { with } and < with >. Pairing `episode` draws, for each episode, a
permutation of the closers (the usual one included), used in its prefixes, demonstrations and answer alike.

Demonstrations and query come from disjoint draws: no demonstration has the query's prefix. Row i depends on the
seed and i alone, and its query is drawn first, so the same seed asks the same queries at every number of shots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from smelt_interp.data.samples import EPISODE, Role, Samples
from smelt_interp.data.tokenizer import BOS, PAD
from smelt_interp.errors import UserError

Rendering = Literal["full", "compact"]
Pairing = Literal["standard", "episode"]

OPENERS = "([{<"
CLOSERS = ")]}>"
MAX_OPEN = 3
DOMAIN = b"dyck"
INSTRUCTION = "Complete each sequence: close every open bracket, the last one opened first.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DyckOptions:
    """What episodes are drawn. Raises UserError when a field is outside its rule, or when the shots do not fit."""

    rendering: Rendering = "compact"
    pairing: Pairing = "standard"
    shots: int = 8
    """Demonstrations before the query."""
    num_types: int = 4
    """The first 1 to 4 of ( [ { <."""
    min_total: int = 4
    """Brackets of prefix and answer together, at least; even."""
    max_total: int = 12
    """Brackets of prefix and answer together, at most; even, up to 100."""
    context: int = 160
    """Tokens a row may have."""
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value, choices in (("rendering", self.rendering, Rendering), ("pairing", self.pairing, Pairing)):
            if value not in get_args(choices):
                raise UserError(f"Dyck {what} must be one of {', '.join(get_args(choices))}; got {value}")
        if not 1 <= self.num_types <= len(OPENERS):
            raise UserError(f"Dyck num_types must be 1 to {len(OPENERS)}; got {self.num_types}")
        totals = (self.min_total, self.max_total)
        if any(total % 2 for total in totals) or not 4 <= self.min_total <= self.max_total <= 100:
            raise UserError(f"Dyck min_total and max_total must be even, 4 <= min <= max <= 100; got {totals}")
        if not 0 <= self.shots <= 10_000:
            raise UserError(f"Dyck shots must be 0 to 10000; got {self.shots}")
        if self.seed < 0:
            raise UserError(f"Dyck seed must be 0 or above; got {self.seed}")
        if self.shots > (most := self.most_shots()):
            way_out = "lower max_total or choose a longer context" + (
                "" if self.rendering == "compact" else ", or the compact rendering"
            )
            if most < 0:
                raise UserError(
                    f"Dyck context must hold a query of {self.max_total} brackets; got {self.context}: {way_out}"
                )
            raise UserError(
                f"Dyck shots must be at most {most}, the largest number that fits a context of {self.context} tokens "
                f"with sequences of up to {self.max_total} brackets; got {self.shots}: {way_out}"
            )

    def longest_shot(self) -> int:
        """Tokens of the longest shot that these options can draw."""
        if self.rendering == "compact":
            return self.max_total + len(":\n")
        return 2 * self.max_total - 2 + len("Input: \nOutput: \n")

    def most_shots(self) -> int:
        """The largest number of demonstrations that always fits before a query; negative when the query does not."""
        fixed = 1 + (0 if self.rendering == "compact" else len(INSTRUCTION))
        return (self.context - fixed) // self.longest_shot() - 1


@dataclass(frozen=True, slots=True)
class Shot:
    """One bracket sequence: its prefix, the closers that complete it, and how deep its prefix nests."""

    prefix: str
    answer: str
    depth: int


@lru_cache(maxsize=200_000)
def _up_probability(height: int, ups: int, downs: int) -> float:
    """Share of the proper continuations from `height`, with so many openers and closers left, that begin with an
    opener. The number of proper continuations is C(u+d, d) - C(u+d, d-h-1), by reflection."""

    def paths(h: int, u: int, d: int) -> int:
        return comb(u + d, d) - (comb(u + d, d - h - 1) if d > h else 0)

    return paths(height + 1, ups - 1, downs) / paths(height, ups, downs) if ups else 0.0


def draw_shot(uniform: Iterator[float], closers: str, min_total: int, max_total: int) -> Shot:
    """One shot from a stream of uniform numbers in [0, 1); `closers[i]` closes OPENERS[i], its length is num_types."""
    half = min_total // 2 + int(next(uniform) * (max_total // 2 - min_total // 2 + 1))
    num_open = 1 + int(next(uniform) * min(MAX_OPEN, half))
    ups, downs = half, half - num_open
    stack: list[int] = []
    prefix: list[str] = []
    depth = 0
    while ups or downs:
        if next(uniform) < _up_probability(len(stack), ups, downs):
            stack.append(int(next(uniform) * len(closers)))
            prefix.append(OPENERS[stack[-1]])
            depth = max(depth, len(stack))
            ups -= 1
        else:
            prefix.append(closers[stack.pop()])
            downs -= 1
    return Shot("".join(prefix), "".join(closers[kind] for kind in reversed(stack)), depth)


def draw_closers(uniform: Iterator[float], num_types: int, pairing: Pairing) -> str:
    """The closer of each opener: the usual one, or a uniform permutation of them."""
    closers = list(CLOSERS[:num_types])
    if pairing == "episode":
        for last in range(num_types - 1, 0, -1):
            other = int(next(uniform) * (last + 1))
            closers[last], closers[other] = closers[other], closers[last]
    return "".join(closers)


def uniform_stream(generator: np.random.Generator) -> Iterator[float]:
    """Uniform numbers in [0, 1) without end, drawn by blocks."""
    while True:
        yield from generator.random(256).tolist()


def render_shot(shot: Shot, rendering: Rendering) -> tuple[str, str]:
    """The question, up to where the answer begins, and the answer with its newline."""
    if rendering == "compact":
        return f"{shot.prefix}:", f"{shot.answer}\n"
    return f"Input: {' '.join(shot.prefix)}\nOutput: ", f"{' '.join(shot.answer)}\n"


def _write(parts: Sequence[tuple[str, Role]], ids_T: NDArray[np.int32], role_T: NDArray[np.uint8]) -> None:
    """Write BOS and the parts into a row, cut at its end."""
    ids_T[0], role_T[0] = BOS, Role.BOS
    position = 1
    for text, role in parts:
        data = np.frombuffer(text.encode(), np.uint8)[: len(ids_T) - position]
        ids_T[position : position + len(data)] = data
        role_T[position : position + len(data)] = role
        position += len(data)


def dyck_samples(options: DyckOptions, num: int) -> Samples:
    """`num` episodes, each a row that ends with its query's answer, padded to the longest.

    Raises UserError when `num` is below 1.
    """
    if num < 1:
        raise UserError(f"number of Dyck episodes must be at least 1; got {num}")
    rows: list[list[tuple[str, Role]]] = []
    episode_N = np.zeros(num, dtype=EPISODE)
    for row in range(num):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([options.seed, row])))
        uniform = uniform_stream(generator)
        closers = draw_closers(uniform, options.num_types, options.pairing)
        query = draw_shot(uniform, closers, options.min_total, options.max_total)
        parts: list[tuple[str, Role]] = [] if options.rendering == "compact" else [(INSTRUCTION, Role.INSTRUCTION)]
        while len(parts) < 2 * options.shots + (options.rendering == "full"):
            shot = draw_shot(uniform, closers, options.min_total, options.max_total)
            if shot.prefix != query.prefix:
                question, answer = render_shot(shot, options.rendering)
                parts += [(question, Role.DEMONSTRATION_INPUT), (answer, Role.DEMONSTRATION_ANSWER)]
        question, answer = render_shot(query, options.rendering)
        rows.append([*parts, (question, Role.QUERY), (answer, Role.ANSWER)])
        shown = not set(query.answer).isdisjoint(query.prefix)
        episode_N[row] = (options.shots, query.depth, len(query.answer), options.pairing == "episode", shown)
    length_N = np.array([1 + sum(len(text) for text, _ in parts) for parts in rows], dtype=np.int32)
    ids_NT = np.full((num, length_N.max()), PAD, dtype=np.int32)
    role_NT = np.full(ids_NT.shape, Role.PAD, dtype=np.uint8)
    for row, parts in enumerate(rows):
        _write(parts, ids_NT[row], role_NT[row])
    return _dyck_rows(ids_NT, role_NT, length_N, episode_N)


def filled_rows(num: int, length: int, pairing: Pairing, max_total: int, generator: np.random.Generator) -> Samples:
    """`num` rows of exactly `length` tokens for training: compact shots of one episode until the row is full.

    The last shot is cut where the row ends. Each episode has its own max_total, uniform over the even numbers from 4
    to `max_total`. There is no query: all shots are demonstrations and `shots` counts the whole ones.
    """
    uniform = uniform_stream(generator)
    ids_NT = np.zeros((num, length), dtype=np.int32)
    role_NT = np.zeros((num, length), dtype=np.uint8)
    episode_N = np.zeros(num, dtype=EPISODE)
    for row in range(num):
        closers = draw_closers(uniform, len(OPENERS), pairing)
        longest = 4 + 2 * int(next(uniform) * (max_total // 2 - 1))
        parts: list[tuple[str, Role]] = []
        written, whole = 1, -1
        while written < length:
            question, answer = render_shot(draw_shot(uniform, closers, 4, longest), "compact")
            parts += [(question, Role.DEMONSTRATION_INPUT), (answer, Role.DEMONSTRATION_ANSWER)]
            written += len(question) + len(answer)
            whole += 1
        _write(parts, ids_NT[row], role_NT[row])
        episode_N[row] = (whole + (written == length), 0, 0, pairing == "episode", False)
    return _dyck_rows(ids_NT, role_NT, np.full(num, length, dtype=np.int32), episode_N)


def _dyck_rows(
    ids_NT: NDArray[np.int32], role_NT: NDArray[np.uint8], length_N: NDArray[np.int32], episode_N: NDArray[np.void]
) -> Samples:
    return Samples(
        ids_NT=ids_NT,
        length_N=length_N,
        role_NT=role_NT,
        segment_start_NT=np.zeros_like(ids_NT),
        domain_N=np.full(len(ids_NT), DOMAIN, dtype="S16"),
        episode_N=episode_N,
    )
