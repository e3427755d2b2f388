"""The budget calculator: one network's knobs against the Baseline's three budgets, and what its costs are made of."""

from dataclasses import replace
from functools import partial

import streamlit as st

from app.figures.numbers import split_figure
from app.widgets.address import check_address
from app.widgets.numbers import choose_networks, metric_row, show_command, show_table
from app.widgets.options import choose_values, label_of, option_help, option_words, parse_option
from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import PAPER_TOLERANCE, BudgetOptions, Comparison, Mismatch, checks, compare
from smelt_interp.costs.knobs import Knobs, changes, knob_ranges, own_values
from smelt_interp.errors import UserError
from smelt_interp.terminal.tables import percent

SPAN_STEP = 0.05


def budget_page() -> None:
    """The budgets of the networks in the address, the first with its knobs changed."""
    st.title("Budget calculator")
    st.markdown(
        "What does a network cost, and is it a fair match for its Baseline? Parameters are paid once a layer, "
        "FLOPs and KV cache once a visit."
    )
    page = st.container()
    with st.sidebar:
        try:
            pair, config = choose_networks()
            networks = BudgetOptions(pair=pair, config=config).networks()
            knobs = _choose_knobs(networks[0].config)
            attended = choose_values(BudgetOptions, ["attended_tokens"])
            options = BudgetOptions(pair=pair, config=config, knobs=knobs, **attended)  # type: ignore[arg-type]  # a form: values by name
            found = compare(options)
        except UserError as error:
            page.error(str(error))
            return
    if found.mismatch is not None:
        _show_mismatch(found.mismatch)
    st.plotly_chart(split_figure(found.budgets), key="split")
    show_table(found.table()._replace(notes=()), "budgets")
    if found.geometry:
        _show_geometry(found)
    show_command("budget", option_words(options), found.to_json())


def _choose_knobs(config: ModelConfig) -> Knobs:
    """A slider a knob, at first where the network's own stands; another network brings its own."""
    own, ranges, texts = own_values(config), knob_ranges(config), option_help(Knobs)
    if st.session_state.setdefault("network of the knobs", config) != config:
        st.session_state.update(own)
        st.session_state["network of the knobs"] = config
    st.button("Back to its own values", on_click=st.session_state.update, args=(own,), width="stretch")
    values: dict[str, int | float] = {}
    for name, several in ranges.items():
        check_address(name, partial(_check, name, several), int(own[name]))
        values[name] = st.slider(
            label_of(name), several.start, several[-1], int(own[name]), several.step,
            key=name, help=texts[name], bind="query-params",
        )  # fmt: skip
    check_address("span", partial(_check_span, "span"), f"{own['span']:g}")
    values["span"] = st.slider(
        "Span", 0.0, 1.0, float(own["span"]), SPAN_STEP, key="span", help=texts["span"], bind="query-params"
    )
    return replace(changes(config, values), **choose_values(Knobs, ["layers"]))  # type: ignore[arg-type]  # by name


def _check(name: str, several: range, text: str) -> None:
    value = parse_option(name, text, int)
    if value not in several:
        raise UserError(f"{name} must be {several.start} to {several[-1]}, in steps of {several.step}; got {value}")


def _check_span(name: str, text: str) -> None:
    value = parse_option(name, text, float)
    if not isinstance(value, float) or not 0 <= value <= 1:
        raise UserError(f"{name} must be 0 to 1; got {text}")


def _show_mismatch(found: Mismatch) -> None:
    row = metric_row()
    for check in checks(found, PAPER_TOLERANCE):
        says = "within" if check.within else "NOT within"
        row.metric(
            f"{check.name[:1].upper()}{check.name[1:]} against the Baseline", percent(check.value),
            f"{says} the paper's {check.allowed:.1%}", delta_arrow="off",
            delta_color="green" if check.within else "red", border=True,
        )  # fmt: skip


def _show_geometry(found: Comparison) -> None:
    st.subheader("The printed head geometry")
    st.caption("Query heads × KV heads × head width, as the paper prints them and as its own totals demand.")
    st.dataframe(
        [
            {
                "network": heads.architecture,
                "printed": " × ".join(map(str, heads.printed_heads)),
                "here": " × ".join(map(str, heads.derived_heads)),
            }
            for heads in found.geometry
        ],
        hide_index=True, height="content", width="content", row_height=30, key="geometry",
    )  # fmt: skip
    lines = [f"- {heads.architecture}: {sentence}" for heads in found.geometry for sentence in heads.contradictions]
    st.markdown("\n".join(["What the printed heads contradict:", "", *lines]))
