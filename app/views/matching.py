"""Matching: the looped networks that cost what a Baseline costs, their three mismatches, why the next best fails."""

import streamlit as st

from app.widgets.numbers import DEFAULT_PAIR, show_command, show_table
from app.widgets.options import choose_values, option_words
from smelt_interp.config import ModelConfig
from smelt_interp.costs.matching import Matching, Options, report, search, shape_text, table
from smelt_interp.costs.presets import PAIRS
from smelt_interp.errors import UserError

ASKED = ("visits", "span", "depth", "kv_heads", "count")
FINER = (
    *("attended_tokens", "width_multiple", "head_width_multiple", "expert_width_multiple", "experts_multiple"),
    *("max_flops_mismatch", "max_parameters_mismatch", "max_kv_mismatch"),
)


def matching_page() -> None:
    """The networks matched to the Baseline in the address."""
    st.title("Matching")
    st.markdown(
        "Which looped network costs what a Baseline costs? Looping pays FLOPs and KV cache again, so the matched "
        "network is narrower, and the parameters that this frees come back as experts."
    )
    page = st.container()
    with st.sidebar.form("request", border=False):
        baseline = st.selectbox(
            "Baseline", list(PAIRS), list(PAIRS).index(DEFAULT_PAIR), key="baseline", bind="query-params",
            accept_new_options=True, help="A named pair whose Baseline it is, or a config file (JSON).",
        )  # fmt: skip
        options: Options | None = None
        try:
            asked = choose_values(Options, ASKED)
            with st.expander("Multiples and tolerances"):
                finer = choose_values(Options, FINER)
            options = Options(baseline=baseline, **asked, **finer)  # type: ignore[arg-type]  # a form: values by name
        except UserError as error:
            page.error(str(error))
        st.form_submit_button("Find", type="primary", width="stretch")
    if options is None:
        return
    try:
        config = options.network().config
        found = _found(options, config)
    except UserError as error:
        st.error(str(error))
        return
    shown = table(config, found)
    st.caption("The last three columns are against the Baseline's training FLOPs, total parameters and KV cache.")
    show_table(shown._replace(notes=shown.notes[:1]), "matched", texts=("span", "heads"))
    if found.next_best is None:
        st.success("Every network that was counted is within all three tolerances.")
    else:
        st.markdown(f"**The next best fails:** {shape_text(found.next_best.config)}: {found.next_best_fails}.")
    show_command("matching", option_words(options), report(found))


@st.cache_data(max_entries=64, show_spinner="Counting networks …", show_time=True)
def _found(options: Options, config: ModelConfig) -> Matching:
    """What is found. `config` is there because a file of the same name may hold another."""
    return search(options)
