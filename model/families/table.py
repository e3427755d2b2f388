"""The families that are known, by the `model_type` of their config. To add one: `docs/adding_a_family.md`."""

from model.families.family import Family
from model.families.llama import LLAMA

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen3": LLAMA,
}
