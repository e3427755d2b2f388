"""The list of probes: a new probe is one file and one name here."""

from importlib import import_module
from typing import cast

from probes.running.probe import Probe
from smelt_interp.errors import UserError
from smelt_interp.sites import nearest

NAMES = (
    "attention_sink",
    "projection_similarity",
    "expert_overlap",
    "expert_load",
    "residual_updates",
    "massive_activations",
    "dyck_icl",
)


def load(name: str) -> Probe:
    """The probe of that name. Raises UserError with the nearest valid names."""
    if name not in NAMES:
        raise UserError(f"a probe must be one of {', '.join(NAMES)}; got {name!r}{nearest(name, NAMES)}")
    return cast(Probe, import_module(f"probes.{name}"))
