"""The families that are known, by the `model_type` of their config. To add one: `docs/adding_a_family.md`."""

from model.families.albert import ALBERT
from model.families.dory import DORY
from model.families.family import Family
from model.families.gpt2 import GPT2
from model.families.hrm_text import HRM_TEXT
from model.families.huginn import HUGINN
from model.families.inkling2_loop import INKLING2_LOOP
from model.families.llama import LLAMA
from model.families.mixtures import GPT_OSS, MIXTRAL, OLMOE, QWEN3_MOE
from model.families.open_mythos import OPEN_MYTHOS
from model.families.ouro import OURO

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "gpt2": GPT2,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
    "gpt_oss": GPT_OSS,
    "inkling2_loop_text": INKLING2_LOOP,
    "dory": DORY,
    "hrm_text": HRM_TEXT,
    "albert": ALBERT,
    "ouro": OURO,
    "huginn_raven": HUGINN,
    "open_mythos": OPEN_MYTHOS,
}
