"""Captures that tests of the dashboard look at: Dyck episodes with a planted start mass on each visit."""

from dataclasses import asdict, replace

from cache.batch import Batch
from cache.record import DEFAULT_SITES
from cache.store import Capture
from probes.answer_lens import FILE, SCHEMA, Episode
from probes.running.report import json_text, write_text
from smelt_interp.config import ModelConfig
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.plan import label
from tests.support.planted import LOOPED, planted_batch, random_sites, start_pattern

VISIT_MASS = (0.6, 0.02)
"""Planted start mass on the first and the second visit."""


def episodes(config: ModelConfig = LOOPED, *, seed: int = 0, first_mass: float = VISIT_MASS[0]) -> Batch:
    """Three Dyck episodes; attention has the planted start mass, everything else is random."""
    samples = load_samples(DataOptions(samples=3, length=48, shots=(2,), max_total=6), 48, BYTES)
    batch = planted_batch(config, samples, random_sites(config, samples, DEFAULT_SITES, seed=seed))
    mass = (first_mass, *VISIT_MASS[1:])
    patterns = {
        (index, "attn.hook_pattern"): start_pattern(samples, config.num_heads, mass[step.visit])
        for index, step in enumerate(batch.architecture.steps)
    }
    return replace(batch, sites={**batch.sites, **patterns})


def plant_answers(capture: Capture, wrong: tuple[int, ...] = (1,)) -> None:
    """Beside a capture of these episodes, answers of which these are wrong, as the command keeps them."""
    names, states = list(map(label, capture.architecture.steps)), len(capture.architecture.steps) + 1
    episodes = [
        Episode(
            sample=sample, right=sample not in wrong, shots=2, depth=1, tokens=(")", "\\n"),
            rank={"stream": [[2, 2]] * (states - 1) + [[1, 1 + (sample in wrong)]]},
            probability={"stream": [[0.1, 0.2]] * states}, top={"stream": [["(", ")"]] * states},
        )
        for sample in range(3)
    ]  # fmt: skip
    rows = [
        {"level": "layer", "quantity": "probability", "lens": "stream", "layers": name.split()[1].rstrip(","),
         "visit": int(name.split()[-1]), "value": 0.5, "low": 0.4, "high": 0.6, "n": 2, "null_entering": 0.1,
         "in_wrong": 0.3, "in_wrong_low": None, "in_wrong_high": None, "note": ""}
        for name in names
    ]  # fmt: skip
    document = {"schema": SCHEMA, "probe": "answer_lens", "title": "Answers", "options": {}, "rows": rows,
                "networks": [{"digest": capture.digest}], "episodes": [asdict(each) for each in episodes],
                "command": "python -m probes.answer_lens"}  # fmt: skip
    write_text(capture.path / "results" / FILE, json_text(document))
