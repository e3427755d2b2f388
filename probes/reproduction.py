"""Does what the paper reports show here? Each printed figure beside ours, with a verdict.

    python -m probes.reproduction --pair SMELT BASELINE [SMELT BASELINE ...]

Several pairs are seeds: every number is their mean, and its interval is over pairs. Verdicts come from the numbers:

    matches         the 95% interval of our mean meets the printed mean; of a range, that of every looped layer
    differs         it does not; the note says on which side, and how many layers are inside
    not testable    not by these networks: so many demonstrations do not fit the context, there is no second visit, it
                    takes a sweep over budgets, or the interval holds the printed figure and chance alike

`chance` is the null of the measure: uniform attention, shuffled tokens, for experts their popularity. What the
untrained network does as well is no finding about training: the note says so where it lies, seen from chance, at least
as far out as the near end of the printed range. `Baseline` is its number on the same layers, `equal depth` that of its
layers where the second visit runs, counted in executed layers; of updates, what consecutive layers that run once do.
The choices that a figure depends on stand in its row.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from probes.running import catalog, report
from probes.running.claims import (
    CLAIMS,
    DOMAINS,
    DYCK,
    FEW_SHOT,
    LENGTH,
    OTHERS,
    OVERLAP,
    SIMILARITY,
    SINK,
    UPDATES,
    Claim,
    paper_figures,
)
from probes.running.command import COUNTING, Measured, measure_set
from probes.running.depth import AT_DEPTH, at_depth, layers_of
from probes.running.probe import is_choosing, refusal
from probes.running.seeds import over_seeds
from probes.running.source import Source, Subject, open_subjects, sample_sets
from probes.running.verdicts import Ours, Printed, reaches, verdict
from probes.statistics.grid import Cell
from probes.statistics.quantities import NULL_PREFIX, Record, as_table
from smelt_interp.architecture import Architecture
from smelt_interp.data.datasets import DataOptions
from smelt_interp.data.dyck import DyckOptions, most_shots
from smelt_interp.errors import UserError, run_command
from smelt_interp.input_files import read_input
from smelt_interp.paper import printed
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.output_files import make_folder
from smelt_interp.terminal.tables import Table, print_table
from smelt_interp.validation import Seed, Threads, different, validated

Results = Mapping[tuple[str, str], Sequence[Measured]]
"""What was measured, by the name of the samples and of the probe: of each pair."""
AT_SHOTS = "dyck_exact_match_k32"
SCHEMA, CARD = "smelt.reproduction", "reproduction.json"
MOST_BYTES = 10**7
AS_FAR, NO_POWER = "untrained too", "chance too"
CHOICES = {"queries": "{} queries", "content": "{}", "heads": "heads {}"}
"""How the value of an option that a figure depends on is written."""
BASELINE = "baseline"
BESIDE = ("chance", BASELINE, "equal_depth", "untrained")
"""What stands beside ours, where there is room for all of it."""
NOTES = (
    "matches: our 95% interval meets the printed figure, known to half of its last digit; of a range, every layer's",
    "2 of 4 in: so many looped layers; untrained too: it goes as far; chance too: the interval holds it (uniform, "
    "shuffled tokens, popularity)",
    "equal depth: the Baseline's layers where visit 2 runs; of updates, consecutive layers that run once",
)


# Rows of networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One probe's rows of each kind of network, over all pairs; none where there is no such network."""

    architecture: Architecture
    options: object
    ours: Sequence[Record]
    baseline: Sequence[Record]
    untrained: Sequence[Record]
    over_baseline: Sequence[Record]


def answers(pairs: Sequence[Measured]) -> Answers:
    """The rows of the first network, its Baseline and itself untrained, over pairs."""

    def at(measured: Measured, *, untrained: bool) -> int | None:
        others = list(enumerate(measured.subjects))[1:]
        return next((index for index, subject in others if subject.untrained == untrained
                     and (untrained or not subject.architecture.loops)), None)  # fmt: skip

    def rows_at(where: Sequence[int | None]) -> list[list[Record]]:
        return [each.results[index].rows() for each, index in zip(pairs, where, strict=True) if index is not None]

    baselines, untrained = ([at(each, untrained=which) for each in pairs] for which in (False, True))
    gains = [each.over(each.results[index]) for each, index in zip(pairs, baselines, strict=True) if index is not None]
    ours, *others = ([over_seeds(rows) if rows else [] for rows in (rows_at([0] * len(pairs)), rows_at(baselines),
                                                                    rows_at(untrained), gains)])  # fmt: skip
    baseline, of_untrained, over = others
    architecture = pairs[0].subjects[0].architecture
    ours, _ = at_depth(ours, architecture, baseline, BASELINE)
    return Answers(architecture=architecture, options=pairs[0].options, ours=ours, baseline=baseline,
                   untrained=of_untrained, over_baseline=over)  # fmt: skip


def rows(results: Results) -> list[Record]:
    """A row for each claim and each kind of samples that was measured, in the paper's order."""
    found = [
        _compared(claim, samples, answers(results[samples, claim.probe]))
        for claim in CLAIMS
        for samples in claim.samples
        if (samples, claim.probe) in results
    ]
    shots = [answers(measured) for (_, probe), measured in results.items() if probe == DYCK]
    return [row for row in found if row] + [row for each in shots for row in _at_shots(each)]


def untestable(card: Sequence[Record], reasons: Mapping[str, str]) -> list[Record]:
    """Rows of the claims that a card lacks, with the reason by probe, and of what no pair can show."""
    have = {row["figure"] for row in card}
    lacking = [(claim.what, claim.paper, reasons.get(claim.probe, "takes a Baseline")) for claim in CLAIMS
               if claim.what not in have]  # fmt: skip
    others = [(what, paper_figures(*path), reason) for what, path, reason in OTHERS]
    return [_row(what, "", paper, [], reason=reason) for what, paper, reason in (*lacking, *others)]


def _compared(claim: Claim, samples: str, found: Answers) -> Record:
    """One claim on one kind of samples; empty where it takes a Baseline and there is none."""
    paper, scale = claim.paper, claim.scale
    if claim.of_top_k:
        paper = replace(paper, scale=1 / printed.integer("architecture", "top_k"))
        scale = 1 / found.architecture.top_k
    where = {"quantity": claim.quantity, **claim.where}
    of_ours = found.over_baseline if claim.over_baseline else found.ours
    if not of_ours:
        return {}
    (mean, *_), layers = (_rows(of_ours, where, level) or [{}] for level in ("headline", "layer"))
    if claim.probe == LENGTH and not mean:
        return {}
    in_layers = len(paper.figures) > 1 and not claim.over_baseline
    ours = [_ours(row, scale) for row in (layers if in_layers else [mean])]
    choices = [CHOICES[name].format(str(getattr(found.options, name)).replace("_", " ")) for name in claim.choices]
    once = {**where, "visit": 1} if isinstance(claim.where.get("visit"), int) else where
    baseline = {} if claim.over_baseline else next(iter(_rows(found.baseline, once, "headline")), {})
    untrained = {} if claim.over_baseline else next(iter(_rows(found.untrained, where, "headline")), {})
    return _row(
        claim.what, samples, paper, [each for each in ours if each],
        null=_scaled({"value": mean.get(NULL_PREFIX + claim.null)}, scale), untrained=_scaled(untrained, scale),
        baseline=_scaled(baseline, scale), equal_depth=_equal_depth(claim, mean),
        reason=str(mean.get("note", "")), choices=", ".join(choices), nearest=samples == claim.samples[0],
    )  # fmt: skip


def _equal_depth(claim: Claim, mean: Record) -> float | None:
    """The Baseline's mean over its layers at the executed depths of the later visit, as far as it is so deep; of
    updates, what consecutive unlooped layers do."""
    visit = claim.where.get("visit")
    later = isinstance(visit, int) and visit > 1
    null = "unlooped" if claim.probe == UPDATES else f"{BASELINE}{AT_DEPTH}" if later else ""
    return _scaled({"value": mean.get(f"{NULL_PREFIX}{null}")}, 1.0)


def _row(
    what: str,
    samples: str,
    paper: Printed,
    ours: Sequence[Ours],
    *,
    null: float | None = None,
    untrained: float | None = None,
    baseline: float | None = None,
    equal_depth: float | None = None,
    reason: str,
    choices: str = "",
    nearest: bool = True,
) -> Record:
    answer, note = verdict(ours, paper.allowed) if ours else ("not testable", reason)
    if answer == "matches" and len(ours) == 1 and null is not None and ours[0]["low"] <= null <= ours[0]["high"]:
        answer, note = "not testable", NO_POWER
    if untrained is not None and null is not None and reaches(untrained, paper.ends, null):
        note = "; ".join([*([note] if note else []), AS_FAR])
    values = [each["value"] for each in ours]
    return {
        "figure": what, "on": samples, "nearest": nearest, "paper": paper.text(), "least": min(values, default=None),
        "most": max(values, default=None), "low": ours[0]["low"] if len(ours) == 1 else None,
        "high": ours[0]["high"] if len(ours) == 1 else None, "layers": len(ours) if len(ours) > 1 else None,
        "chance": null, BASELINE: baseline, "equal_depth": equal_depth, "untrained": untrained, "verdict": answer,
        "choices": choices, "note": note,
    }  # fmt: skip


def _at_shots(found: Answers) -> list[Record]:
    """Exact match at the paper's number of demonstrations, by the looped network and by its Baseline."""
    wanted = int(AT_SHOTS.rpartition("k")[2])
    context = found.architecture.context
    reason = f"{most_shots(DyckOptions(), context)} shots fit the context of {context} tokens"
    where: dict[str, Cell] = {"quantity": "exact match", "queries": "all", "shots": wanted}
    of_kind = (
        {"smelt": found.ours, "baseline": found.baseline} if found.architecture.loops else {"baseline": found.ours}
    )
    return [
        _row(f"Dyck at {wanted} shots, {kind}", "dyck", paper_figures("downstream", AT_SHOTS, kind),
             [_ours(row, 1.0) for row in _rows(rows, where, "headline")], reason=reason)
        for kind, rows in of_kind.items() if rows
    ]  # fmt: skip


def _rows(rows: Sequence[Record], where: Mapping[str, Cell], level: str) -> list[Record]:
    """The rows of a level with these columns, at the looped layers alone."""
    headline = [row for row in rows if row["level"] == "headline" and where.items() <= row.items()]
    if level == "headline":
        return headline
    looped = set(layers_of(headline[0])) if headline else set()
    return [row for row in rows if row["level"] == level and where.items() <= row.items()
            and looped.issuperset(layers_of(row))]  # fmt: skip


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


def table(card: Sequence[Record], name: str, nulls: Sequence[str] = ("chance", "untrained")) -> Table:
    """The comparison on the samples nearest to the paper's, as a person reads it; `name` is the network's, `nulls` the
    columns after ours."""
    body = []
    for row in card:
        if not row["nearest"]:
            continue
        least, most, low, high = (report.cell_text(row[cell]) for cell in ("least", "most", "low", "high"))
        ours = (
            f"{least} to {most}" if row["layers"] else f"{least} [{low}, {high}]" if row["low"] is not None else least
        )
        remarks = "; ".join(str(row[cell]) for cell in ("choices", "note") if row[cell])
        cells = [row["figure"], row["on"], row["paper"], ours, *(report.cell_text(row[cell]) for cell in nulls)]
        body.append([*map(str, cells), str(row["verdict"]), remarks])
    columns = ["", "on", "paper", "ours", *(name.replace("_", " ") for name in nulls), "verdict", "choices and notes"]
    return Table(f"The paper's figures against {name}", columns, body, NOTES[: 3 if "equal_depth" in nulls else 2])


# The command


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the command wrote."""

    name: str
    rows: list[Record]
    intervals: str
    command: str


def read_card(folder: Path) -> Card:
    """The card in a folder. Raises UserError where there is none, or something else."""
    path = folder / CARD
    try:
        said = json.loads(read_input(path, "a card", MOST_BYTES))
        rows_of_card, shown = said["rows"], [Path(smelt).name for smelt, _ in said["pairs"]]
        columns = {"figure", "on", "nearest", "paper", "least", "most", "low", "high", "layers", *BESIDE, "verdict",
                   "choices", "note"}  # fmt: skip
        if said["schema"] != SCHEMA or not all(columns <= row.keys() for row in rows_of_card):
            raise ValueError(f"it is no {SCHEMA}")
        return Card(name=" and ".join(shown), rows=rows_of_card, intervals=str(said["intervals"]),
                    command=str(said["command"]))  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} must be what probes.reproduction --out wrote; {error!s:.80}; write it again") from None


@validated
class CardOptions:
    """Which pairs, and how much is measured."""

    pair: tuple[tuple[Path, Path], ...] = ()
    """Folders of a looped network and its Baseline, pair after pair; several are seeds."""
    samples: Annotated[int, Field(ge=2, le=10**6)] = 64
    """Rows of text, and of Dyck prompts."""
    episodes: Annotated[int, Field(ge=2, le=10**6)] = 256
    """Dyck episodes at each number of shots."""
    items: Annotated[int, Field(ge=2, le=10**6)] = 128
    """Items of each choice task."""
    seed: Seed = 0
    """Of the samples, and of the first pair's untrained network."""
    threads: Threads = 1
    out: Path | None = None
    """Folder for reproduction.json and reproduction.csv."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        for smelt, baseline in self.pair:
            if smelt == baseline:
                raise UserError(f"a pair must be two networks; got {smelt} twice")
        if self.pair:
            different("the looped networks of pairs", tuple(smelt.resolve() for smelt, _ in self.pair))


SETS: dict[str, tuple[str, ...]] = {
    "dyck": (SINK,),
    "code": (SIMILARITY, OVERLAP, UPDATES, DOMAINS, LENGTH),
    "dyck-shots": (DYCK,),
    "tasks": (FEW_SHOT,),
}
"""Which probes are measured on which samples: those nearest to the paper's."""


def _data(options: CardOptions, name: str, architecture: Architecture) -> DataOptions:
    """The samples of a set; of Dyck, every number of shots that fits, up to the paper's."""
    probe = catalog.load(SETS[name][0])
    rows = {"dyck-shots": options.episodes, "tasks": options.items}.get(name, options.samples)
    data = replace(probe.DATA, samples=rows, seed=options.seed)
    if name == "dyck-shots":
        most = most_shots(DyckOptions(), architecture.context)
        shots = tuple(each for each in (*data.shots, 16, 32) if each <= most)
        return replace(data, shots=shots, length=architecture.context)
    data = replace(data, length=min(data.length, architecture.context))
    return data if name == "tasks" else replace(data, data=(name,))


def measure_pair(options: CardOptions, number: int) -> tuple[dict[tuple[str, str], Measured], dict[str, str]]:
    """Everything about one pair, and why a probe cannot measure it."""
    smelt, baseline = options.pair[number]
    source = Source(ckpt=smelt, against=(baseline,), threads=options.threads)
    subjects: tuple[Subject, ...] = open_subjects(source, options.seed + number)
    architecture = subjects[0].architecture
    found: dict[tuple[str, str], Measured] = {}
    reasons: dict[str, str] = {}
    for name, names in SETS.items():
        probes = {each: (probe := catalog.load(each), probe.Options()) for each in names}
        reasons |= {each: reason for each, (probe, _) in probes.items()
                    if (reason := refusal(probe.needs(architecture), architecture))}  # fmt: skip
        able = {each: asked for each, asked in probes.items() if each not in reasons}
        data = _data(options, name, architecture)
        probe, of_probe = probes[names[0]]
        try:
            choose = probe.choose_samples(subjects[0], data, of_probe) if is_choosing(probe) else None
            (samples, *_) = choose or sample_sets(subjects[0], data)
        except UserError as error:  # such as tasks that do not fit the context
            reasons |= dict.fromkeys(names, str(error))
            continue
        if able:
            found |= {(name, each): measured for each, measured in measure_set(able, samples, subjects).items()}
    return found, reasons


def main() -> None:
    """Measure every pair, print the card, and write what --out asks for."""
    options = parse(CardOptions, prog="python -m probes.reproduction", description=__doc__ or "")
    if not options.pair:
        raise UserError("--pair must name a looped network and its Baseline; got none")
    if options.out is not None:
        make_folder(options.out)  # before minutes are spent
    pairs = [measure_pair(options, number) for number in range(len(options.pair))]
    weights = [str(each.subjects[0].described["weights"]) for found, _ in pairs for each in [*found.values()][:1]]
    if len(set(weights)) < len(weights):
        raise UserError("pairs must be of different trainings; got looped networks with the same weights")
    shared = [key for key in pairs[0][0] if all(key in found for found, _ in pairs)]
    card = rows({key: [found[key] for found, _ in pairs] for key in shared})
    card += untestable(card, {probe: reason for _, reasons in pairs for probe, reason in reasons.items()})
    command = shlex.join(["python", "-m", "probes.reproduction", *sys.argv[1:]])
    kind = f"seeds, {len(pairs)} pairs" if len(pairs) > 1 else "documents"
    document = {"schema": SCHEMA, "counting": COUNTING, "pairs": [list(map(str, pair)) for pair in options.pair],
                "intervals": f"95%, over {kind}", "rows": card, "command": command}  # fmt: skip
    if options.out is not None:
        report.write_text(options.out / CARD, report.json_text(document))
        report.write_text(options.out / "reproduction.csv", as_table(card).to_csv(index=False))
    if options.json:
        sys.stdout.write(report.json_text(document))
        return
    name = " and ".join(smelt.resolve().name for smelt, _ in options.pair)
    print_table(table(card, name, BESIDE))
    print(f"[..] is a 95% interval over {kind}")


if __name__ == "__main__":
    run_command(main)
