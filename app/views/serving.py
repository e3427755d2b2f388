"""Serving: what decoding and prefill cost on a GPU, the networks side by side under its roof."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.figures.numbers import roofline_figure
from app.widgets.address import check_one_of
from app.widgets.numbers import choose_networks, metric_row, show_command, show_table
from app.widgets.options import choose_options, choose_values, option_help, option_words
from smelt_interp.costs.serving import Load, Serving, ServingOptions, answers, gpus, report, roof, table
from smelt_interp.errors import UserError
from smelt_interp.terminal.tables import compact

TIMES = ("time a token, ms", "time to first token, ms")
OWN_NUMBERS = ("memory_bandwidth", "peak_flops", "l2_bytes", "memory_bytes")


def serving_page() -> None:
    """The networks, GPU and load in the address."""
    st.title("Serving")
    st.markdown(
        "What does a token cost on a GPU? The time of a pass is the longer of its bytes over the bandwidth and its "
        "FLOPs over the peak; which of the two it is, is the bound. Counted, not measured."
    )
    page = st.container()
    with st.sidebar:
        try:
            pair, config = choose_networks()
            check_one_of("gpu", list(gpus()), next(iter(gpus())))
            texts = option_help(ServingOptions)
            gpu = st.selectbox("GPU", list(gpus()), key="gpu", help=texts["gpu"], bind="query-params")
            load = choose_options(Load)
            with st.expander("Own numbers of the GPU"):
                numbers = choose_values(ServingOptions, OWN_NUMBERS)
            options = ServingOptions(pair=pair, config=config, load=load, gpu=gpu, **numbers)  # type: ignore[arg-type]  # a form: values by name
            found = answers(options)
        except UserError as error:
            page.error(str(error))
            return
    row = metric_row()
    for name, served in found.items():
        _show_times(row, name, served)
    st.plotly_chart(roofline_figure(roof(options.device(), found.values()), found), key="roofline")
    show_table(table(options, found), "costs")
    show_command("serving", option_words(options), report(options, found))


def _show_times(place: DeltaGenerator, name: str, served: Serving) -> None:
    for figure, found in zip(TIMES, (served.decode, served.prefill), strict=True):
        place.metric(
            f"{name}: {figure}", compact(found.milliseconds, digits=4), f"bound by {found.bound}", delta_arrow="off",
            delta_color="gray", border=True,
        )  # fmt: skip
