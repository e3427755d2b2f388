"""Recording from a page: what it would take first, then the command's own process, and how far it is."""

import shlex
from pathlib import Path
from typing import get_args

import streamlit as st

from cache import background
from cache.keeping import recorded_bytes
from cache.store import is_unfinished, unfinished
from smelt_interp.config import ModelConfig
from smelt_interp.data.datasets import DataName, DataOptions
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES
from smelt_interp.terminal.tables import compact

CHECKPOINT = "checkpoint"
"""Of a run, where its network lies."""
FOLDERS = ("checkpoints", "pretrained", "runs")
"""Below the folder that the dashboard was started in, where networks are looked for."""
PLACES = ("*", f"*/{CHECKPOINT}", f"*/*/{CHECKPOINT}")
"""Where in them: a checkpoint itself, that of a run, and those of a pair's or sweep's runs."""
LONGEST = 100
"""Characters of a name: a folder's takes at most 255 bytes."""


def networks() -> list[str]:
    """Folders of checkpoints, as the command takes them."""
    found = [
        path for folder in FOLDERS for place in PLACES for path in sorted(Path(folder).glob(f"{place}/config.json"))
    ]
    return [str(path.parent) for path in found]


def show_recorder(folder: Path) -> None:
    """The choices, the size, the command, and the button that starts it."""
    found = networks()
    if not found:
        st.info(f"No checkpoint lies in {', '.join(FOLDERS)}: record with `python -m cache.record --ckpt FOLDER`.")
        return
    row = st.columns([2, 1, 1, 2])
    ckpt = row[0].selectbox("Checkpoint", found, _first_looped(found), key="record ckpt")
    data = row[1].selectbox("Data", get_args(DataName), key="record data")
    samples = row[2].number_input("Samples", 1, 1_000_000, 64, key="record samples")
    called = Path(ckpt).parent.name if Path(ckpt).name == CHECKPOINT else Path(ckpt).name
    offered = f"{called}-{data}-{samples}"  # until another is typed; a default would stay when the checkpoint changes
    name = row[3].text_input("Name", placeholder=offered, key="record name") or offered
    words = ["--ckpt", ckpt, "--data", data, "--samples", str(samples)]
    out = folder / name
    if Path(name).name != name or name.startswith(".") or not name.isprintable() or len(name) > LONGEST:
        st.error(f"a name of a capture must be that of a folder in {folder}; got {name!r:.60}")
        return
    st.markdown(_size(Path(ckpt), DataOptions(data=(data,), samples=samples)))
    st.code(shlex.join(["python", "-m", "cache.record", *words, "--out", str(out)]), language=None, wrap_lines=True)
    if st.button("Record", disabled=out.exists()):
        try:
            background.start(out, words)
        except UserError as error:
            st.error(str(error))
            return
        st.rerun()  # what it is doing stands above
    elif out.exists() and out not in background.RUNNING:
        st.caption(f"{out} is there: choose another name.")


def _first_looped(found: list[str]) -> int:
    """The place of the first network of ours that visits a layer more than once, or else the first."""
    for at, path in enumerate(found):
        try:
            if ModelConfig.load(Path(path) / "config.json").num_visits > 1:
                return at
        except UserError:  # another family's
            continue
    return 0


def _size(ckpt: Path, data: DataOptions) -> str:
    """What every default site of these samples takes; a network of another family is not opened to say that."""
    try:
        architecture = ModelConfig.load(ckpt / "config.json").architecture()
    except UserError:
        return "Of another family's network the command says its size when it has opened it."
    from cache.record import DEFAULT_SITES  # tyro comes with it

    length = min(data.length, architecture.context)
    size = recorded_bytes(architecture, [site for site in SITES if site in DEFAULT_SITES], data.samples, length)
    return f"At most {data.samples} × {length} tokens, about **{compact(size, digits=3)}B** before compression."


@st.fragment(run_every=2)
def show_recording(path: Path) -> None:
    """How far a recording is, looked at every few seconds; where this dashboard started it, also how it ended."""
    started = background.RUNNING.get(path)
    if started is not None and started.code is not None:
        if said := background.end(path):
            st.session_state["recording failed"] = said
        st.rerun()
    if not is_unfinished(path):
        if started is None:
            st.success(f"{path.name} is finished: reload this page")
        else:
            st.info(f"{path.name}: {started.last_line() or 'the network is being opened'}")
        return
    try:
        found = unfinished(path)
    except UserError as error:
        st.warning(str(error), icon=":material/broken_image:")
        return
    if found.num_samples:
        st.progress(found.share, f"{path.name}: {found.samples} of {found.num_samples} samples recorded")
    else:
        st.info(f"{path.name}: {found.samples} samples recorded")
    if found.command:
        st.caption("Recording now, or stopped; this goes on with it:" if started is None else "Recording now:")
        st.code(found.command, language=None, wrap_lines=True)
