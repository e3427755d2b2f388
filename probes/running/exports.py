"""What leaves a page as a file: a name and a header that say what it is of, whatever folder it ends up in."""

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from probes.statistics.grid import Cell

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

Facts = Mapping[str, object]
"""What a file is of, by name: capture, digest, layer, options."""


def result_facts(document: Mapping[str, object]) -> dict[str, object]:
    """Of a result: each network with its digest, every option, the command."""
    networks = document["networks"]
    options = document["options"]
    assert isinstance(networks, list)
    assert isinstance(options, dict)
    seen = [f"{each['name']} {each.get('digest', each.get('weights'))}" for each in networks]
    return {"probe": document["probe"], "networks": seen, **options, "command": document["command"]}


def file_name(*parts: object, suffix: str) -> str:
    """The parts as the name of a file on any system."""
    words = [re.sub(r"[^A-Za-z0-9_.=-]+", "-", str(part)).strip("-.") for part in parts]
    return "_".join(word[:60] for word in words if word) + f".{suffix}"


def lines(facts: Facts) -> list[str]:
    """A line each: `capture: demo-smelt-dyck`."""
    return [f"{name}: {_text(value)}" for name, value in facts.items()]


def csv_text(frame: "DataFrame", facts: Facts, *, index: bool = False) -> str:
    """A table under its facts, each a comment (`pandas.read_csv(..., comment="#")`)."""
    text: str = frame.to_csv(index=index)
    return "".join(f"# {line}\n" for line in lines(facts)) + text


def json_text(values: Mapping[str, object], facts: Facts) -> str:
    """Values beside their facts."""
    return json.dumps({"of": {name: _plain(value) for name, value in facts.items()}, **values}, allow_nan=False) + "\n"


def html_text(figures: Iterable["Figure"], title: str, facts: Facts) -> str:
    """Figures as one page that needs nothing else."""
    parts = [figure.to_html(include_plotlyjs=not at, full_html=False) for at, figure in enumerate(figures)]
    header = escape("\n".join(lines(facts)))
    page = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title>\n<pre>{header}</pre>\n'
    return page + "\n".join(parts) + "\n"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else " ".join(str(value).split())


def _plain(value: object) -> Cell | list[Cell]:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]  # type: ignore[misc]  # flat
    return value if isinstance(value, str | int | float) or value is None else str(value)
