"""Answers of probes about captures: those that are kept are read, others are measured once."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st

from app.widgets.options import option_words
from cache.store import Capture
from probes.running import catalog, command
from probes.running.probe import read_sites, refusal
from probes.running.source import Source
from probes.running.stored import stored_result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Document = dict[str, object]
"""A result as `command.describe` writes it: what a page shows is made of it, whether measured now or kept."""
Figures = Mapping[tuple[str, str], "dict[str, Figure]"]
"""The probe's own figures, by data and network; empty for a result that was kept."""


class Answer(NamedTuple):
    """What a page shows, and the command that gives the same."""

    document: Document
    figures: Figures
    line: str


def answer_of(name: str, captures: Sequence[Capture], options: object, *, draw: bool = False) -> Answer:
    """What is kept of this question, or with `draw` and where nothing is what is measured now.

    Raises UserError for captures that cannot be measured.
    """
    kept, line = kept_answer(name, captures, options), command_of(name, captures, options)
    if kept is not None and not draw:
        return kept
    source = Source(capture=captures[0].path, against=tuple(each.path for each in captures[1:]))
    asked = command.Run(source=source, data=catalog.load(name).DATA, measure=options, output=command.Output())
    return Answer(*_measured(name, line, tuple(each.digest for each in captures), asked), line)


def kept_answer(name: str, captures: Sequence[Capture], options: object) -> Answer | None:
    """What is kept of this question; None where nothing is. Raises UserError for captures that were changed."""
    for each in captures:
        each.check_shards()  # a shard that was replaced has other numbers than those kept
    probe = catalog.load(name)
    able = [each for each in captures if not refusal(read_sites(probe, each.architecture, options), each.architecture)]
    stored = stored_result(captures[0].path, name, command.plain_options(options), [each.digest for each in able])
    return None if stored is None else Answer(stored, {}, command_of(name, captures, options))


def command_of(name: str, captures: Sequence[Capture], options: object) -> str:
    """The command that asks this."""
    capture, *others = (str(each.path) for each in captures)
    words = ["--capture", capture, *(["--against", *others] if others else [])]
    return shlex.join(["python", "-m", f"probes.{name}", *words, *option_words(options)])


@st.cache_data(max_entries=64, show_spinner="Measuring …", show_time=True)
def _measured(name: str, line: str, digests: tuple[str, ...], _asked: command.Run[object]) -> tuple[Document, Figures]:
    """The result and the probe's own figures. `line` and `digests` say all that they depend on."""
    measured = command.measure_all(name, catalog.load(name), _asked)
    figures = {
        (each.data.name, subject.name): result.figures
        for each in measured
        for subject, result in zip(each.subjects, each.results, strict=True)
    }
    for drawn in (figure for of_network in figures.values() for figure in of_network.values()):
        drawn.update_layout(title_text="", margin_t=50)  # the page has a title
    return command.describe(_asked, measured, line), figures
