"""Scaling: the printed laws, or those fitted to one's own runs: loss surface, frontier, and the compute saved."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import streamlit as st
from streamlit.runtime.uploaded_file_manager import UploadedFile

from app.figures.numbers import frontier_figure, gain_figure, surface_figure
from app.widgets.address import check_one_of
from app.widgets.numbers import show_command, show_table
from app.widgets.options import choose_values, option_words
from smelt_interp.errors import UserError
from smelt_interp.scaling.command import (
    NO_GAINS,
    DrawOptions,
    Fits,
    PrintedOptions,
    Record,
    against_baseline,
    brackets,
    fit_grids,
    fit_report,
    printed_report,
    read_grids,
    tables,
)
from smelt_interp.scaling.csv_columns import BASELINE
from smelt_interp.scaling.curves import (
    Band,
    budgets,
    fitted_frontier,
    fitted_gain,
    printed_frontier,
    printed_gain,
    surfaces,
)
from smelt_interp.scaling.law import ScalingLaw, printed_law

COLUMNS = "`architecture, flops_per_token, sparsity, tokens, loss`, and `domain` if there are several"
WHERE = ("compute", "sparsity")
WORDS = ("domain", "architecture", "coefficient")
FITTED = "fitted runs"
"""Where a visitor's last fit is kept, so that asking it at another budget does not fit again."""


def scaling_page() -> None:
    """The laws at the budgets and sparsities in the address; of an uploaded file when there is one."""
    st.title("Scaling")
    st.markdown(
        "How does loss fall with compute, and what does looping save? "
        r"$L = E + A\,(1-S)^b / F^a + K / D^c$ with training FLOPs a token $F$, sparsity $S$, tokens $D$."
    )
    page = st.container()
    with st.sidebar:
        file = st.file_uploader("Your own runs", "csv", key="runs")
        st.caption(f"A CSV of {COLUMNS}. Without one: the laws that the paper prints.")
        try:
            if file is None:
                asked = PrintedOptions(**choose_values(PrintedOptions, WHERE))  # type: ignore[arg-type]  # by name
            else:
                drawn = DrawOptions(**choose_values(DrawOptions, (*WHERE, "draws", "seed")))  # type: ignore[arg-type]  # by name
        except UserError as error:
            page.error(str(error))
            return
    if file is None:
        _show_printed(asked)
        return
    try:
        fits = _fitted(file, drawn)
    except UserError as error:
        st.error(str(error))
        return
    _show_fits(fits, Path(file.name).name, drawn)


def _show_printed(options: PrintedOptions) -> None:
    laws = {"baseline": printed_law("baseline"), "smelt": printed_law("smelt")}
    compute_C, sparsity = budgets(options.compute), _chosen_sparsity(options.sparsity)
    _draw_laws(laws, sparsity, {name: printed_frontier(law, sparsity, compute_C) for name, law in laws.items()})
    _draw_gains({level: {"smelt": printed_gain(level, compute_C)} for level in options.sparsity})
    report = printed_report(options)
    _show_tables(report, brackets(options))
    show_command("scaling", ["printed", *option_words(options)], report)


def _show_fits(fits: Fits, name: str, options: DrawOptions) -> None:
    domains = list(fits)
    domain = domains[0]
    if len(domains) > 1:
        check_one_of("domain", domains, domain)
        domain = st.selectbox("Domain", domains, key="domain", bind="query-params")
    fitted = fits[domain]
    compute_C, sparsity = budgets(options.compute), _chosen_sparsity(options.sparsity)
    _draw_laws(
        {name: one.fit.law for name, one in fitted.items()},
        sparsity,
        {name: fitted_frontier(one.laws, sparsity, compute_C) for name, one in fitted.items()},
    )
    if looped := against_baseline(fitted):
        baseline = fitted[BASELINE].laws
        _draw_gains(
            {
                level: {name: fitted_gain(baseline, fitted[name].laws, level, compute_C) for name in looped}
                for level in options.sparsity
            }
        )
    else:
        st.info(NO_GAINS)
    report = fit_report(fits, options)
    _show_tables(report, brackets(options))
    show_command("scaling", ["fit", name, *option_words(options)], report)


def _fitted(file: UploadedFile, options: DrawOptions) -> Fits:
    """The fits of the file. Raises UserError as the command does, with the name that the file has there."""
    content = file.getvalue()
    key = (sha256(content).hexdigest(), options.draws, options.seed)
    known = st.session_state.get(FITTED)
    if known is not None and known[0] == key:
        fits: Fits = known[1]
        return fits
    with TemporaryDirectory() as folder:
        path = Path(folder) / Path(file.name).name
        path.write_bytes(content)
        try:
            grids = read_grids(path)
        except UserError as error:
            raise UserError(str(error).replace(str(path), path.name)) from None
    progress = st.empty()

    def show(done: int) -> None:
        progress.caption(f"{done} bootstrap draws done")

    with st.spinner("Fitting …", show_time=True):
        fits = fit_grids(grids, options.draws, options.seed, show)
    progress.empty()
    st.session_state[FITTED] = (key, fits)
    return fits


def _chosen_sparsity(asked: Sequence[float]) -> float:
    """The one at which the surface and the frontier are drawn."""
    label = "Surface and frontier at sparsity"
    check_one_of("at_sparsity", [str(level) for level in asked], asked[0])
    sparsity: float = st.selectbox(label, asked, key="at_sparsity", bind="query-params", width=260)
    return sparsity


def _draw_laws(laws: Mapping[str, ScalingLaw], sparsity: float, frontiers: Mapping[str, Band]) -> None:
    compute_C = next(iter(frontiers.values())).compute_C
    found = surfaces(list(laws.values()), sparsity, compute_C)
    st.subheader("Loss over FLOPs a token and tokens")
    st.caption("The line is the compute-optimal frontier.")
    st.plotly_chart(surface_figure(dict(zip(laws, found, strict=True))), key="surface")
    st.subheader("Least loss at each compute budget")
    st.plotly_chart(frontier_figure(frontiers), key="frontier")


def _draw_gains(gains: Mapping[float, Mapping[str, Band]]) -> None:
    st.subheader("Compute saved over the Baseline at equal loss")
    st.plotly_chart(gain_figure(gains), key="gain")


def _show_tables(report: Record, note: str) -> None:
    for table in reversed(tables(report)):
        st.subheader(table.title)
        show_table(table, table.title, texts=WORDS)
    st.caption(note.capitalize())
