"""Lets code of a checkpoint that was written for transformers 4 run under 5, its files as they are.

Two things have other forms since: tied weights are a mapping to what they are tied to, not a list; and an output that
is made with `past_key_values` gets it as `cache`, which an output class of the checkpoint's own does not know.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from model.families.family import Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def adapt(config: "PretrainedConfig", folder: Path, family: Family) -> None:
    """Change the classes that the folder's code has made; transformers takes these very ones when it loads it, and not
    those that another folder with the same config class has brought before."""
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils import ModelOutput

    code: dict[str, str] = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" not in code:
        return  # transformers says what is missing
    network = get_class_from_dynamic_module(code["AutoModelForCausalLM"], str(folder), local_files_only=True)
    AutoModelForCausalLM.register(type(config), network, exist_ok=True)
    if isinstance(tied := getattr(network, "_tied_weights_keys", None), list):
        network._tied_weights_keys = dict.fromkeys(tied, f"{family.embedding}.weight")
    for made in vars(sys.modules[network.__module__]).values():
        if not (isinstance(made, type) and issubclass(made, ModelOutput) and made.__module__ == network.__module__):
            continue
        as_written = getattr(vars(made).get("__init__"), "__wrapped__", None)  # beneath what renames its arguments
        if as_written and "past_key_values" in {field.name for field in fields(made)}:
            type.__setattr__(made, "__init__", as_written)
