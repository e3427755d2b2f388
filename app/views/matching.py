"""Matching: the looped networks that cost what a Baseline costs, their three mismatches, why the next best fails."""

import streamlit as st

from app.widgets.address import check_address
from app.widgets.numbers import DEFAULT_PAIR, below_root, show_command, show_table
from app.widgets.options import choose_values, option_words
from smelt_interp.config import ModelConfig
from smelt_interp.costs.matching import Matching, MatchingOptions, report, search, shape_text, table
from smelt_interp.costs.presets import PAIRS
from smelt_interp.errors import UserError, shown

ASKED = ("visits", "span", "layers", "depth", "kv_heads", "query_heads", "sparsity", "count")
FINER = (
    *("attended_tokens", "loop_scale", "width_multiple", "head_width_multiple", "expert_width_multiple"),
    *("experts_multiple", "least_expert_width"),
    *("max_shape_mismatch", "max_flops_mismatch", "max_parameters_mismatch", "max_kv_mismatch"),
)


def matching_page() -> None:
    """The networks matched to the Baseline in the address."""
    st.title("Matching")
    st.markdown(
        "Which looped network costs what a Baseline costs? Looping pays FLOPs and KV cache again, so the matched "
        "network is narrower, and the parameters that this frees come back as experts."
    )
    page = st.container()
    with st.sidebar:
        check_address("baseline", _check_baseline, DEFAULT_PAIR)
        baseline = st.selectbox(
            "Baseline", list(PAIRS), list(PAIRS).index(DEFAULT_PAIR), key="baseline", bind="query-params",
            accept_new_options=True, help="A named pair whose Baseline it is, or a config file (JSON).",
        )  # fmt: skip
        try:
            _check_baseline(baseline)
            asked = choose_values(MatchingOptions, ASKED)
            with st.expander("Multiples and tolerances"):
                finer = choose_values(MatchingOptions, FINER)
            options = MatchingOptions(baseline=baseline, **asked, **finer)  # type: ignore[arg-type]  # a form: values by name
        except UserError as error:
            page.error(str(error))
            return
    try:
        config = options.network()[0]
        found = _found(options, config)
    except UserError as error:
        st.error(str(error))
        return
    shown = table(options, found)
    st.caption("The last four columns are against the Baseline's F / D, training FLOPs, total parameters and KV cache.")
    notes = [note for note in shown.notes if not note.startswith("next best")]
    show_table(shown._replace(notes=notes), "matched", texts=("looped", "heads"))
    if found.next_best is None:
        st.success("Every network that was counted is within all three tolerances.")
    else:
        st.markdown(f"**The next best fails:** {shape_text(found.next_best.config)}: {found.next_best_fails}.")
    show_command("matching", option_words(options), report(found))


def _check_baseline(name: str) -> None:
    """Raise UserError unless it is a named pair, or a config file where pages may read."""
    if name not in PAIRS:
        if not name.endswith(".json"):
            raise UserError(f"baseline must be one of {', '.join(PAIRS)} or a config file (.json); got {shown(name)}")
        below_root(name)


@st.cache_data(max_entries=64, show_spinner="Counting networks …", show_time=True)
def _found(options: MatchingOptions, config: ModelConfig) -> Matching:
    """What is found. `config` is there because a file of the same name may hold another."""
    return search(options)
