"""Live: one's own prompt through a network as it is and under an edit, and the Python that does it."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import streamlit as st

from app.widgets.address import check_address, check_each_of, check_one_of
from app.widgets.canvas import show_canvas, tokens_of
from app.widgets.options import parse_option
from app.widgets.pending import mark_pending
from model.families.opening import Opening, open_network
from model.hooks.looped_model import LoopedModel
from probes.running import live
from probes.running.comparison import comparison_figure
from probes.running.exports import csv_text, file_name
from probes.running.live import EDITED, MOST_CHARACTERS, RANDOM, Change, Look
from smelt_interp.architecture import Architecture
from smelt_interp.costs.spans import LayerRange
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan

PROMPT = "The loop runs twice. The first visit looks at the start, the second visit looks at the"
OTHER = PROMPT.replace("start", "world")
EVERY = "every"
MOST_VISITS = 8
HINT = "Each token is coloured by what the edit does to its loss; point at one to read it."
Stamp = tuple[tuple[str, int, int], ...]


def live_page(root: Path) -> None:
    """The prompt, the network and the edit that the address names, and what they show."""
    st.title("Live")
    st.markdown("What does one edit of one visit do to your own prompt?")
    known = live.checkpoints_below(root)
    if not known:
        st.info(
            f"There is no checkpoint below `{root.resolve()}`: a folder with config.json and safetensors, of ours or "
            "of a family that transformers loads.", icon=":material/inbox:",
        )  # fmt: skip
        return
    asked, problem = None, ""
    try:
        with st.sidebar:
            asked = _choose(root, known)
    except UserError as error:
        problem = str(error)
    prompt, other = _prompts(patch=asked is not None and asked.change.kind == "patch")
    try:
        if asked is not None:
            _show(asked, prompt, other)
    except UserError as error:
        problem = str(error)
    if problem:
        st.error(problem)


class Asked(NamedTuple):
    """What the sidebar says."""

    name: str
    path: str
    stamp: Stamp
    loop: LoopedSpan | None
    network: LoopedModel
    change: Change


def _choose(root: Path, known: list[str]) -> Asked:
    """Raises UserError for a network that does not open."""
    first = live.first_to_show(root, known)
    check_one_of("network", known, first)
    name = st.selectbox("Network", known, known.index(first), key="network", bind="query-params")
    path, loop = str(root / name), _choose_loop()
    stamp = live.stamp_of(root / name)
    network = _network(path, stamp, loop)
    return Asked(name, path, stamp, loop, network, _choose_edit(network.architecture))


def _show(asked: Asked, prompt: str, other: str) -> None:
    """Raises UserError for a prompt or an edit that the network cannot take."""
    name, path, stamp, loop, network, change = asked
    made = live.made(network, change)
    look = _look(path, stamp, loop, prompt, other, change, network)
    _next_token(look)
    st.subheader("The prompt, by change of loss")
    _text(look)
    _start_mass(look)
    st.subheader("The same in Python")
    script = live.code(path, loop, prompt, made, other)
    st.code(script, language=None, wrap_lines=True)  # a language's colours are too pale for axe
    facts = {"network": name, "loop": str(loop), "prompt": prompt, "other": other, "edit": made.text}
    row = st.container(horizontal=True)
    files = {
        "Code": ("py", "text/x-python", lambda: script),
        "Tokens as CSV": ("csv", "text/csv", lambda: csv_text(look.tokens, facts)),
    }
    for called, (kind, mime, make) in files.items():
        saved = file_name("live", name, change.kind, suffix=kind)
        row.download_button(called, make, saved, mime, on_click="ignore", key=kind)


@st.cache_resource(max_entries=2, show_spinner="Opening the network …")
def _network(path: str, stamp: Stamp, loop: LoopedSpan | None) -> LoopedModel:
    """One for all visitors: each look takes its lock and leaves no hook. `stamp` says that the files are the same."""
    return open_network(path, Opening(loop=loop))


@st.cache_data(max_entries=32, show_spinner="Running …", hash_funcs={Change: str, LoopedSpan: str})
def _look(
    path: str, stamp: Stamp, loop: LoopedSpan | None, prompt: str, other: str, change: Change, _network: LoopedModel
) -> Look:
    """The network, which is not hashed, is said by path, stamp and loop."""
    return live.look(_network, prompt, live.made(_network, change).edit, other)


def _prompts(*, patch: bool) -> tuple[str, str]:
    """What was typed when Run was last pressed: a form, so that no click is lost to a page that moves under it."""
    for key, known in (("prompt", PROMPT), ("other", OTHER)):
        check_address(key, partial(_check_prompt, key), f"{known[:20]} ...")
    with st.form("prompts"):
        prompt = st.text_area("Prompt", PROMPT, height=90, max_chars=MOST_CHARACTERS, key="prompt", bind="query-params")
        other = ""
        if patch:
            other = st.text_area(
                "Patch from", OTHER, height=90, max_chars=MOST_CHARACTERS, key="other", bind="query-params",
                help="Another prompt of as many tokens: what the network has there at the same position is put in.",
            )  # fmt: skip
        st.form_submit_button("Run", type="primary")
    mark_pending([prompt, other] if patch else [prompt])
    return prompt, other


def _check_prompt(key: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{key} must be at most {MOST_CHARACTERS} characters; got {len(text)}")


def _choose_loop() -> LoopedSpan | None:
    """Layers that are run again, as `--loop` has them; only of a network that runs each layer once."""
    check_address("loop", LayerRange.parse, "none")
    words = st.text_input(
        "Loop", key="loop", bind="query-params", placeholder="none, or first-last",
        help="Of a network that runs each layer once: layers to run again with the weights that it has, as 12-17.",
    )  # fmt: skip
    if not words:
        return None
    layers = LayerRange.parse(words)
    row = st.columns(2)
    with row[0]:
        check_one_of("times", [str(times) for times in range(2, MOST_VISITS + 1)], 2)
        times = int(st.number_input("Visits", 2, MOST_VISITS, key="times", bind="query-params"))
    with row[1]:
        check_address("scale", _factor, "1/r")
        scale = st.text_input("Factor", "1/r", key="scale", bind="query-params", help="On updates of the loop.")
    return LoopedSpan(layers=layers, visits=times, factor=_factor(scale) or 1 / times)


def _factor(text: str) -> float | None:
    """None is one over the number of visits."""
    if text == "1/r":
        return None
    factor = parse_option("scale", text, float)
    if not (isinstance(factor, float) and 0 < factor <= 1):
        raise UserError(f"scale must be 1/r, or more than 0 and at most 1; got {text}")
    return factor


def _choose_edit(architecture: Architecture) -> Change:
    """One edit; on the page layers, visits and heads count from 1."""
    kinds = live.kinds_of(architecture)
    if not kinds:
        raise UserError(f"a network must have sites that can be edited; got {architecture.family}: choose another")
    check_one_of("edit", [*kinds], kinds[0])
    means = "; ".join(f"{name}: {live.WORDS[name]}" for name in kinds)
    kind = st.selectbox("Edit", kinds, key="edit", bind="query-params", help=means)
    st.caption(live.WORDS[kind])
    site, sites = "", live.sites_of(kind, architecture)
    if sites:
        check_one_of("site", sites, sites[0])
        site = st.selectbox("Site", sites, key="site", bind="query-params")
    numbers = [str(layer) for layer in range(1, architecture.num_layers + 1)]
    check_each_of("layers", numbers)
    layers = st.multiselect("Layers", numbers, key="layers", bind="query-params", placeholder="all on that visit")
    # What copies a first visit acts on later ones; a swap has two visits, of which the first is one.
    least = 2 if kind in live.FROM_FIRST else 1
    most = max((loop.num_visits for loop in architecture.loops), default=1)
    visits = [*map(str, range(least, most + 1)), *([EVERY] if most > least and kind != "swap" else [])]
    start = visits.index("2") if "2" in visits else 0
    check_one_of("visit", visits, visits[start])
    visit = st.selectbox("Visit", visits, start, key="visit", bind="query-params")
    heads: list[str] = []
    if live.has_heads(site):
        numbers = [str(head) for head in range(1, architecture.num_heads + 1)]
        check_each_of("heads", numbers)
        heads = st.multiselect("Heads", numbers, key="heads", bind="query-params", placeholder="all")
    return Change(
        kind=kind, site=site, layers=tuple(sorted(int(layer) - 1 for layer in layers)),
        heads=tuple(sorted(int(head) - 1 for head in heads)),
        visits=tuple(range(least - 1, most)) if visit == EVERY else (int(visit) - 1,),
    )  # fmt: skip


def _next_token(look: Look) -> None:
    """What comes next, before and after, and the loss of the prompt."""
    loss, change = look.mean_loss(), look.loss_change()
    row = st.container(horizontal=True)
    row.metric("Loss (nats a token)", f"{loss['before']:.3f}", border=True, height="stretch")
    for called, name in (("Edited", EDITED), ("Random change as large", RANDOM)):
        row.metric(
            called, f"{loss[name]:.3f}", f"{change[name]:+.3f}", delta_color="inverse", border=True, height="stretch"
        )
    row.metric(
        "KL of the next token (nats)", f"{look.kl_nats[EDITED]:.3g}", f"random {look.kl_nats[RANDOM]:.3g}",
        delta_arrow="off", delta_color="off", border=True, height="stretch",
    )  # fmt: skip
    st.subheader("Next token")
    bars = {
        column: st.column_config.ProgressColumn(min_value=0, max_value=1, format="%.4f")
        for column in ("before", EDITED, RANDOM)
    }
    st.dataframe(look.next_tokens, hide_index=True, height="content", row_height=28, column_config=bars, key="next")


def _text(look: Look) -> None:
    found = look.coloured()
    scene = {
        **tokens_of(look.samples), "hint": HINT, "most": found.most, "readings": found.readings,
        "summary": found.summary, "categories": found.categories, "label": "the prompt", "breaks": True,
        "chosen": {"sample": 1, "query": None},
    }  # fmt: skip
    show_canvas("live text", scene, {"values": found.values_T}, {})
    with st.expander("Loss of each token"):
        st.dataframe(look.tokens, hide_index=True, height=360, row_height=28, key="tokens")


def _start_mass(look: Look) -> None:
    st.subheader("Start mass by layer and visit")
    figure = comparison_figure(look.mass_rows, "as it is", {EDITED: EDITED})
    if figure is None:
        st.info("This network's attention patterns cannot be read.")
        return
    st.plotly_chart(figure, key="mass", config={"displaylogo": False})
    st.caption("Mean over heads and over every query but the first, which has no choice.")
