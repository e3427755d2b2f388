"""The captures of a folder, from their manifests alone: what each is, its stored results, what is wrong with others."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import streamlit as st

from app.widgets.address import link_to, query_of
from app.widgets.capture_folder import KEY, capture_names, chosen_capture
from app.widgets.keeper import show_keeper
from app.widgets.recorder import show_recorder, show_recording
from cache import background
from cache.keeping import described_sites, is_pinned
from cache.store import Capture, is_unfinished
from probes.running import catalog
from probes.running.stored import MOST_BYTES
from probes.statistics.grid import headline_loops, loop_name
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input
from smelt_interp.plan import label
from smelt_interp.terminal.tables import compact

TABLE = """<style>
table.list {border-collapse: collapse; font-size: 0.9rem}
table.list :is(th, td) {padding: 0.25rem 0.6rem; text-align: left; border-bottom: 1px solid #8886; font-weight: inherit}
table.list th {white-space: nowrap}
</style>"""


def captures_page(pages: Mapping[str, st.Page], folder: Path) -> None:
    """The page. `pages`: those that show a stored result, by the name of the probe that wrote it, and the overview."""
    st.title("Captures")
    st.markdown("A capture is what one network did with one set of samples, every visit kept apart.")
    captures, recordings, problems = _opened(folder)
    if captures:
        captures.sort(key=lambda capture: not is_pinned(capture.path))
        _table([_summary(capture) for capture in captures])
    started = [path for path in background.RUNNING if path.parent == folder and not is_unfinished(path)]
    for path in (*(folder / name for name in recordings), *started):
        show_recording(path)
    for said in ("recording failed", "keeper said"):
        if said in st.session_state:
            st.error(st.session_state.pop(said))
    for problem in problems:
        st.warning(problem, icon=":material/broken_image:")
    capture = None if st.session_state.get(KEY) in recordings else chosen_capture(folder)
    if capture is not None:
        _details(folder, capture, pages)
    with st.expander("Record a capture"):
        show_recorder(folder)


def _opened(folder: Path) -> tuple[list[Capture], list[str], list[str]]:
    """Those that open, the names of those that are being recorded, and for each other one the line that says why not.

    Manifests alone are read, whatever the shards weigh.
    """
    captures, recordings, problems = [], [], []
    for name in capture_names(folder):
        if is_unfinished(folder / name):
            recordings.append(name)
            continue
        try:
            captures.append(Capture(folder / name))
        except UserError as error:
            problems.append(str(error))
    return captures, recordings, problems


def _summary(capture: Capture) -> dict[str, str | int]:
    return {
        "capture": f"{capture.path.name}{' (pinned)' if is_pinned(capture.path) else ''}",
        "checkpoint": _checkpoint(capture),
        "network": _network(capture),
        "samples": len(capture),
        "data": _data(capture),
        "tokens": capture.manifest.num_tokens,
        "steps": len(capture.architecture.steps),
        "sites": len(capture.sites),
        "size": f"{compact(sum(shard.num_bytes for shard in capture.manifest.shards), digits=3)}B",
        "results": len(_result_files(capture)),
        "digest": capture.digest[:12],
    }


def _checkpoint(capture: Capture) -> str:
    name = str(capture.request.get("checkpoint", "-"))
    return f"{name}, untrained" if "untrained_seed" in capture.request else name


def _network(capture: Capture) -> str:
    network = capture.architecture
    loops = ", ".join(loop_name(loop, network) for loop in headline_loops(network))
    visits = max(step.visit for step in network.steps) + 1
    experts = f"{network.top_k} of {network.num_experts} experts" if network.num_experts else "dense"
    visited = f"{visits} visits" if visits > 1 else "1 visit"
    return f"{network.num_layers} layers, {loops}, {visited}; {network.num_heads} heads; {experts}"


def _data(capture: Capture) -> str:
    """The names of its data, as its request has them: the samples themselves are not read."""
    options = capture.request.get("data")
    names = options.get("data", ()) if isinstance(options, dict) else ()
    return ", ".join(map(str, names)) if isinstance(names, (list, tuple)) and names else "-"


def _details(folder: Path, capture: Capture, pages: Mapping[str, st.Page]) -> None:
    st.subheader(capture.path.name)
    if differing := show_keeper(folder, capture, pages):
        _table(differing)
    st.markdown(f"{_checkpoint(capture)}: {_network(capture)}")
    if capture.manifest.command:
        st.markdown("**Recorded by**")
        st.code(capture.manifest.command, language=None, wrap_lines=True)
    results = _result_files(capture)
    if results:
        st.markdown("**Results stored beside it**")
    for path in results:
        _result(path, capture, pages)
    st.markdown("**Sites**")
    columns = ("site", "one sample", "stored as", "steps", "heads")
    _table([dict(zip(columns, row, strict=True)) for row in described_sites(capture.manifest)])
    st.markdown("**Plan**")
    st.markdown(" → ".join(label(step) for step in capture.architecture.steps))
    st.markdown(f"**Digest** `{capture.digest}`")
    with st.expander("Architecture and request"):
        st.json({"architecture": capture.architecture.to_json(), "request": capture.request})


def _table(rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of the same columns. Streamlit's own tables import pandas, for which the first page need not wait."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row.values())}</tr>" for row in rows)
    st.html(f"{TABLE}<table class='list'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _result_files(capture: Capture) -> list[Path]:
    return sorted((capture.path / "results").glob("*.json"))


def _result(path: Path, capture: Capture, pages: Mapping[str, st.Page]) -> None:
    """One line: the probe with a link that opens it with these options, and the command that wrote it."""
    try:
        stored = json.loads(read_input(path, "a result", MOST_BYTES))
        name, title, line = (str(stored[key]) for key in ("probe", "title", "command"))
        query = query_of(stored["options"])
        digest = stored["networks"][0]["digest"]
        others = [Path(network["capture"]).name for network in stored["networks"][1:]]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        st.warning(f"a result must be the JSON that a probe wrote; got {path}: measure it again")
        return
    if digest != capture.digest:
        st.warning(f"a result must be of this capture; got {path} of another: measure it again")
        return
    asked = {"against": others or [""], **query} if name in (*catalog.NAMES, *catalog.APART) else {}
    link_to(pages, name, title, **{KEY: capture.path.name, **asked})
    st.code(line, language=None, wrap_lines=True)
