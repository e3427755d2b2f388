"""The command that every probe has: read arguments, open networks, measure, print, write.

Options come from the dataclasses themselves: where the batches come from (`source.Source`), which samples (a probe's
data options), what is measured (the probe's `Options`), and what is done with the result (`Output`).
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, make_dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

import smelt_interp
from probes.running import catalog, report
from probes.running.contract import Level, Probe, Result, Row
from probes.running.source import Data, DataChoice, DataSet, Network, Source, data_sets, open_networks
from smelt_interp.errors import run_command
from smelt_interp.terminal.output_files import make_folder

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "smelt.result"
COUNTING = "layers, visits, heads and keys count from 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is done with the result."""

    json: bool = False
    """Print the result as JSON instead of a table."""
    out: Path | None = None
    """Folder to write the figures (HTML), the rows (CSV) and the result (JSON) to."""
    level: Level = "headline"
    """Rows of the table: headline; layer adds one a step, split parts of the samples; head adds one a step and head.
    CSV and JSON have all."""


class Arguments(Protocol):
    """The parsed command line."""

    source: Source
    data: DataChoice
    measure: object
    output: Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One data set, measured on every network."""

    data: DataSet
    networks: tuple[Network, ...]
    results: tuple[Result, ...]
    """One a network, in the same order."""

    def rows(self) -> list[Row]:
        """The first network's rows with the other networks' numbers beside them."""
        rows = self.results[0].rows()
        for network, result in zip(self.networks[1:], self.results[1:], strict=True):
            rows = report.beside(rows, result.rows(), network.name, once=network.config.num_visits == 1)
        return rows


def main(name: str, data_type: type = Data) -> None:
    """Run the probe's command on `sys.argv`; a user's mistake ends with one line and exit code 2.

    `data_type` is a frozen dataclass of options that is a `DataChoice`.
    """

    def command() -> None:
        run(name, sys.argv[1:], data_type)

    run_command(command)


def parse(name: str, probe: Probe, data_type: type, argv: Sequence[str]) -> Arguments:
    """The command line as dataclasses; help is their docstrings."""
    import tyro

    from smelt_interp.terminal import (
        command_line,  # tyro and what it brings are slow to import, and the dashboard parses nothing
    )

    parts = [("source", Source), ("data", data_type), ("measure", probe.Options), ("output", Output)]
    arguments = make_dataclass("Arguments", parts, frozen=True)
    parsed = command_line.parse(
        arguments,
        args=argv,
        prog=f"python -m probes.{name}",
        description=probe.__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return cast(Arguments, parsed)


def measure_all(probe: Probe, arguments: Arguments) -> tuple[Measured, ...]:
    """Every data set on every network. Raises UserError for what cannot be opened, read or measured."""
    networks = open_networks(arguments.source, int(getattr(arguments.data, "seed", 0)))
    return tuple(
        Measured(
            data=data,
            networks=networks,
            results=tuple(
                probe.measure(network.batches(data, probe.needs(network.config)), arguments.measure)
                for network in networks
            ),
        )
        for data in data_sets(networks[0], arguments.data)
    )


def run(name: str, argv: Sequence[str], data_type: type = Data) -> tuple[Measured, ...]:
    """The command of a probe, raising what `main` turns into an exit code; what it measured, one a data set."""
    probe = catalog.load(name)
    arguments = parse(name, probe, data_type, argv)
    if arguments.output.out is not None:
        make_folder(arguments.output.out)  # before minutes are spent
    measured = measure_all(probe, arguments)
    command = shlex.join(["python", "-m", f"probes.{name}", *argv])
    document = describe(name, probe, arguments, measured, command)
    text = report.json_text(document)
    if arguments.output.json:
        sys.stdout.write(text)
    else:
        report.print_tables(tables(probe, measured, arguments.output.level), remarks(arguments, measured))
    if arguments.output.out is not None:
        write_folder(arguments.output.out, name, probe, measured, text)
    if arguments.source.capture is not None:
        report.write_atomically(_beside_capture(arguments.source.capture, name, document, measured[0].networks), text)
    return measured


def tables(probe: Probe, measured: Sequence[Measured], level: Level) -> "list[Table]":
    """One terminal table a data set."""
    return [
        report.table(
            each.rows(),
            f"{probe.TITLE}: {each.networks[0].name} on {each.data.name} ({len(each.data)} samples)",
            report.short_names(each.networks[0].name, [network.name for network in each.networks[1:]]),
            level,
        )
        for each in measured
    ]


def remarks(arguments: Arguments, measured: Sequence[Measured]) -> list[str]:
    """What stands below the tables: the nulls that were not measured, and how to get them."""
    first, *others = measured[0].networks
    lines = [f"{COUNTING}; [..] is a 95% bootstrap interval over samples"]
    if not any(network.untrained for network in (first, *others)):
        if arguments.source.capture is None:
            lines.append("untrained network: left out by --no-untrained")
        else:
            way_out = "add --against a capture recorded with `python -m cache.record --untrained ...`"
            lines.append(f"untrained network: not measured; {way_out}")
    if first.config.num_visits > 1 and not any(network.config.num_visits == 1 for network in others):
        lines.append("Baseline: not measured; add --against CHECKPOINT_OR_CAPTURE")
    return lines


# JSON and files


def describe(
    name: str, probe: Probe, arguments: Arguments, measured: Sequence[Measured], command: str
) -> dict[str, object]:
    """The whole result with all that made it: options, sources with digests, versions, command."""
    return {
        "schema": SCHEMA,
        "probe": name,
        "title": probe.TITLE,
        "counting": COUNTING,
        "options": _plain(arguments.measure),
        "data_options": None if arguments.source.capture is not None else _plain(arguments.data),
        "networks": [
            {"name": network.name, "num_visits": network.config.num_visits, **network.described}
            for network in measured[0].networks
        ],
        "results": [
            {
                "data": each.data.name,
                "samples": len(each.data),
                "data_digest": each.data.digest(),
                "rows": each.rows(),
                "beside": {
                    network.name: result.rows()
                    for network, result in zip(each.networks[1:], each.results[1:], strict=True)
                },
            }
            for each in measured
        ],
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            "smelt-interp": smelt_interp.__version__,
            "numpy": np.__version__,
        },
        "command": command,
    }


def _plain(options: object) -> dict[str, object]:
    values = json.loads(json.dumps(asdict(options), default=str))  # type: ignore[call-overload]  # always a dataclass
    return cast("dict[str, object]", values)


def _beside_capture(capture: Path, name: str, document: dict[str, object], networks: Sequence[Network]) -> Path:
    """NAME.results/PROBE-DIGEST.json: the digest of what was asked of which captures, wherever they lie."""
    seen = [network.described.get("digest", network.described.get("weights")) for network in networks]
    asked = json.dumps([name, document["options"], seen], sort_keys=True)
    digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
    return capture.with_name(f"{capture.stem}.results") / f"{name}-{digest}.json"


def write_folder(folder: Path, name: str, probe: Probe, measured: Sequence[Measured], text: str) -> None:
    """PROBE.json, PROBE-DATA.csv for each data set, and PROBE.html with a figure for each data set and network."""
    report.write_atomically(folder / f"{name}.json", text)
    figures: list[str] = []
    for each in measured:
        report.write_atomically(folder / f"{name}-{Path(each.data.name).stem}.csv", report.csv_text(each.rows()))
        for network, result in zip(each.networks, each.results, strict=True):
            drawn = probe.figure(result)
            drawn.update_layout(title=f"{probe.TITLE}: {network.name} on {each.data.name}")
            figures.append(drawn.to_html(include_plotlyjs=not figures, full_html=False))
    page = f'<!doctype html><meta charset="utf-8"><title>{escape(probe.TITLE)}</title>\n'
    report.write_atomically(folder / f"{name}.html", page + "\n".join(figures) + "\n")
