"""Experts of one layer: which of their tokens they keep, and one of them on every visit side by side."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import streamlit as st
from pandas import DataFrame

from app.widgets.address import carry_over, check_one_of, link_to
from app.widgets.answers import Document, answer_of
from app.widgets.capture_folder import KEY, show_capture
from cache.store import Capture
from probes import expert_tokens
from probes.expert_tokens import CONTEXT, GOES, ROLE, STAYS, TITLE, TOKEN
from probes.running.exports import csv_text, file_name, result_facts
from probes.running.probe import refusal
from probes.running.report import cell_text, readable
from probes.statistics.quantities import Record
from smelt_interp.errors import UserError
from smelt_interp.terminal.tables import MISSING

NAME = "expert_tokens"
SHARE = "share of its tokens [95%]"
"""What every table of the page holds."""


def experts_page(pages: Mapping[str, st.Page], folder: Path) -> None:
    """The experts of the layer in the address, and the one that it names. `pages`: that of the probe."""
    st.title("Experts, both visits")
    st.markdown("What an expert fires on at each visit of its layer, and which experts its tokens choose on the other.")
    show_capture(folder, partial(_show, pages))


def _show(pages: Mapping[str, st.Page], capture: Capture) -> None:
    """Raises UserError for a capture without a router, or without its choices."""
    if why := refusal(expert_tokens.needs(capture.architecture), capture.architecture):
        raise UserError(f"experts must be there to be shown; got {capture.path.name}: {why}")
    found = answer_of(NAME, [capture], expert_tokens.Options())
    (result,) = cast("list[Document]", found.document["results"])
    rows = [row for row in cast("list[Record]", result["rows"]) if row["level"] == "head"]
    # Which layer and expert.
    layers = [str(layer + 1) for layer in sorted({step.layer for step in capture.architecture.steps})]
    first = str(rows[0]["layers"]) if rows else layers[0]
    with st.sidebar:
        carry_over("layer", layers)
        check_one_of("layer", layers, first)
        layer = st.selectbox("Layer", layers, layers.index(first), key="layer", bind="query-params")
        experts = [str(number) for number in range(1, capture.architecture.num_experts + 1)]
        check_one_of("expert", experts, experts[0])
        expert = st.selectbox("Expert", experts, key="expert", bind="query-params")
    of_layer = [row for row in rows if row["layers"] == layer]
    if not of_layer:
        st.info(f"The table is of looped layers; this measures layer {layer}:")
        st.code(f"{found.line} --layers {layer} --level head", language=None, wrap_lines=True)
        return
    # All experts of the layer, then the one.
    _every_expert([row for row in of_layer if row["quantity"] == STAYS])
    one = [row for row in of_layer if str(row["expert"]) == expert]
    st.subheader(f"Layer {layer}, expert {expert}")
    visits = sorted({str(row["visit"]) for row in one if row["quantity"] in (TOKEN, ROLE)})
    if not visits:
        st.info("No token chose this expert on any visit.")
    for visit, column in zip(visits, st.columns(max(len(visits), 1)), strict=False):
        with column:
            _one_visit(visit, [row for row in one if str(row["visit"]) == visit])
    went = [row for row in one if row["quantity"] in (STAYS, GOES)]
    if went:
        st.markdown("**Where its tokens went on the other visit**")
        _table(went, "went", ("quantity", "visit", "to"))
    # The way on: the probe, the command, a file.
    link_to(pages, NAME, f"Every number: {TITLE}", **{KEY: capture.path.name, "layer": layer})
    st.subheader("The same on the command line")
    st.code(found.line, language=None, wrap_lines=True)
    facts = result_facts(found.document | {"command": found.line}) | {"layer": layer, "expert": expert}
    called = file_name("experts", capture.path.name, f"layer-{layer}", f"expert-{expert}", suffix="csv")
    st.download_button(
        "This expert as CSV", csv_text(DataFrame(one).dropna(axis=1, how="all"), facts), called, "text/csv",
        on_click="ignore", key="csv",
    )  # fmt: skip


def _every_expert(rows: Sequence[Record]) -> None:
    """The share of its tokens that each keeps on the other visit; a click on a row opens the expert."""
    if not rows:
        st.info("This layer was recorded on one visit only: nothing is compared.")
        return

    def choose() -> None:
        picked = st.session_state["every expert"]["selection"]["rows"]
        if picked:
            st.session_state["expert"] = str(rows[picked[0]]["expert"])

    st.markdown("**Share of each expert's tokens that choose it on the other visit too** (click a row to open it)")
    st.dataframe(
        _words(rows, ("expert", "visit")), hide_index=True, height=360, row_height=30, key="every expert",
        on_select=choose, selection_mode="single-row",
    )  # fmt: skip


def _one_visit(visit: str, rows: Sequence[Record]) -> None:
    """Tokens, roles and contexts of one expert on one visit."""
    st.markdown(f"**Visit {visit}**")
    _table([row for row in rows if row["quantity"] == TOKEN], f"tokens {visit}", ("token",))
    _table([row for row in rows if row["quantity"] == ROLE], f"roles {visit}", ("role",))
    contexts = [row for row in rows if row["quantity"] == CONTEXT]
    if contexts:
        st.markdown("Where it weighs most:")
    for row in contexts:
        at = f"sample {row['sample']}, token {row['position']}, weight {cell_text(row['value'])}"
        st.code(str(row["context"]), language=None, wrap_lines=True)
        st.caption(at)


def _table(rows: Sequence[Record], key: str, names: Sequence[str]) -> None:
    st.dataframe(_words(rows, names), hide_index=True, height="content", row_height=30, key=key)


def _words(rows: Sequence[Record], names: Sequence[str]) -> DataFrame:
    """These columns, value with its interval, and every null that a row has."""
    plain = [{**row, "level": "headline"} for row in rows]
    table = DataFrame(readable(plain, "", {}, "headline").texts()).rename(columns={"value [95%]": SHARE})
    for name in names:
        if name not in table:  # what is the same in every row is left out of a table of words
            table.insert(0, name, [cell_text(row.get(name)) for row in rows])
    nulls = [name for name in table if name.startswith("null") and set(table[name]) != {MISSING}]
    return table[[*names, SHARE, *nulls]]
