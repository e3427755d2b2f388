"""Every measure along the executed steps, on one page: kept results of each probe, and what changed in training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import streamlit as st

from app.widgets.address import kept_choices, link_to
from app.widgets.answers import answer_of, command_of, kept_answer
from app.widgets.capture_folder import KEY, choose_others, chosen_capture
from cache.store import Capture
from probes import over_training
from probes.running import catalog, overview
from smelt_interp.errors import UserError

HINT = "Each network stands at its own steps; a comparison of visits at the later one. Click a point for its link."
CHART = {"displaylogo": False}


def overview_page(pages: Mapping[str, st.Page], folder: Path) -> None:
    """The measures of the capture in the address, beside captures of the same samples. `pages`: those of its probes."""
    st.title("Overview by step")
    st.markdown("What each probe measures along the executed steps, one row a measure, one line a network.")
    capture = chosen_capture(folder)
    if capture is not None:
        with st.sidebar:
            others = choose_others(folder, capture)
        try:
            _show(pages, [capture, *(Capture(folder / other) for other in others)])
        except UserError as error:
            st.error(str(error))
    _show_training(folder)


def _show(pages: Mapping[str, st.Page], captures: Sequence[Capture]) -> None:
    """Raises UserError for captures that cannot be measured."""
    capture = captures[0]
    architectures = {each.path.resolve().name: each.architecture for each in captures}
    asked = f"measure all {[each.digest for each in captures]}"
    shown: list[overview.Measure] = []
    missing = []
    answered = answer_of if st.session_state.get(asked, False) else kept_answer
    for name in overview.probes(capture):
        options = catalog.load(name).Options()
        answer = answered(name, captures, options)
        if answer is None:
            missing.append(command_of(name, captures, options))
        else:
            shown += overview.measures(answer.document, architectures)
    if shown:
        st.caption(HINT)
        found = st.plotly_chart(
            overview.figure(shown, capture.architecture), key=f"overview {asked}", config=CHART, on_select="rerun",
            selection_mode="points",
        )  # fmt: skip
        _lead(found["selection"]["points"], pages)
        row = st.container(horizontal=True)
        for name in dict.fromkeys(each.probe for each in shown):
            if name in pages:
                row.page_link(pages[name], label=catalog.title(name), query_params=kept_choices(KEY, "against"))
    if missing:
        st.caption(f"Not measured on these captures yet: {len(missing)} probes.")
        st.button("Measure them now", on_click=st.session_state.update, args=({asked: True},))
        st.code("\n".join(missing), language=None, wrap_lines=True)


def _lead(points: Sequence[Mapping[str, object]], pages: Mapping[str, st.Page]) -> None:
    """The way from a clicked point to the page of its probe, at its layer."""
    for point in points:
        target = point.get("customdata")
        if isinstance(target, list) and len(target) == 2:
            name, layer = map(str, target)
            link_to(pages, name, f"{catalog.title(name)}, layer {layer}", layer=layer, **kept_choices(KEY, "against"))


def _show_training(folder: Path) -> None:
    """What was measured of runs at the steps that they kept, as the command wrote it into the folder."""
    st.subheader("Over training")
    paths = sorted(folder.glob(over_training.FILE.format(probe="*")))
    if not paths:
        st.caption("Runs that keep states while they train are measured by this, which writes into the folder:")
        st.code(f"python -m probes.over_training RUN --probe domain_loss --out {folder}", language=None)
    for path in paths:
        try:
            written = over_training.read_result(path)
        except UserError as error:
            st.error(str(error))
            continue
        for at, figure in enumerate(over_training.figures(written.results, written.title)):
            st.plotly_chart(figure, key=f"{path.name} {at}", config=CHART)
        st.code(written.command, language=None, wrap_lines=True)
