"""Figures of the pages of numbers, drawn from what `smelt_interp` counts."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import TYPE_CHECKING

from smelt_interp.costs.serving import Serving
from smelt_interp.scaling.csv_columns import BASELINE
from smelt_interp.scaling.curves import Band, Surface

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PART_COLOURS = {
    "projections": "#4059ad",
    "scores": "#97d8c4",
    "router": "#8d5a97",
    "experts": "#f4b942",
    "norm gains": "#8d99ae",
}
SPLITS = {
    "FLOPs a token, forward": {
        "projections": "projection_flops",
        "scores": "score_flops",
        "router": "router_flops",
        "experts": "expert_flops",
    },
    "active parameters": {
        "projections": "projection_parameters",
        "router": "router_parameters",
        "experts": "chosen_expert_parameters",
        "norm gains": "norm_gain_parameters",
    },
    "total parameters": {
        "projections": "projection_parameters",
        "router": "router_parameters",
        "experts": "expert_parameters",
        "norm gains": "norm_gain_parameters",
    },
}
"""Which figures of a budget make up each of the bars."""

BASELINE_COLOUR = "91,107,127"
OTHER_COLOURS = ("200,100,27", "42,157,143", "141,90,151", "64,89,173")


def split_figure(budgets: Mapping[str, Mapping[str, float]]) -> "Figure":
    """A bar a network: what its FLOPs, active and total parameters are made of."""
    from plotly.graph_objects import Bar, Figure
    from plotly.subplots import make_subplots

    drawn: Figure = make_subplots(rows=1, cols=len(SPLITS), subplot_titles=list(SPLITS), shared_yaxes=True,
                                  horizontal_spacing=0.05)  # fmt: skip
    named: set[str] = set()
    for column, parts in enumerate(SPLITS.values(), 1):
        for part, figure in parts.items():
            values = [counts[figure] for counts in budgets.values()]
            drawn.add_trace(
                Bar(x=values, y=list(budgets), orientation="h", name=part, legendgroup=part, marker_line_width=0,
                    marker_color=PART_COLOURS[part], showlegend=part not in named,
                    hovertemplate=f"%{{y}}: {part} <b>%{{x:.4s}}</b><extra></extra>"),
                row=1, col=column,
            )  # fmt: skip
            named.add(part)
    drawn.update_yaxes(autorange="reversed")
    drawn.update_layout(barmode="stack", height=230, margin={"t": 40, "b": 10}, legend={"orientation": "h", "y": -0.25})
    return drawn


def roofline_figure(roof: Mapping[float, float], found: Mapping[str, Serving]) -> "Figure":
    """The GPU's roof, and where each network's decode and prefill stand on it."""
    from plotly.graph_objects import Figure, Scatter

    drawn: Figure = Figure()
    drawn.add_trace(
        Scatter(x=list(roof), y=list(roof.values()), mode="lines", name="roof", line={"color": "#9aa3ad", "width": 3},
                hovertemplate="%{x:.4s} FLOPs a byte<br>%{y:.4s}FLOP/s<extra>roof</extra>")
    )  # fmt: skip
    colours = _colours(found)
    for name, served in found.items():
        for phase, symbol, place in (("decode", "circle", served.decode), ("prefill", "diamond", served.prefill)):
            drawn.add_trace(
                Scatter(x=[place.intensity], y=[place.flops_per_second], mode="markers", name=f"{name}, {phase}",
                        marker={"color": f"rgb({colours[name]})", "symbol": symbol, "size": 13, "opacity": 0.85},
                        hovertemplate=f"%{{x:.4s}} FLOPs a byte<br>%{{y:.4s}}FLOP/s<br>bound by {place.bound}"
                        f"<extra>{name}, {phase}</extra>")
            )  # fmt: skip
    drawn.update_xaxes(type="log", title_text="FLOPs a byte", exponentformat="power", dtick=1)
    drawn.update_yaxes(type="log", title_text="FLOPs a second", exponentformat="power", dtick=1)
    drawn.update_layout(height=380, margin={"t": 20, "b": 10})
    return drawn


def surface_figure(surfaces: Mapping[str, Surface]) -> "Figure":
    """Loss over training FLOPs a token and tokens, a panel an architecture; in orange the frontier."""
    from plotly.graph_objects import Contour, Figure, Scatter
    from plotly.subplots import make_subplots

    drawn: Figure = make_subplots(rows=1, cols=len(surfaces), subplot_titles=list(surfaces), shared_yaxes=True,
                                  horizontal_spacing=0.04)  # fmt: skip
    for column, (name, surface) in enumerate(surfaces.items(), 1):
        drawn.add_trace(
            Contour(x=surface.flops_per_token_F, y=surface.tokens_D, z=surface.loss_DF, coloraxis="coloraxis",
                    contours={"showlabels": True, "labelfont": {"size": 11, "color": "#222222"},
                              "start": surface.lowest_level, "end": surface.highest_level, "size": surface.level_step},
                    line_width=0.5,
                    hovertemplate=f"F %{{x:.4s}}<br>D %{{y:.4s}}<br>loss <b>%{{z:.4f}}</b><extra>{name}</extra>"),
            row=1, col=column,
        )  # fmt: skip
        drawn.add_trace(
            Scatter(x=surface.best_flops_per_token_C, y=surface.best_tokens_C, mode="lines", showlegend=False,
                    line={"color": f"rgb({OTHER_COLOURS[0]})", "width": 3}, name="frontier",
                    hovertemplate=f"F* %{{x:.4s}}<br>D* %{{y:.4s}}<extra>{name}, frontier</extra>"),
            row=1, col=column,
        )  # fmt: skip
    drawn.update_xaxes(type="log", title_text="F, training FLOPs a token", exponentformat="SI", dtick=1)
    drawn.update_yaxes(type="log", exponentformat="SI", dtick=1)
    drawn.update_yaxes(title_text="D, tokens", col=1)
    drawn.update_layout(
        height=430, margin={"t": 40, "b": 10},
        coloraxis={"colorscale": "Blues", "colorbar": {"title": "loss, nats"}},
    )  # fmt: skip
    return drawn


def frontier_figure(frontiers: Mapping[str, Band]) -> "Figure":
    """Least loss at each compute budget, an architecture a line."""
    from plotly.graph_objects import Figure

    drawn: Figure = Figure()
    colours = _colours(frontiers)
    for name, band in frontiers.items():
        _add_band(drawn, band, name, colours[name], "loss <b>%{y:.4f}</b>", {})
    drawn.update_xaxes(type="log", title_text="C, training FLOPs", exponentformat="power", dtick=1)
    drawn.update_yaxes(title_text="loss, nats")
    drawn.update_layout(height=380, margin={"t": 20, "b": 10})
    return drawn


def gain_figure(gains: Mapping[float, Mapping[str, Band]]) -> "Figure":
    """Compute saved over the Baseline at equal loss, a panel a sparsity, an architecture a line."""
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    titles = [f"S = {sparsity:g}" for sparsity in gains]
    drawn: Figure = make_subplots(rows=1, cols=len(gains), subplot_titles=titles, shared_yaxes=True,
                                  horizontal_spacing=0.05)  # fmt: skip
    for column, bands in enumerate(gains.values(), 1):
        colours = _colours(bands)
        for name, band in bands.items():
            place = {"row": 1, "col": column}
            _add_band(drawn, band, name, colours[name], "saves <b>%{y:.1%}</b>", place, in_legend=column == 1)
    drawn.add_hline(y=0, line={"color": "#9aa3ad", "width": 1, "dash": "dot"})
    drawn.update_xaxes(type="log", title_text="C, training FLOPs", exponentformat="power", dtick=1)
    drawn.update_yaxes(tickformat=".0%")
    drawn.update_yaxes(title_text="compute saved", col=1)
    drawn.update_layout(height=340, margin={"t": 40, "b": 10})
    return drawn


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Red, green and blue of each network: the Baseline's are the same in every figure."""
    others = cycle(OTHER_COLOURS)
    return {name: BASELINE_COLOUR if name == BASELINE else next(others) for name in names}


def _add_band(
    drawn: "Figure", band: Band, name: str, colour: str, says: str, place: Mapping[str, int], *, in_legend: bool = True
) -> None:
    from plotly.graph_objects import Scatter

    for bound_C, fill in ((band.low_C, None), (band.high_C, "tonexty")):
        drawn.add_trace(
            Scatter(x=band.compute_C, y=bound_C, mode="lines", line_width=0, fill=fill,
                    fillcolor=f"rgba({colour},0.18)", showlegend=False, legendgroup=name, hoverinfo="skip"),
            **place,
        )  # fmt: skip
    drawn.add_trace(
        Scatter(x=band.compute_C, y=band.value_C, mode="lines", name=name, legendgroup=name, showlegend=in_legend,
                line={"color": f"rgb({colour})", "width": 2.5},
                hovertemplate=f"C %{{x:.3e}}<br>{says}<extra>{name}</extra>"),
        **place,
    )  # fmt: skip
