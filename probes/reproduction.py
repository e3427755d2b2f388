"""Does what the paper reports of its mechanism show here? Each printed figure beside ours, with a verdict.

A printed figure is known to half of its last digit. A printed mean is held against our mean over the looped layers, a
printed range against the range of our looped layers. Verdicts come from the numbers:

    matches         the 95% interval of our mean meets the printed mean; of a range, that of every layer
    differs         it does not; the note says on which side, and how many layers are inside
    not testable    not at this scale: so many demonstrations do not fit the context, or there is no second visit

`chance` is the null of the measure: uniform attention, shuffled tokens, for experts their popularity. What the
untrained network does as well is no finding about training: the note says so where it lies, seen from chance, at least
as far out as the near end of the printed range. The choices that a figure depends on stand in its row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from probes.running import report
from probes.running.command import Measured
from probes.running.probe import Result
from probes.running.source import Subject
from probes.statistics.grid import Cell
from probes.statistics.quantities import NULL_PREFIX, Record
from smelt_interp.data.dyck import DyckOptions, most_shots
from smelt_interp.paper import printed
from smelt_interp.paper.printed import Figure
from smelt_interp.terminal.tables import Table

Answer = Literal["matches", "differs", "not testable"]
Results = Mapping[tuple[str, str], Measured]
"""What was measured, by the name of the samples and of the probe."""
SINK, SIMILARITY, OVERLAP, UPDATES, DYCK = (
    "attention_sink", "projection_similarity", "expert_overlap", "residual_updates", "dyck_icl"
)  # fmt: skip
AT_SHOTS = "dyck_exact_match_k32"
AS_FAR = "untrained too"
CHOICES = {"queries": "{} queries", "content": "{}", "heads": "heads {}"}
"""How the value of an option that a figure depends on is written."""
NOTES = (
    "matches: our 95% interval meets the printed figure, known to half of its last digit; of a range, every layer's",
    "2 of 4 in: that many looped layers; untrained too: it goes as far; chance: uniform, shuffled tokens, popularity",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A printed figure of the mechanism, and the rows that measure it."""

    what: str
    figure: str
    """Its name under `mechanism` in the file of printed figures, with `visit_1` or `visit_2` after a dot. One figure is
    a mean, two are a range."""
    probe: str
    quantity: str
    where: Mapping[str, Cell]
    null: str
    samples: Sequence[str] = ("code", "dyck")
    """The paper takes its sink from Dyck prompts, the rest from validation tokens: the nearest here is code. The
    nearest comes first."""
    choices: Sequence[str] = ()
    """Options of the probe that the figure depends on."""
    of_top_k: bool = False
    """Both are numbers of experts, compared as shares of all that a token chooses."""


def _sink(part: str, figure: str, visit: int, *choices: str) -> Claim:
    return Claim(
        what=f"{part} mass, visit {visit}", figure=f"{figure}.visit_{visit}", probe=SINK, quantity=f"{part} mass",
        where={"visit": visit, "head": "mean"}, null="uniform", samples=("dyck",), choices=choices,
    )  # fmt: skip


def _projection(name: str, figure: str) -> Claim:
    return Claim(what=f"{name} cosine", figure=figure, probe=SIMILARITY, quantity=f"{name} cosine, raw",
                 where={"visit": "1 vs 2"}, null="shuffled", choices=("heads",))  # fmt: skip


def _update(what: str, figure: str, quantity: str) -> Claim:
    return Claim(what=what, figure=figure, probe=UPDATES, quantity=quantity,
                 where={"visit": "1 vs 2", "update": "layer"}, null="shuffled")  # fmt: skip


CLAIMS = (
    *(_sink("start", "bos_mass", visit, "queries") for visit in (1, 2)),
    *(_sink("content", "content_mass", visit, "queries", "content") for visit in (1, 2)),
    *(_projection(name, "q_k_cosine_across_visits") for name in "QK"),
    _projection("V", "v_cosine_across_visits"),
    Claim(what="share of experts kept", figure="experts_kept_of_8", probe=OVERLAP, quantity="experts shared",
          where={"visit": "1 vs 2"}, null="popularity", of_top_k=True),
    _update("update norm ratio", "residual_write_norm_ratio", "norm ratio, median"),
    _update("update cosine", "residual_write_cosine", "cosine"),
    _update("update cosine, mean", "residual_write_cosine_mean", "cosine"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A printed figure or range, times a scale."""

    figures: tuple[Figure, ...]
    scale: float = 1.0

    @property
    def ends(self) -> tuple[float, float]:
        """The figure twice, or both ends."""
        return self.figures[0].value * self.scale, self.figures[-1].value * self.scale

    @property
    def allowed(self) -> tuple[float, float]:
        """The range that rounding allows: half of the last digit more on either side."""
        return self.figures[0].bounds[0] * self.scale, self.figures[-1].bounds[1] * self.scale

    def text(self) -> str:
        """As it is printed, or scaled."""
        texts = [figure.text if self.scale == 1 else f"{figure.value * self.scale:.3g}" for figure in self.figures]
        return " to ".join(texts)


class Ours(dict[str, float]):
    """`value`, `low` and `high` of one row, scaled."""


def side(ours: Ours, allowed: tuple[float, float]) -> str:
    """Whether an interval lies `lower` or `higher` than a range; empty where they meet."""
    return "lower" if ours["high"] < allowed[0] else "higher" if ours["low"] > allowed[1] else ""


def verdict(ours: Sequence[Ours], allowed: tuple[float, float]) -> tuple[Answer, str]:
    """Whether a mean, or every layer, meets the printed range, and on which side those lie that do not."""
    sides = [side(each, allowed) for each in ours]
    outside = " and ".join(dict.fromkeys(word for word in sides if word))
    if not outside:
        return "matches", ""
    inside = f"; {sides.count('')} of {len(ours)} in" if len(ours) > 1 else ""
    return "differs", outside + inside


def reaches(value: float, ends: tuple[float, float], null: float) -> bool:
    """Whether a value is at least as far from the null as the near end of a range that lies on one side of it."""
    return value >= ends[0] > null or value <= ends[1] < null


def rows(results: Results) -> list[Record]:
    """A row for each claim and each kind of samples that was measured, in the paper's order."""
    found = [
        _compared(claim, samples, results[samples, claim.probe])
        for claim in CLAIMS
        for samples in claim.samples
        if (samples, claim.probe) in results
    ]
    shots = [measured for (_, probe), measured in results.items() if probe == DYCK]
    return found + [row for measured in shots for row in _at_shots(measured)]


def _compared(claim: Claim, samples: str, measured: Measured) -> Record:
    paper_scale = scale = 1.0
    if claim.of_top_k:
        paper_scale = 1 / printed.integer("architecture", "top_k")
        scale = 1 / measured.subjects[0].architecture.top_k
    paper = Printed(figures=printed.figures("mechanism", *claim.figure.split(".")), scale=paper_scale)
    where = {"quantity": claim.quantity, **claim.where}
    (mean, *_), layers = (_rows(measured.results[0].rows(), where, level) or [{}] for level in ("headline", "layer"))
    ours = [_ours(row, scale) for row in (layers if len(paper.figures) > 1 else [mean])]
    of_untrained = [result for subject, result in _pairs(measured) if subject.untrained]
    untrained = (
        _scaled(next(iter(_rows(of_untrained[0].rows(), where, "headline")), {}), scale) if of_untrained else None
    )
    null = _scaled({"value": mean.get(NULL_PREFIX + claim.null)}, scale)
    choices = [CHOICES[name].format(str(getattr(measured.options, name)).replace("_", " ")) for name in claim.choices]
    return _row(claim.what, samples, paper, [each for each in ours if each], null, untrained,
                reason=str(mean.get("note", "")), choices=", ".join(choices),
                nearest=samples == claim.samples[0])  # fmt: skip


def _pairs(measured: Measured) -> list[tuple[Subject, Result]]:
    return list(zip(measured.subjects, measured.results, strict=True))


def _row(
    what: str,
    samples: str,
    paper: Printed,
    ours: Sequence[Ours],
    null: float | None,
    untrained: float | None,
    *,
    reason: str,
    choices: str = "",
    nearest: bool = True,
) -> Record:
    answer, note = verdict(ours, paper.allowed) if ours else ("not testable", reason)
    if untrained is not None and null is not None and reaches(untrained, paper.ends, null):
        note = "; ".join([*([note] if note else []), AS_FAR])
    values = [each["value"] for each in ours]
    return {
        "figure": what, "on": samples, "nearest": nearest, "paper": paper.text(), "least": min(values, default=None),
        "most": max(values, default=None), "low": ours[0]["low"] if len(ours) == 1 else None,
        "high": ours[0]["high"] if len(ours) == 1 else None, "layers": len(ours) if len(paper.figures) > 1 else None,
        "chance": null, "untrained": untrained, "verdict": answer, "choices": choices, "note": note,
    }  # fmt: skip


def _at_shots(measured: Measured) -> list[Record]:
    """Exact match at the paper's number of demonstrations, by the looped network and by its Baseline."""
    wanted = int(AT_SHOTS.rpartition("k")[2])
    context = measured.subjects[0].architecture.context
    reason = f"{most_shots(DyckOptions(), context)} shots fit the context of {context} tokens"
    where: dict[str, Cell] = {"quantity": "exact match", "queries": "all", "shots": wanted}
    found = []
    for architecture in printed.names("downstream", AT_SHOTS):
        once = architecture == "baseline"
        scored = [result for subject, result in _pairs(measured)
                  if not subject.untrained and bool(subject.architecture.loops) != once]  # fmt: skip
        if scored:
            paper = Printed(figures=printed.figures("downstream", AT_SHOTS, architecture))
            ours = [_ours(row, 1.0) for row in _rows(scored[0].rows(), where, "headline")]
            what = f"Dyck at {wanted} shots, {architecture}"
            found.append(_row(what, "dyck", paper, ours, None, None, reason=reason))
    return found


def _rows(rows: Sequence[Record], where: Mapping[str, Cell], level: str) -> list[Record]:
    """The rows of a level with these columns, at the looped layers alone."""
    headline = [row for row in rows if row["level"] == "headline" and where.items() <= row.items()]
    if level == "headline":
        return headline
    looped = _numbers(str(headline[0].get("layers"))) if headline else set()
    return [row for row in rows if row["level"] == level and where.items() <= row.items()
            and _numbers(str(row.get("layers"))) <= looped]  # fmt: skip


def _numbers(layers: str) -> set[int]:
    """The layers that a row names: `looped 3-5, 8` -> 3 4 5 8."""
    found: set[int] = set()
    for part in layers.replace(",", " ").split():
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _scaled(row: Record, scale: float) -> float | None:
    value = row.get("value")
    return value * scale if isinstance(value, float) else None


def _ours(row: Record, scale: float) -> Ours:
    """Empty where the row has no number; an interval that is not known is the value."""
    numbers = {name: row.get(name) for name in ("value", "low", "high")}
    value = numbers["value"]
    if not isinstance(value, float):
        return Ours()
    return Ours({name: (cell if isinstance(cell, float) else value) * scale for name, cell in numbers.items()})


def table(card: Sequence[Record], name: str) -> Table:
    """The comparison on the samples nearest to the paper's, as a person reads it; `name` is the network's."""
    body = []
    for row in card:
        if not row["nearest"]:
            continue
        least, most, low, high = (report.cell_text(row[cell]) for cell in ("least", "most", "low", "high"))
        ours = (
            f"{least} to {most}" if row["layers"] else f"{least} [{low}, {high}]" if row["low"] is not None else least
        )
        remarks = "; ".join(str(row[cell]) for cell in ("choices", "note") if row[cell])
        cells = [
            row["figure"],
            row["on"],
            row["paper"],
            ours,
            *(report.cell_text(row[cell]) for cell in ("chance", "untrained")),
        ]
        body.append([*map(str, cells), str(row["verdict"]), remarks])
    columns = ["", "on", "paper", "ours", "chance", "untrained", "verdict", "choices and notes"]
    return Table(f"The paper's figures against {name}", columns, body, NOTES)
