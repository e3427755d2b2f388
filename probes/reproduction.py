"""Does what the paper reports of its mechanism show here? Each printed figure beside ours, with a verdict.

A printed figure, or the ends of a printed range, are known to half of their last digit. Verdicts come from the numbers:

    matches         the 95% interval of ours meets the printed range
    differs         it does not; the note says on which side
    not testable    not at this scale: so many demonstrations do not fit the context, or there is no second visit

`chance` is the null of the measure: uniform attention, shuffled tokens, for experts their popularity. What the
untrained network does as well is no finding about training: the note says so where it lies, seen from chance, at least
as far out as the near end of the printed range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from probes.running import report
from probes.running.command import Measured
from probes.running.contract import NULL_PREFIX, Cell, Estimate, Result, Row, row
from probes.running.report import OTHER_PREFIX
from probes.running.source import UNTRAINED
from smelt_interp.data.dyck import DyckOptions, most_shots
from smelt_interp.paper import printed
from smelt_interp.paper.table import last_place

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["matches", "differs", "not testable"]
Results = Mapping[tuple[str, str], Measured]
"""What was measured, by the name of the samples and of the probe."""
SINK, SIMILARITY, OVERLAP, UPDATES, DYCK = (
    "attention_sink", "projection_similarity", "expert_overlap", "residual_updates", "dyck_icl"
)  # fmt: skip
AT_SHOTS = "dyck_exact_match_k32"
AS_FAR = "the untrained network goes as far"
REMARKS = (
    "matches: our 95% interval meets the printed figure, which is known to half of its last digit",
    "chance: uniform attention for masses, shuffled tokens for cosines and ratios, popularity for experts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A printed figure of the mechanism, and the headline row that measures it."""

    what: str
    figure: str
    """Its name under `mechanism` in the file of printed figures, with `visit_1` or `visit_2` after a dot."""
    probe: str
    quantity: str
    where: Mapping[str, Cell]
    null: str
    samples: Sequence[str] = ("dyck", "code")
    """The paper takes its sink from Dyck prompts, the rest from validation tokens: the nearest here is code."""
    of_top_k: bool = False
    """Both are numbers of experts, compared as shares of all that a token chooses."""


def _sink(part: str, figure: str, visit: int) -> Claim:
    return Claim(
        what=f"{part} mass, visit {visit}", figure=f"{figure}.visit_{visit}", probe=SINK, quantity=f"{part} mass",
        where={"visit": visit, "head": "mean"}, null="uniform", samples=("dyck",),
    )  # fmt: skip


def _projection(name: str, figure: str) -> Claim:
    return Claim(what=f"{name} cosine", figure=figure, probe=SIMILARITY, quantity=f"{name} cosine, raw",
                 where={"visit": "1 vs 2"}, null="shuffled")  # fmt: skip


def _update(what: str, figure: str, quantity: str) -> Claim:
    return Claim(what=what, figure=figure, probe=UPDATES, quantity=quantity,
                 where={"visit": "1 vs 2", "update": "layer"}, null="shuffled")  # fmt: skip


CLAIMS = (
    *(_sink(part, figure, visit) for part, figure in (("start", "bos_mass"), ("content", "content_mass"))
      for visit in (1, 2)),
    *(_projection(name, "q_k_cosine_across_visits") for name in "QK"),
    _projection("V", "v_cosine_across_visits"),
    Claim(what="share of experts kept", figure="experts_kept_of_8", probe=OVERLAP, quantity="experts shared",
          where={"visit": "1 vs 2"}, null="popularity", of_top_k=True),
    _update("update norm ratio", "residual_write_norm_ratio", "norm ratio, median"),
    _update("update cosine", "residual_write_cosine", "cosine"),
)  # fmt: skip


def known_to(ends: tuple[float, float]) -> tuple[float, float]:
    """The range that the printed ends allow: half of the last digit more on either side."""
    return ends[0] - last_place(ends[0]) / 2, ends[1] + last_place(ends[1]) / 2


def verdict(interval: tuple[float, float], allowed: tuple[float, float]) -> tuple[Verdict, str]:
    """Whether two ranges meet, and the side on which the first lies when they do not."""
    if interval[1] < allowed[0]:
        return "differs", "lower"
    if interval[0] > allowed[1]:
        return "differs", "higher"
    return "matches", ""


def reaches(value: float, ends: tuple[float, float], null: float) -> bool:
    """Whether a value is at least as far from the null as the near end of a range that lies on one side of it."""
    return value >= ends[0] > null or value <= ends[1] < null


def rows(results: Results) -> list[Row]:
    """A row for each claim and each kind of samples that was measured, in the paper's order."""
    found = [
        _compared(claim, samples, results[samples, claim.probe])
        for claim in CLAIMS
        for samples in claim.samples
        if (samples, claim.probe) in results
    ]
    return found + (_at_shots(results["shots", DYCK]) if ("shots", DYCK) in results else [])


def _compared(claim: Claim, samples: str, measured: Measured) -> Row:
    ends = _ends("mechanism", *claim.figure.split("."))
    paper_scale = scale = 1.0
    if claim.of_top_k:
        paper_scale = 1 / printed.integer("architecture", "top_k")
        scale = 1 / measured.networks[0].config.top_k
    where = {"quantity": claim.quantity, **claim.where}
    found = _headline(measured.results[0], where)
    null = _scaled(found, NULL_PREFIX + claim.null, scale)
    beside = [result for network, result in zip(measured.networks, measured.results, strict=True) if network.untrained]
    untrained = _scaled(_headline(beside[0], where), "value", scale) if beside else None
    low, high = (end * paper_scale for end in known_to(ends))
    return _row(claim.what, samples, (ends[0] * paper_scale, ends[1] * paper_scale), (low, high),
                _estimate(found, scale), null, untrained, str(found.get("note", "")))  # fmt: skip


def _row(
    what: str,
    samples: str,
    ends: tuple[float, float],
    allowed: tuple[float, float],
    ours: Estimate | None,
    null: float | None,
    untrained: float | None,
    reason: str,
) -> Row:
    answer, note = ("not testable", reason) if ours is None else verdict((ours.low, ours.high), allowed)
    if untrained is not None and null is not None and reaches(untrained, ends, null):
        note = "; ".join([*([note] if note else []), AS_FAR])
    paper = " to ".join(f"{end:.3g}" for end in dict.fromkeys(ends))
    place: Row = {"on": samples, "paper": paper, "verdict": answer}
    return {
        **row("headline", what, ours, where=place, nulls={"chance": null}, note=note),
        f"{OTHER_PREFIX}{UNTRAINED}": untrained,
    }


def _at_shots(measured: Measured) -> list[Row]:
    """Exact match at the paper's number of demonstrations, by the looped network and by its Baseline."""
    wanted = int(AT_SHOTS.rpartition("k")[2])
    context = measured.networks[0].config.context
    reason = f"{most_shots(DyckOptions(), context)} shots fit the context of {context} tokens"
    where: dict[str, Cell] = {"quantity": "exact match", "queries": "all", "shots": wanted}
    found = []
    for architecture in printed.names("downstream", AT_SHOTS):
        pairs = zip(measured.networks, measured.results, strict=True)
        once = architecture == "baseline"
        scored = [
            result for network, result in pairs if not network.untrained and (network.config.num_visits == 1) == once
        ]
        if scored:
            ends = _ends("downstream", AT_SHOTS, architecture)
            ours = _estimate(_headline(scored[0], where), 1.0)
            what = f"Dyck at {wanted} shots, {architecture}"
            found.append(_row(what, "dyck", ends, known_to(ends), ours, None, None, reason))
    return found


def _headline(result: Result, where: Mapping[str, Cell]) -> Row:
    """The headline row with these columns; empty when there is none."""
    matching = (row for row in result.rows() if row["level"] == "headline" and where.items() <= row.items())
    return next(matching, {})


def _ends(*path: printed.Key) -> tuple[float, float]:
    if isinstance(printed.entry(*path), list):
        low, high = printed.numbers(*path)
        return low, high
    return printed.number(*path), printed.number(*path)


def _scaled(entry: Row, column: str, scale: float) -> float | None:
    cell = entry.get(column)
    return cell * scale if isinstance(cell, float) else None


def _estimate(entry: Row, scale: float) -> Estimate | None:
    value, low, high = (_scaled(entry, column, scale) for column in ("value", "low", "high"))
    n = entry.get("n")
    return (
        Estimate(value, low, high, n)
        if value is not None and low is not None and high is not None and isinstance(n, int)
        else None
    )


def table(results: Results, name: str) -> "Table":
    """The comparison as a terminal table; `name` is the network's."""
    return report.table(rows(results), f"The paper's figures against {name}", {UNTRAINED: UNTRAINED}, "headline")
