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

Episodes are text; a network's tokenizer makes tokens of it, each with the role of its last character.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from smelt_interp.data.marked_text import MarkedText, Row, Tokens, joined, padded, roles_of, tokens_of, with_bos
from smelt_interp.data.samples import Episode, Role, Samples, document_id
from smelt_interp.data.tokenizer import ByteTokenizer, Tokenizer
from smelt_interp.errors import UserError
from smelt_interp.validation import different, validated

Rendering = Literal["full", "compact"]
Pairing = Literal["standard", "episode"]
Swap = Literal["closer", "opener"]

OPENERS = "([{<"
CLOSERS = ")]}>"
MAX_OPEN = 3
DOMAIN = "dyck"
INSTRUCTION = "Complete each sequence: close every open bracket, the last one opened first.\n"


Total = Annotated[int, Field(ge=4, le=100, multiple_of=2)]
"""Brackets of prefix and answer together."""


@validated
class DyckOptions:
    """What episodes are drawn."""

    shots: tuple[Annotated[int, Field(ge=0, le=10_000)], ...] = (8,)
    """Dyck: demonstrations before the query, one or more numbers; the same queries are asked at each."""
    rendering: Rendering = "compact"
    """Dyck: how a shot is written: `PREFIX:ANSWER`, or in full with an instruction line."""
    pairing: Pairing = "episode"
    """Dyck: episode permutes the closers for each episode, in prefix, demonstrations and answer alike."""
    num_types: Annotated[int, Field(ge=1, le=len(OPENERS))] = len(OPENERS)
    """Dyck: bracket types, the first 1 to 4 of ( [ { <."""
    min_total: Total = 4
    """Dyck: brackets of prefix and answer together, at least; even."""
    max_total: Total = 12
    """Dyck: brackets of prefix and answer together, at most; even, up to 100."""

    def __post_init__(self) -> None:
        different("shots", self.shots)
        if self.min_total > self.max_total:
            raise UserError(f"min_total must be at most max_total, {self.max_total}; got {self.min_total}")


def most_shots(options: DyckOptions, length: int) -> int:
    """The largest number of shots that fits before any query in rows of `length` bytes, BOS included; negative when
    no query does."""
    if options.rendering == "compact":
        return (length - 1) // (options.max_total + len(":\n")) - 1
    return (length - 1 - len(INSTRUCTION)) // (2 * options.max_total - 2 + len("Input: \nOutput: \n")) - 1


@dataclass(frozen=True, slots=True)
class Shot:
    """One bracket sequence: its prefix, the closers that complete it, and how deep its prefix nests."""

    prefix: str
    answer: str
    depth: int


@lru_cache(maxsize=200_000)
def up_probability(height: int, ups: int, downs: int) -> float:
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
        if next(uniform) < up_probability(len(stack), ups, downs):
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


def _uniform(seed: int, number: int) -> Iterator[float]:
    """The random numbers of an episode, from the first."""
    return uniform_stream(np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number]))))


def episode(options: DyckOptions, shots: int, number: int, seed: int) -> MarkedText:
    """The episode of a number: its text ends with the answer to its query."""
    uniform = _uniform(seed, number)
    closers = draw_closers(uniform, options.num_types, options.pairing)
    query = draw_shot(uniform, closers, options.min_total, options.max_total)
    parts: list[tuple[str, Role]] = [] if options.rendering == "compact" else [(INSTRUCTION, Role.INSTRUCTION)]
    written = 0
    while written < shots:
        shot = draw_shot(uniform, closers, options.min_total, options.max_total)
        if shot.prefix != query.prefix:
            question, answer = render_shot(shot, options.rendering)
            parts += [(question, Role.DEMONSTRATION_INPUT), (answer, Role.DEMONSTRATION_ANSWER)]
            written += 1
    question, answer = render_shot(query, options.rendering)
    text, spans = joined([*parts, (question, Role.QUERY), (answer, Role.ANSWER)])
    shown = not set(query.answer).isdisjoint(query.prefix)
    return MarkedText(
        text=text,
        spans=spans,
        document=document_id(DOMAIN, f"{options.pairing} {query.prefix} {query.answer} {seed} {number}"),
        domain=DOMAIN,
        episode=Episode(shots, query.depth, len(query.answer), options.pairing == "episode", shown),
    )


def dyck_samples(options: DyckOptions, num: int, *, seed: int, length: int, tokenizer: Tokenizer) -> Samples:
    """`num` episodes for each number of shots, each a row that ends with its query's answer, padded to the longest.

    The same query after different numbers of shots is one document. Raises UserError when `num` is below 1, and for
    episodes that do not fit `length` tokens, naming the number of shots that does.
    """
    if num < 1:
        raise UserError(f"number of Dyck episodes must be at least 1; got {num}")
    rows = []
    for shots in options.shots:
        for number in range(num):
            rows.append(_row(episode(options, shots, number, seed), options, length, tokenizer))
    return padded(rows, tokenizer)


def _row(source: MarkedText, options: DyckOptions, length: int, tokenizer: Tokenizer) -> Row:
    """An episode as a row. Raises UserError when it does not fit `length` tokens; where every byte is a token, also
    when another episode of as many shots might not, so that the answer does not depend on what was drawn."""
    tokens = with_bos(tokens_of(source, tokenizer), tokenizer)
    most = most_shots(options, length)
    never_too_long = source.episode.shots <= most or not isinstance(tokenizer, ByteTokenizer)
    if len(tokens.ids_T) <= length and never_too_long:
        return Row(tokens, source)
    way_out = "" if options.rendering == "compact" else ", or choose the compact rendering"
    longer = "make the rows longer by --length, up to the network's context"
    if most < 0:
        raise UserError(
            f"Dyck rows of {length} tokens must hold a query of {options.max_total} brackets; got one of "
            f"{len(tokens.ids_T)} tokens: lower max_total, {longer}{way_out}"
        )
    raise UserError(
        f"Dyck shots must be at most {most}, the largest number that always fits rows of {length} tokens with up to "
        f"{options.max_total} brackets a sequence; got {source.episode.shots}: lower max_total, {longer}"
        f"{way_out}"
    )


class DyckPairs(NamedTuple):
    """Episodes in twos: row n of both has the same roles at the same positions, and another right answer."""

    clean: Samples
    corrupted: Samples


def dyck_pairs(
    options: DyckOptions, num: int, *, seed: int, length: int, tokenizer: Tokenizer, swap: Swap = "closer"
) -> DyckPairs:
    """`num` pairs for each number of shots; the two of a pair are one document, as is a query after several numbers.

    Corrupted by `closer`, an episode has another pairing: the closer that the answer begins with and another one are
    exchanged wherever they stand. By `opener`, the last open bracket of its query is of another type. Either way the
    answer's first closer is another one, and nothing beside those characters differs. Episodes whose prompts would be
    the same, or whose tokens would not stand in the same places, are passed over.
    Raises UserError as `dyck_samples` does, and for options under which no such pair was found.
    """
    if num < 1 or options.num_types < 2:
        raise UserError(f"Dyck pairs must be at least 1, of 2 bracket types or more; got {num} of {options.num_types}")
    if swap == "closer" and options.pairing != "episode":
        raise UserError(f"Dyck pairing must be episode where closers are exchanged; got {options.pairing}")
    clean: list[Row] = []
    corrupted: list[Row] = []
    for shots in options.shots:
        found = 0
        # Episodes by their numbers, until enough of them have a corrupted one; the bound ends a search in vain.
        for number in range(100 + 20 * num):
            sources = episode(options, shots, number, seed), _corrupted(options, shots, number, seed, swap)
            left, right = (_row(source, options, length, tokenizer) for source in sources)
            # Tokens may join otherwise around another bracket; patching needs the same places.
            aligned = np.array_equal(left.tokens.role_T, right.tokens.role_T)
            if aligned and _prompt(left.source) != _prompt(right.source):
                clean.append(left)
                corrupted.append(right)
                found += 1
            if found == num:
                break
        else:
            raise UserError(
                f"Dyck pairs must be found among {100 + 20 * num} episodes of {shots} shots; got {found} of {num}: "
                "give more shots, or swap the opener"
            )
    return DyckPairs(padded(clean, tokenizer), padded(corrupted, tokenizer))


def _prompt(source: MarkedText) -> str:
    return source.text[: source.spans[-1].start]


def _corrupted(options: DyckOptions, shots: int, number: int, seed: int, swap: Swap) -> MarkedText:
    """The episode of a number with another right answer; the episode itself where there is none."""
    source = episode(options, shots, number, seed)
    closers = draw_closers(_uniform(seed, number), options.num_types, options.pairing)
    *shown, question, answer = source.spans
    kind = closers.index(source.text[answer.start])
    other = (kind + 1 + number % (options.num_types - 1)) % options.num_types
    if swap == "closer":
        exchange = str.maketrans(closers[kind] + closers[other], closers[other] + closers[kind])
        return replace(source, text=source.text.translate(exchange))
    open_at: list[int] = []
    for place in range(question.start, question.stop):
        if source.text[place] in OPENERS:
            open_at.append(place)
        elif source.text[place] in CLOSERS:
            open_at.pop()
    letters = list(source.text)
    letters[open_at[-1]], letters[answer.start] = OPENERS[other], closers[other]
    text = "".join(letters)
    prefix, closing = (text[span.start : span.stop] for span in (question, answer))
    if any(text[span.start : span.stop] == prefix for span in shown):
        return source  # the query would be a demonstration's
    pair_shown = any(bracket in prefix for bracket in closing if bracket in CLOSERS)
    return replace(source, text=text, episode=source.episode._replace(pair_shown=pair_shown))


def filled_rows(
    num: int, length: int, pairing: Pairing, max_total: int, generator: np.random.Generator, tokenizer: Tokenizer
) -> list[Row]:
    """`num` rows of exactly `length` tokens for training: compact shots of one episode until the row is full.

    The last shot is cut where the row ends. Each episode has its own max_total, uniform over the even numbers from 4
    to `max_total`. There is no query: all shots are demonstrations and `shots` counts the whole ones.
    """
    uniform = uniform_stream(generator)
    width = length - (tokenizer.bos_id is not None)
    rows = []
    for _ in range(num):
        closers = draw_closers(uniform, len(OPENERS), pairing)
        longest = 4 + 2 * int(next(uniform) * (max_total // 2 - 1))
        parts: list[tuple[str, Role]] = []
        encoding = tokenizer.encode("")
        while (num_tokens := len(encoding.ids_T)) < width:
            # Shots are counted one by one; where tokens join across them the whole has fewer, so it is looked at again.
            while num_tokens < width:
                question, answer = render_shot(draw_shot(uniform, closers, 4, longest), "compact")
                parts += [(question, Role.DEMONSTRATION_INPUT), (answer, Role.DEMONSTRATION_ANSWER)]
                num_tokens += len(tokenizer.encode(question + answer).ids_T)
            text, spans = joined(parts)
            encoding = tokenizer.encode(text)
        # Cut at the end of the row; a shot is whole when its newline still stands in it.
        tokens = Tokens(encoding.ids_T[:width], roles_of(encoding, text, spans)[:width])
        whole = sum(span.stop <= encoding.stop_T[width - 1] for span in spans[1::2])
        source = MarkedText(
            text=text,
            spans=spans,
            document=document_id(DOMAIN, text),
            domain=DOMAIN,
            episode=Episode(shots=whole, episode_pairing=pairing == "episode"),
        )
        rows.append(Row(with_bos(tokens, tokenizer), source))
    return rows
