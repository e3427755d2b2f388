"""The list of probes: a new probe is one file and one name here, among those that read or those that run."""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smelt_interp.errors import UserError, shown
from smelt_interp.sites import nearest

if TYPE_CHECKING:
    from probes.running.probe import Probe

NAMES = (
    "attention_sink",
    "projection_similarity",
    "expert_overlap",
    "expert_load",
    "expert_tokens",
    "residual_updates",
    "massive_activations",
    "representation_similarity",
    "dyck_icl",
    "domain_loss",
    "length_gain",
)
"""Probes that answer from a capture as from a running network."""
APART: tuple[str, ...] = ("induction",)
"""The same, of samples that no other probe is measured on: `python -m probes` leaves them out."""
RUNNING: tuple[str, ...] = (
    "ablation",
    "logit_lens",
    "logit_attribution",
    "orbit",
    "early_exit",
    "weight_gradients",
    "patching",
    "choice_tasks",
    "few_shot_gap",
)
"""Probes that run the network again, or read its weights: their commands take --ckpt alone."""


def load(name: str) -> "Probe":
    """The probe of that name. Raises UserError with the nearest valid names."""
    known = (*NAMES, *APART, *RUNNING)
    if name not in known:
        those = nearest(name, known) or f": {', '.join(known)}"  # last, as a long line loses its middle
        raise UserError(f"a probe must be one of those that there are; got {shown(name)}{those}")
    return cast("Probe", import_module(f"probes.{name}"))


def title(name: str) -> str:
    """The TITLE of a probe, read from its file: a list of titles need not import them all."""
    text = (Path(__file__).parents[1] / f"{name}.py").read_text(encoding="utf-8")
    (found,) = [line for line in text.splitlines() if line.startswith("TITLE = ")]
    return str(ast.literal_eval(found.removeprefix("TITLE = ")))
