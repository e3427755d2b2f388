"""What the paper claims: each printed figure, and the rows of a probe that measure it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from probes.running.verdicts import Printed
from probes.statistics.grid import Cell
from smelt_interp.paper import printed
from smelt_interp.paper.printed import Figure

SINK, SIMILARITY, OVERLAP, UPDATES, DYCK, LENGTH, DOMAINS, FEW_SHOT = (
    "attention_sink", "projection_similarity", "expert_overlap", "residual_updates", "dyck_icl", "length_gain",
    "domain_loss", "few_shot_gap",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A printed figure, and the rows that measure it."""

    what: str
    paper: Printed
    """One figure is a mean, two are a range."""
    probe: str
    quantity: str
    where: Mapping[str, Cell]
    null: str
    samples: Sequence[str] = ("code", "dyck")
    """The paper takes its sink from Dyck prompts, the rest from validation tokens: the nearest here is code. The
    nearest comes first."""
    choices: Sequence[str] = ()
    """Options of the probe that the figure depends on."""
    of_top_k: bool = False
    """Both are numbers of experts, compared as shares of all that a token chooses."""
    over_baseline: bool = False
    """What the looped network has over its Baseline."""
    scale: float = 1.0
    """What ours is multiplied with."""


def paper_figures(*path: str) -> Printed:
    """The figure or the range that is printed at a path."""
    return Printed(figures=printed.figures(*path))


def _sink(part: str, figure: str, visit: int, *choices: str) -> Claim:
    return Claim(
        what=f"{part} mass, visit {visit}", paper=paper_figures("mechanism", figure, f"visit_{visit}"), probe=SINK,
        quantity=f"{part} mass", where={"visit": visit, "head": "mean"}, null="uniform", samples=("dyck",),
        choices=choices,
    )  # fmt: skip


def _projection(name: str, figure: str) -> Claim:
    return Claim(what=f"{name} cosine", paper=paper_figures("mechanism", figure), probe=SIMILARITY,
                 quantity=f"{name} cosine, raw", where={"visit": "1 vs 2"}, null="shuffled",
                 choices=("heads",))  # fmt: skip


def _update(what: str, figure: str, quantity: str) -> Claim:
    return Claim(what=what, paper=paper_figures("mechanism", figure), probe=UPDATES, quantity=quantity,
                 where={"visit": "1 vs 2", "update": "layer"}, null="shuffled")  # fmt: skip


def _loss_gain() -> Printed:
    """What the paper's loop of half of the layers gains over none, at each sparsity: a difference of printed losses."""
    losses = ("ablations_200M", "loop_span_val_loss")
    gains = [printed.number(*losses, level, "0") - printed.number(*losses, level, "6")
             for level in printed.names(*losses)]  # fmt: skip
    return Printed(figures=tuple(Figure(f"{gain:.4f}") for gain in sorted(gains)))


def _few_shot(figure: str, what: str) -> Claim:
    shots = "0" if figure == "k0" else "1-8"
    return Claim(what=f"few-shot gap (points), {what}", paper=paper_figures("downstream", "few_shot_gap_pp", figure),
                 probe=FEW_SHOT, quantity="acc, gap", where={"task": "all", "shots": shots}, null="no_difference",
                 samples=("tasks",), over_baseline=True, scale=100.0)  # fmt: skip


CLAIMS = (
    *(_sink("start", "bos_mass", visit, "queries") for visit in (1, 2)),
    *(_sink("content", "content_mass", visit, "queries", "content") for visit in (1, 2)),
    *(_projection(name, "q_k_cosine_across_visits") for name in "QK"),
    _projection("V", "v_cosine_across_visits"),
    Claim(what="share of experts kept", paper=paper_figures("mechanism", "experts_kept_of_8"), probe=OVERLAP,
          quantity="experts shared", where={"visit": "1 vs 2"}, null="popularity", of_top_k=True),
    _update("update norm ratio", "residual_write_norm_ratio", "norm ratio, median"),
    _update("update cosine", "residual_write_cosine", "cosine"),
    _update("update cosine, mean", "residual_write_cosine_mean", "cosine"),
    Claim(what="loss gain (nats)", paper=_loss_gain(), probe=DOMAINS, quantity="gain (nats)", where={},
          null="no_difference", samples=("code",), over_baseline=True),
    Claim(what="length gain ratio", paper=paper_figures("downstream", "length_gain_ratio", "smelt"), probe=LENGTH,
          quantity="gain ratio, long / short", where={}, null="equal_gain", samples=("code",), over_baseline=True),
    _few_shot("k0", "no shot"),
    _few_shot("k1_to_8", "1 to 8 shots"),
)  # fmt: skip
SWEEP, SCORES, CONTROL = "takes runs over budgets", "takes scores of many runs", "takes a control network"
"""Why: runs over budgets are what `smelt_interp.scaling` fits, scores `smelt_interp.scaling.calibration`."""
OTHERS = (
    ("length gain ratio, more parameters", ("downstream", "length_gain_ratio", "more_parameters_control"), CONTROL),
    ("length gain ratio, more experts", ("downstream", "length_gain_ratio", "more_experts_control"), CONTROL),
    ("CE gain at 1e21, code", ("downstream", "domain_ce_gain_1e21_s95", "code"), SWEEP),
    ("CE gain at 1e21, finance", ("downstream", "domain_ce_gain_1e21_s95", "finance"), SWEEP),
    ("CE gain at 1e21, mathematics", ("downstream", "domain_ce_gain_1e21_s95", "math_stem"), SWEEP),
    ("CE gain at 1e21, world knowledge", ("downstream", "domain_ce_gain_1e21_s95", "world_knowledge"), SWEEP),
    ("CE gain at 1e21, web text", ("downstream", "domain_ce_gain_1e21_s95", "web_text"), SWEEP),
    ("excess score, core (points)", ("downstream", "residuals", "pooled", "core_pp"), SCORES),
    ("excess score, completion (millinats)", ("downstream", "residuals", "pooled", "completion_mn"), SCORES),
    ("excess score, MMLU (points)", ("downstream", "residuals", "pooled", "mmlu_pp"), SCORES),
    ("tasks won, core", ("downstream", "core_win_rate"), SCORES),
    ("best depth", ("ablations_200M", "best_depth"), SWEEP),
    ("best visits", ("ablations_200M", "best_visits"), SWEEP),
)
"""Printed figures that no pair can show."""
